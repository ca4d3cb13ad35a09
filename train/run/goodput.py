"""The cost of a run's faults, computed from metrics.jsonl without torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from train.observe.lines import read_back
from train.run_folder.ownership import Lease
from train.storage.folders import Folder


@dataclass(frozen=True)
class Lost:
    """The cost of the fault that ended the last attempt."""

    reason: str
    steps: int
    last_sign_unix_s: float


def lost(
    run: Folder,
    outcome: dict[str, Any],
    last_lease: Lease | None,
    *,
    attempt: int,
    step: int,
) -> Lost | None:
    """Return the cost of the fault that ended the attempt before `attempt`. `attempt` starts at `step`.

    Returns None if there was no previous attempt, or it ended without a fault. `outcome` is the previous attempt's
    outcome ({} if it wrote none), and `last_lease` has the step of its last heartbeat. The count of lost steps is a
    lower bound, since the last steps may have left no trace. Only the previous attempt's lines are read.
    """
    lines = (line for line in read_back(run) if line["attempt"] < attempt)
    newest = next(lines, None)
    if newest is None or (
        outcome.get("outcome") in ("done", "stopped") and outcome.get("kind") != "left_at_once"
    ):
        return None
    reached = 0
    for line in chain([newest], lines):
        if line["attempt"] != newest["attempt"]:
            break
        if line["kind"] in ("train", "checkpoint"):
            reached = max(reached, line["step"])
            if line["step"] <= step:
                break
    if last_lease is not None and not last_lease.released:
        reached = max(reached, last_lease.step)
    reason = outcome.get("reason", "killed, without an outcome")
    text = f"the last attempt ended ({reason}) at step {reached} or later"
    return Lost(text, max(0, reached - step), newest["time_unix_s"])


def newest_saved(run: Folder) -> int | None:
    """Return the newest step whose checkpoint was committed, None if there is none."""
    lines = read_back(run, containing=b'"checkpoint"')
    return next((line["step"] for line in lines if line["kind"] == "checkpoint"), None)
