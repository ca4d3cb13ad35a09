"""The manifest of a checkpoint: its files' checksums, and the run's progress. Importing this does not import torch."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from train.config import Failure
from train.storage.checksums import fault_of_file, sealed, unsealed
from train.storage.folders import canonical_json
from train.storage.schema import FileEntry, FileName, read_object, record, shown

FORMAT = 5
FILE = "manifest.json"
# a file that a rank other than rank 0 wrote
PART = re.compile(r"(?:model|optimizer)_(\d{5,})\.pt")


class Damaged(RuntimeError):
    """An error raised because a checkpoint does not match its manifest, or has no readable manifest."""


class NoneValid(Failure):
    """An error raised because checkpoints exist but none is valid."""


class Untrusted(Failure):
    """An error raised because a checkpoint with the right checksums contains code, or does not fit the model."""


class OtherVersion(Failure):
    """An error raised because this version cannot read the format of a checkpoint. The checkpoint is not changed."""


@dataclass
class Progress:
    step: int = 0  # optimizer steps done, including skipped steps
    lr: float | None = None  # learning rate of the last step
    # sequences drawn by all ranks: the position in the data; a rollback does not reset it
    examples: int = 0
    lanes: int | None = None  # number of lanes in the data order; None: not yet chosen
    # number of shards shuffled together in each lane; None: not yet chosen
    window_shards: int | None = None
    # the best value of best_metric so far, negated if higher is better
    best_loss: float | None = None
    best_metric: str = "loss"
    best_step: int | None = None
    evals_since_best: int = 0
    # by step: the settings that the best and the last evaluation have chosen for exports of their weights
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    # whether this step must still be evaluated: a request to stop left no time
    owes_evaluation: bool = False
    rollbacks: int = 0
    skipped: int = 0  # steps whose gradient was not finite
    productive_s: float = 0.0  # training time in seconds, excluding steps lost to failures
    # sums of metrics since the last line of metrics.jsonl
    window: dict[str, float] = field(default_factory=dict)

    def advance(self, examples: int, lr: float) -> None:
        """Count a step at the learning rate `lr`, in which all ranks together drew `examples` sequences."""
        self.step += 1
        self.examples += examples
        self.lr = lr

    def keep(self, chosen: dict[str, Any]) -> None:
        """Keep what the evaluation of this step has chosen, beside that of the best step. Call `saw` first."""
        kept = self.chosen.get(str(self.best_step))
        if kept:
            self.chosen = {str(self.best_step): kept}
        else:
            self.chosen = {}
        if chosen:
            self.chosen[str(self.step)] = chosen

    def saw(self, score: float, metric: str = "loss") -> bool:
        """Record an evaluation. Returns whether its score is the best (the lowest) of this metric so far."""
        before = self.best_loss if metric == self.best_metric else None
        is_better = not math.isnan(score) and (before is None or score < before)
        self.evals_since_best += 1
        if is_better:
            self.evals_since_best = 0
            self.best_metric = metric
            self.best_loss = score
            self.best_step = self.step
        return is_better


@dataclass(frozen=True)
class Manifest:
    step: int
    fence: int  # number of the lease under which the checkpoint was written
    identity: dict[str, Any]  # settings that must not change when the run resumes
    settings: dict[str, Any]  # all settings by their full names, such as "optim.lr"
    progress: dict[str, Any]
    world_size: int
    backend: str
    # value of best.metric at this step, negated if higher is better; None: not evaluated
    metric: float | None
    versions: dict[str, Any] = field(default_factory=dict)
    files: dict[FileName, FileEntry] = field(default_factory=dict)
    folder: FileName | None = None  # the step's subfolder with the files, if it was saved in S3

    @property
    def num_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    def only(self, names: Collection[str] | None) -> Manifest:
        """Return the manifest with only the files `names`; None keeps all files."""
        files = {
            name: entry for name, entry in self.files.items() if names is None or name in names
        }
        return replace(self, files=files)

    def files_of(self, content: str) -> list[FileName]:
        """Return the names of the "model" or "optimizer" files. Rank 0's is first, even if the manifest lacks it."""
        others = [name for name in self.files if rank_of(name) and name.startswith(f"{content}_")]
        return [file_name(content, 0), *sorted(others)]

    def to_json(self) -> bytes:
        content = {"format": FORMAT, **asdict(self), "folder": self.folder or ""}
        return canonical_json(sealed(content))

    @classmethod
    def from_json(cls, content: bytes, *, step: int | None = None) -> Manifest:
        """Parse a manifest. Raises Damaged if it is invalid or not for `step`, OtherVersion on an unknown format."""
        try:
            body = read_object(content)
            if isinstance(body.get("format"), int) and body["format"] != FORMAT:
                raise OtherVersion(
                    f"the checkpoint of step {shown(body.get('step'))} has format {body['format']}; this version "
                    f"reads {FORMAT}; resume with the version that wrote it, or choose another "
                    "run_dir"
                )
            body = unsealed(body)
            body.pop("format", None)
            manifest = record(cls, {**body, "folder": body.get("folder") or None})
            record(Progress, manifest.progress, "progress")
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{FILE} cannot be read: {error}") from error
        if step not in (None, manifest.step):
            raise Damaged(f"{FILE} is for step {manifest.step}, not {step}")
        return manifest


def chosen_at(step: int, manifests: Mapping[int, Manifest]) -> dict[str, Any]:
    """Return the settings that the evaluation of a step has chosen; {} if there are none.

    A step that was evaluated after it was saved is described by later checkpoints.
    """
    for _, manifest in sorted(manifests.items()):
        chosen: dict[str, Any] = manifest.progress.get("chosen", {}).get(str(step))
        if chosen:
            return chosen
    return {}


def file_name(content: str, rank: int) -> FileName:
    return FileName(f"{content}_{rank:05d}.pt" if rank else f"{content}.pt")


def rank_of(name: str) -> int:
    """Return the rank that wrote a file."""
    match = PART.fullmatch(name)
    if match:
        return int(match[1])
    return 0


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a folder's name; None for other names."""
    match = re.fullmatch("step_([0-9]{1,18})", name)
    if match:
        return int(match[1])
    return None


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise Damaged unless all files in `folder` have the lengths and checksums in the manifest."""
    try:
        for checksum in (False, True):  # all lengths are compared before the first file is read
            for name, entry in manifest.files.items():
                if (fault := fault_of_file(folder / name, entry, checksum=checksum)) is not None:
                    raise Damaged(f"{name} {fault}")
    except OSError as error:
        # EIO: the data is lost; other errors (a stale NFS handle) may be temporary
        if error.errno != errno.EIO:
            raise
        raise Damaged(f"{error.filename}: {error.strerror}") from error
