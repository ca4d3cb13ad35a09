"""What is said of a checkpoint, and how to tell that it is true. No torch here."""

from __future__ import annotations

import errno
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from train.checkpoints.progress import Progress
from train.config import Failure
from train.storage import canonical_json, sha256_file, sha256_json
from train.untrusted import BadContent, FileEntry, FileName, read_object, record, shown

FORMAT = 2
FILE = "manifest.json"
LATEST = "LATEST"


class Damaged(RuntimeError):
    """A checkpoint is not what its manifest says, or has none that can be read."""


class NoneValid(Failure):
    """There are checkpoints, and none can be loaded."""


class Untrusted(Failure):
    """A checkpoint holds more than tensors and plain containers."""


class OtherVersion(Failure):
    """A checkpoint is of a format that this version does not read. It is left as it is."""


@dataclass(frozen=True)
class Manifest:
    step: int
    fence: int  # the number of the lease under which it was written
    identity: dict[str, Any]  # of the run: what may not change when it goes on
    settings: dict[str, Any]  # all of them, flat: "optim.lr"
    progress: dict[str, Any]
    world_size: int
    backend: str
    metric: float | None  # of an evaluation of this step, lower is better: best.metric, or minus that
    versions: dict[str, Any] = field(default_factory=dict)
    files: dict[FileName, FileEntry] = field(default_factory=dict)
    folder: FileName | None = None  # in S3: where the files are, below the step

    @property
    def num_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    def to_json(self) -> bytes:
        content = {"format": FORMAT, **asdict(self), "folder": self.folder or ""}
        return canonical_json({**content, "sha256": sha256_json(content)})

    @classmethod
    def from_json(cls, content: bytes) -> Manifest:
        """Raises Damaged unless it is whole and all that it says is possible, OtherVersion if its format is another."""
        try:
            found = read_object(content)
            told = found.pop("sha256", None)
            if isinstance(found.get("format"), int) and found["format"] != FORMAT:
                raise OtherVersion(
                    f"the checkpoint of step {shown(found.get('step'))} is of format {found['format']}, this version "
                    f"reads {FORMAT}; go on with the version that wrote it, or choose another run_dir"
                )
            if told != sha256_json(found):
                raise Damaged(f"{FILE} does not match its own checksum")
            if found.pop("format", None) != FORMAT:
                raise BadContent("it does not say its format")
            manifest = record(cls, {**found, "folder": found.get("folder") or None})
            record(Progress, manifest.progress, "progress")
            return manifest
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{FILE} cannot be read: {error}") from error


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a folder's name; None for other names."""
    match = re.fullmatch("step_([0-9]{1,18})", name)
    return int(match[1]) if match else None


def check_sizes(sizes: dict[str, int | None], manifest: Manifest) -> None:
    """Raises Damaged for the first file that is missing or of another length."""
    for name, entry in manifest.files.items():
        found = sizes.get(name)
        if found is None:
            raise Damaged(f"{name} is missing")
        if found != entry["bytes"]:
            raise Damaged(f"{name} has {found} bytes, not {entry['bytes']}")


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises Damaged unless all files in `folder` have their length and checksum."""
    try:
        check_sizes({name: size_of(folder / name) for name in manifest.files}, manifest)
        for name, entry in manifest.files.items():
            if sha256_file(folder / name) != entry["sha256"]:
                raise Damaged(f"{name} does not match its checksum")
    except OSError as error:
        if error.errno != errno.EIO:  # of a disk that has lost the data; others, as a stale NFS handle, may pass
            raise
        raise Damaged(f"{error.filename}: {error.strerror}") from error


def size_of(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None
