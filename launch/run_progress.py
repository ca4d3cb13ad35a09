"""The progress of a run, read from its folder, whose content is not trusted. The folder is not changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launch.values import count, number, table
from train.observe.lines import read_back
from train.run_folder.exported import saved_steps
from train.run_folder.identity import ENVIRONMENT
from train.run_folder.outcome import read_outcome
from train.run_folder.ownership import newest_lease, parse_lease
from train.storage.folders import Folder
from train.storage.schema import BadContent, read_object

# Bytes read from the end of metrics.jsonl: about 10,000 lines.
TAIL_BYTES = 2**22

Line = dict[str, Any]


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run. None means unknown."""

    exists: bool = False  # whether the trainer has written environment.json
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    cost_usd: float | None = None  # cost of all attempts, up to the last train line
    step_s: float | None = None  # mean time from step to step, including evaluations and saves
    line_unix_s: float | None = None  # when the last line was written
    checkpoint: int | None = None  # step of the newest committed checkpoint
    outcome: dict[str, Any] | None = None  # the content of outcome.json


def read_progress(run: Folder) -> RunProgress:
    """Read the progress of a run from its folder, which need not exist yet. Damaged files count as missing."""
    names = run.names_here()
    lines = list(read_back(run, limit_bytes=TAIL_BYTES))  # the newest comes first
    trained = of_kind(lines, "train")
    newest_line = next(iter(lines), {})
    last = next(iter(trained), {})
    summary = next(iter(of_kind(lines, "summary")), {})
    planned = count(table(read_environment(run), "plan"), "total_steps")
    return RunProgress(
        exists=ENVIRONMENT in names,
        attempt=newest_line.get("attempt"),
        step=newest_step(run, lines, has_lease="lease" in names),
        total_steps=count(summary, "steps_total") or planned or None,
        loss=number(last, "loss"),
        tokens_per_s=number(last, "tokens_per_s"),
        cost_usd=number(last, "cost_usd"),
        step_s=mean_step_s([line for line in trained if line["attempt"] == last["attempt"]]),
        line_unix_s=number(newest_line, "time_unix_s"),
        checkpoint=newest_checkpoint(run),
        outcome=read_outcome(run) or None,
    )


def of_kind(lines: list[Line], kind: str) -> list[Line]:
    return [line for line in lines if line["kind"] == kind]


def read_environment(run: Folder) -> dict[str, Any]:
    try:
        return read_object(run.read(ENVIRONMENT))
    except (FileNotFoundError, BadContent):
        return {}


def newest_step(run: Folder, lines: list[Line], *, has_lease: bool) -> int | None:
    # Skip fault lines: a fault may occur before the first step.
    step = next((line["step"] for line in lines if line["kind"] != "fault"), 0)
    if has_lease:
        # If the run is in S3, its lease may have a newer step.
        lease = parse_lease(newest_lease(run)[1])
        step = max(step, lease.step if lease else 0)
    return step or None


def newest_checkpoint(run: Folder) -> int | None:
    """Return the step of the newest committed checkpoint, according to file names. No content is verified."""
    return max(saved_steps(run), default=None)


def mean_step_s(trained: list[Line]) -> float | None:
    """Return the mean seconds per step in an attempt's lines, newest first, including evaluations and saves."""
    if not trained:
        return None
    first = trained[-1]
    last = trained[0]
    begin_s = number(first, "time_unix_s")
    end_s = number(last, "time_unix_s")
    steps = last["step"] - first["step"]
    if begin_s is not None and end_s is not None and end_s > begin_s and steps > 0:
        return (end_s - begin_s) / steps
    return number(last, "step_s") or None
