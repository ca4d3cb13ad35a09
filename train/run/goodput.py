"""The cost of a run's faults and saves, and how often to save, computed from metrics.jsonl without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain
from typing import Any

from train.observe.lines import read_back, read_lines
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


def facts(
    run: Folder,
    *,
    wall_s: float | None,
    stall_s: float,
    save_s: float,
    step_s: float,
    max_loss_s: float,
) -> dict[str, float | None]:
    """Return fields of the summary line: the cost of faults so far, and how often to save."""
    lines = read_lines(run, containing=b'"steps_lost"')
    faults = [line for line in lines if line["kind"] == "fault" and "steps_lost" in line]
    if faults and wall_s is not None:
        mttf_s = wall_s / len(faults)
    else:
        mttf_s = None
    interval_s = suggested_interval_s(stall_s, mttf_s, max_loss_s=max_loss_s, save_s=save_s)
    return {
        "faults": len(faults),
        "steps_lost": sum(line["steps_lost"] for line in faults),
        "recover_s": sum(line["recover_s"] for line in faults),
        "wall_s": wall_s,
        "stall_s": stall_s,  # seconds per save, on average
        "mttf_s": mttf_s,
        "suggested_interval_s": interval_s,
        "suggested_every": max(1, round(interval_s / step_s)) if step_s else None,
    }


def suggested_interval_s(
    stall_s: float, mttf_s: float | None, *, max_loss_s: float, save_s: float = 0.0
) -> float:
    """Return the seconds between two saves: sqrt(2 * stall * mean time to failure).

    This is the first-order formula in J. T. Daly, "A higher order estimate of the optimum checkpoint interval", FGCS 22
    (2006), after J. W. Young, CACM 17 (1974). The result is at most `max_loss_s`, even if there was no fault so far
    (`mttf_s` None), and at least `save_s`.
    """
    if mttf_s is None:
        best_s = math.inf
    else:
        best_s = math.sqrt(2 * stall_s * mttf_s)
    return max(save_s, min(best_s, max_loss_s))


def newest_saved(run: Folder) -> int | None:
    """Return the newest step whose checkpoint was committed, None if there is none."""
    lines = read_back(run, containing=b'"checkpoint"')
    return next((line["step"] for line in lines if line["kind"] == "checkpoint"), None)
