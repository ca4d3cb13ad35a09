"""The word that a run leaves of how it ended, by which launchers, and restarts by torchrun, judge. No torch here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from train.launched import launched

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


def may_go_on(kind: str, previous: str) -> bool:
    """Whether a failure of this kind, after one of the kind `previous`, leaves the same command a chance. Memory may
    run out because of a neighbour: once more, but no more.
    """
    return kind not in FOR_GOOD and not (kind in OUT_OF_MEMORY and kind == previous)


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
