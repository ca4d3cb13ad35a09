"""The word that a run leaves of how it ended, by which launchers, and restarts by torchrun, judge. No torch here."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from train.launched import launched
from train.storage import Folder, canonical_json

NAME = "outcome.json"
FOR_GOOD = ("refused", "no_valid_checkpoint", "untrusted_checkpoint", "other_version", "not_finite", "lease_lost")
OUT_OF_MEMORY = ("out_of_device_memory", "out_of_host_memory")


@dataclass(frozen=True)
class Outcome:
    outcome: str  # done | stopped | failed | refused
    kind: str  # of a failure: its short name; of a stop or an end: the reason
    reason: str
    step: int | None  # reached
    checkpoint: int | None  # the newest that is known to be committed: nothing up to there is lost
    goes_on: bool  # whether the same command has a chance to go on
    launch: list[str] = field(default_factory=lambda: launched().torchrun)  # of which torchrun
    time_unix_s: float = field(default_factory=lambda: round(time.time(), 1))


KEYS = {each.name for each in fields(Outcome)}


def may_go_on(kind: str, previous: str) -> bool:
    """Whether a failure of this kind, after one of the kind `previous`, leaves the same command a chance. Memory may
    run out because of a neighbour: once more, but no more.
    """
    return kind not in FOR_GOOD and not (kind in OUT_OF_MEMORY and kind == previous)


def write_outcome(
    folder: Folder, outcome: Outcome, *, replaces: Collection[str] = (), replaces_all: bool = False
) -> None:
    """The first one stays, unless its kind is one of those that are replaced; then what it says of checkpoints does."""
    if replaces_all:
        folder.write(NAME, canonical_json(asdict(outcome)))
    elif not folder.create(NAME, canonical_json(asdict(outcome))):
        found = read_outcome(folder)
        if found and found["kind"] in replaces:
            folder.write(NAME, canonical_json(asdict(replace(outcome, checkpoint=found["checkpoint"]))))


def read_outcome(folder: Folder) -> dict[str, Any]:
    """How the last attempt ended; empty if it left no record, or one that is damaged or somebody else's."""
    try:
        content = folder.read(NAME)
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.keys() >= KEYS else {}


class Over(RuntimeError):
    """torchrun has restarted a run for which that is no use: for it, whatever does not exit with 0 has failed."""

    def __init__(self, outcome: dict[str, Any]) -> None:
        super().__init__(f"not started again: it {outcome['outcome']} ({outcome['reason']})")
        self.outcome = str(outcome["outcome"])


def is_restart() -> bool:
    return launched().restart_count > 0


def check_restart(outcome: dict[str, Any]) -> None:
    """Raises Over if the last outcome, empty if there is none, is of this torchrun, and for good. Who gets a SIGTERM
    and is started again was ended by torchrun itself, for ranks elsewhere: had it been meant, torchrun would be gone.
    """
    if not outcome or outcome["launch"] != launched().torchrun or outcome["kind"] == "SIGTERM":
        return
    if not (outcome["goes_on"] and outcome["outcome"] == "failed"):
        raise Over(outcome)
