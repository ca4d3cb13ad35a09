"""The interface of a run's store of checkpoints, and the store on disk. Importing this does not import torch.

The disk must be shared by all ranks. A step is written to a temporary folder; renaming the folder commits the step.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from train.checkpoints.manifest import (
    FILE,
    Damaged,
    Manifest,
    check_files,
    step_name,
    step_of,
)
from train.config import InputError
from train.storage.atomic_io import (
    begin_folder,
    publish_folder,
    remove_folder,
    remove_temporaries,
    sync,
    write_atomic,
)
from train.storage.checksums import fault_of
from train.storage.folders import LocalFolder, at_once, check_space
from train.storage.foreign import read_whole
from train.storage.schema import FileName

Looked = tuple[dict[int, Manifest], dict[int, Damaged]]  # valid manifests and faults, both by step
TEMPORARIES = r"step_\d{8,}"


class Store(Protocol):
    """The checkpoints of a run, by step. A damaged checkpoint is renamed (put in quarantine), never deleted.

    A save calls `begin` on rank 0, `join` on other ranks that have a part of the state, `prepare` on rank 0, `send` on
    each rank that wrote files, and `commit` on rank 0. A load calls `look` on rank 0, and then `fetch`, `path_of` and
    `release` on each machine. Methods that a store on disk does not need do nothing by default.
    """

    location: str

    def steps(self) -> list[int]:
        """Return all steps in ascending order, including damaged ones."""

    def quarantined(self) -> list[str]:
        """Return the names of the checkpoints in quarantine."""

    def manifest(self, step: int) -> Manifest:
        """Read a step's manifest. Raises Damaged if it is missing or invalid."""

    def look(self, step: int) -> Manifest:
        """Return a step's manifest. Raises Damaged if the manifest is invalid, or if a file's length differs."""

    def look_at_all(self) -> Looked:
        """Return the manifests of steps whose files have the right lengths, and the faults of other steps."""
        manifests: dict[int, Manifest] = {}
        damaged: dict[int, Damaged] = {}
        for step in self.steps():
            try:
                manifests[step] = self.look(step)
            except Damaged as error:
                damaged[step] = error
        return manifests, damaged

    def fetch(self, step: int, names: Collection[str] | None = None) -> Path:
        """Return a local folder with the step's files `names` (None: all). Raises Damaged if a checksum differs."""

    def path_of(self, manifest: Manifest) -> Path:
        """Return the local folder that contains the step's files after `fetch`."""

    def release(self, fetched: Path) -> None:
        """Remove the files that `fetch` copied."""
        return

    def begin(self, step: int, num_bytes: int) -> Path:
        """Make an empty local folder for rank 0's files of a step. Raises OSError if the disk lacks space."""

    def join(self, name: str, num_bytes: int) -> Path:
        """Return the local folder for the files of another rank. `name` is the name of rank 0's folder.

        Raises OSError if the disk lacks space or, on a shared disk, if rank 0's folder is gone.
        """

    def prepare(self, manifest: Manifest) -> Manifest:
        """Return the manifest to commit. In S3, it also names the folder to upload to."""
        return manifest

    def send(self, folder: Path, manifest: Manifest, names: list[FileName]) -> None:
        """Upload a rank's files if the store is in S3. They must already be synced to the local disk."""
        return

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        """Commit a step, so that readers see it. All ranks must have sent their files."""

    def quarantine(self, step: int, why: str) -> str:
        """Rename a step so that readers ignore it, and return the new name, which contains `why`."""

    def remove(self, step: int) -> None: ...

    def remove_uncommitted(self, leases: range, *, dry: bool = False) -> list[str]:
        """Remove the files of uncommitted saves that began under `leases`. All these saves must have ended.

        Returns the names of their folders; `dry` removes nothing. On disk, a failed save has already removed its files.
        """
        return []

    def leftovers(self) -> list[str]:
        """Return the folder names of saves that are not committed, whether running or killed."""
        return self.remove_uncommitted(range(sys.maxsize), dry=True)

    def collect_garbage(self, *, ended_below: int) -> list[str]:
        """Remove leftovers of saves under leases below `ended_below`; return their names. Only the owner calls this."""


class LocalStore(Store):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)

    def steps(self) -> list[int]:
        if self.path.is_dir():
            numbers = [step_of(path.name) for path in self.path.iterdir()]
        else:
            numbers = []
        return sorted(step for step in numbers if step is not None)

    def quarantined(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("step_*.*"))

    def manifest(self, step: int) -> Manifest:
        try:
            content = read_whole(self.path / step_name(step) / FILE, self.path)
        except (FileNotFoundError, NotADirectoryError) as error:  # other errors may be temporary
            raise Damaged(f"{FILE}: {error.strerror}") from error
        except InputError as error:
            raise Damaged(str(error)) from error
        return Manifest.from_json(content, step=step)

    def look(self, step: int) -> Manifest:
        manifest = self.manifest(step)
        # a shared disk may answer slowly
        sizes = at_once(LocalFolder(self.path_of(manifest)).size, manifest.files)
        compare_sizes(manifest, dict(zip(manifest.files, sizes, strict=True)))
        return manifest

    def fetch(self, step: int, names: Collection[str] | None = None) -> Path:
        manifest = self.manifest(step)
        check_files(self.path_of(manifest), manifest.only(names))
        return self.path_of(manifest)

    def path_of(self, manifest: Manifest) -> Path:
        # a step copied from S3 has a subfolder
        return self.path / step_name(manifest.step) / (manifest.folder or "")

    def begin(self, step: int, num_bytes: int) -> Path:
        folder = begin_folder(self.path / step_name(step))
        check_space(folder, num_bytes)
        return folder

    def join(self, name: str, num_bytes: int) -> Path:
        check_space(self.path / name, num_bytes)
        # not created if missing: a new owner may have removed it to stop the save
        return self.path / name

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        # If a new owner of the run folder has removed `scratch`, this fails and changes nothing.
        # also syncs the folder, whose files are already synced
        write_atomic(scratch / FILE, manifest.to_json())
        path = self.path_of(manifest)
        try:
            publish_folder(scratch, path)
        except FileExistsError:
            self.quarantine(manifest.step, "replaced")
            publish_folder(scratch, path)

    def quarantine(self, step: int, why: str) -> str:
        path = self.path / step_name(step)
        target = path.with_name(f"{path.name}.{why}-{uuid.uuid4().hex[:8]}")
        path.rename(target)
        sync(self.path)
        return target.name

    def remove(self, step: int) -> None:
        remove_folder(self.path / step_name(step))

    def leftovers(self) -> list[str]:
        return remove_temporaries(self.path, TEMPORARIES, dry=True)

    def collect_garbage(self, *, ended_below: int) -> list[str]:
        # Leases do not matter here: a save whose folder was removed can no longer be committed.
        return remove_temporaries(self.path, TEMPORARIES)


def compare_sizes(manifest: Manifest, sizes: Mapping[FileName, int | None]) -> None:
    """Raise Damaged unless all files of a step exist and have the lengths in the manifest."""
    for name, entry in manifest.files.items():
        if (fault := fault_of(entry, sizes.get(name))) is not None:
            raise Damaged(f"{name} {fault}")
