"""outcome.json: the record of how an attempt ended, for launchers and torchrun's restarts. Does not import torch."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from train.machine.launched import launched
from train.storage.folders import Folder, canonical_json
from train.storage.schema import BadContent, read_object, record

NAME = "outcome.json"
STOP_FILE = "STOP"  # a file in the run folder that makes the run save a checkpoint and stop at its next step
ENDS = ("done", "early_stop")  # kinds of outcome after which a run is complete
FOR_GOOD = (
    "refused",
    "no_valid_checkpoint",
    "untrusted_checkpoint",
    "other_version",
    "not_finite",
    "lease_lost",
)
WRITTEN_UNIX_S = 1_767_225_600.0  # 2026-01-01: a clock that shows an earlier time is wrong
OUT_OF_MEMORY = ("out_of_device_memory", "out_of_host_memory", "out_of_shared_memory")


@dataclass(frozen=True)
class Outcome:
    outcome: str  # done | stopped | failed | refused
    kind: str  # the reason as an identifier, for programs
    reason: str
    step: int | None  # the last step that the run reached
    checkpoint: int | None  # the newest step known to be committed; the work up to it is safe
    goes_on: bool  # whether the same command may succeed
    # identifies this attempt's torchrun
    launch: list[str] = field(default_factory=lambda: launched().torchrun)
    time_unix_s: float = field(default_factory=lambda: round(time.time(), 1))


def may_continue(kind: str, previous: str) -> bool:
    """Return whether the same command may succeed after a failure of this `kind`.

    `previous` is the kind of the previous attempt's outcome. If memory ran out, one more attempt is allowed, since
    another program may have taken the memory.
    """
    return kind not in FOR_GOOD and not (kind in OUT_OF_MEMORY and kind == previous)


def write_outcome(
    folder: Folder, outcome: Outcome, *, replaces: Collection[str] = (), replaces_all: bool = False
) -> bool:
    """Write the outcome unless one exists, and return whether it was written."""
    # An existing outcome whose kind is in `replaces` is replaced, but its checkpoint is kept.
    if replaces_all:
        folder.write(NAME, canonical_json(asdict(outcome)))
    elif not folder.create(NAME, canonical_json(asdict(outcome))):
        first = read_outcome(folder)
        if first and first["kind"] not in replaces:
            return False
        checkpoint = first.get("checkpoint", outcome.checkpoint)
        folder.write(NAME, canonical_json(asdict(replace(outcome, checkpoint=checkpoint))))
    return True


def read_outcome(folder: Folder) -> dict[str, Any]:
    """Return the outcome of the last attempt; {} if it left none, or if another program wrote the file."""
    with suppress(FileNotFoundError, BadContent):
        return asdict(record(Outcome, read_object(folder.read(NAME))))
    return {}


def what_is_over(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return the last outcome if this torchrun's run ended for good, so that a restart cannot help; otherwise {}.

    torchrun treats every exit code but 0 as a failure, and restarts the run. A stop by SIGTERM is not final: torchrun
    itself sends SIGTERM to ranks that it restarts after a rank on another machine failed.
    """
    if not outcome or outcome["launch"] != launched().torchrun or outcome["kind"] == "SIGTERM":
        return {}
    if outcome["goes_on"] and outcome["outcome"] == "failed":
        return {}
    return outcome
