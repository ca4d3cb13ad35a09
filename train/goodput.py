"""What faults and saves cost a run, and how often it should save. Out of metrics.jsonl, over all lives; no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Lost:
    """What the fault that ended the last life cost."""

    reason: str
    steps: int
    last_sign_unix_s: float


def lost(metrics: Path, outcome: dict[str, Any], beaten: dict[str, Any] | None, step: int) -> Lost | None:
    """None if there was no life before, or it ended in order. `outcome`: its outcome.json; `beaten`: its lease, which
    tells the step of its last heartbeat; `step`: where this life begins. At least so many steps were lost: the last
    ones may have left no trace.
    """
    lines = list(read(metrics))
    if not lines or (outcome.get("outcome") in ("done", "stopped") and outcome.get("kind") != "left_at_once"):
        return None
    ends = [place for place, line in enumerate(lines) if is_recovery(line) or line["kind"] == "summary"]
    begin = max(ends, default=-1)
    reached = max((line["step"] for line in lines[begin + 1 :] if line["kind"] in ("train", "checkpoint")), default=0)
    if beaten is not None and not beaten.get("released"):
        reached = max(reached, int(beaten["step"]))
    ended = outcome.get("reason", "killed without a word")
    return Lost(
        f"the last life ended ({ended}) at step {reached} or later", max(0, reached - step), lines[-1]["time_unix_s"]
    )


def facts(
    metrics: Path, *, wall_s: float, stall_s: float, save_s: float, step_s: float, max_loss_s: float
) -> dict[str, float | None]:
    """For the summary."""
    faults = [line for line in read(metrics) if is_recovery(line)]
    mttf_s = wall_s / len(faults) if faults else None
    interval_s = suggested_interval_s(stall_s, mttf_s, max_loss_s=max_loss_s, save_s=save_s)
    return {
        "faults": len(faults),
        "steps_lost": sum(line["steps_lost"] for line in faults),
        "recover_s": sum(line["recover_s"] for line in faults),
        "wall_s": wall_s,
        "stall_s": stall_s,  # of a save, on average
        "mttf_s": mttf_s,
        "suggested_interval_s": interval_s,
        "suggested_every": max(1, round(interval_s / step_s)) if step_s else None,
    }


def suggested_interval_s(stall_s: float, mttf_s: float | None, *, max_loss_s: float, save_s: float = 0.0) -> float:
    """Between two saves: sqrt(2 * stall * mean time to failure), the first order of
    J. T. Daly, "A higher order estimate of the optimum checkpoint interval", FGCS 22 (2006), after J. W. Young, CACM 17
    (1974). Never more than may be lost, never less than a save takes. Without a fault so far, what may be lost.
    """
    best_s = math.inf if mttf_s is None else math.sqrt(2 * stall_s * mttf_s)
    return max(save_s, min(best_s, max_loss_s))


def newest_saved(metrics: Path) -> int | None:
    """The last step that was committed, if any."""
    return max((line["step"] for line in read(metrics) if line["kind"] == "checkpoint"), default=None)


def is_recovery(line: dict[str, Any]) -> bool:
    """Whether a line tells what a fault cost; one was written for each."""
    return line["kind"] == "fault" and "steps_lost" in line


def read(metrics: Path) -> Iterator[dict[str, Any]]:
    """Lines of metrics.jsonl. What is no line, cut off at the end or damaged, is left out: no reason not to go on."""
    for text in metrics.read_bytes().splitlines() if metrics.is_file() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and {"kind", "step", "time_unix_s"} <= line.keys():
            yield line
