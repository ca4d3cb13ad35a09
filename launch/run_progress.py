"""What a run folder says of its run. It is only read, and may hold anything."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.values import count, moment, number, table, text
from train.run_folder.outcome import STOP_FILE, read_outcome
from train.run_folder.ownership import ENVIRONMENT, newest, parse
from train.storage.folders import Folder
from train.storage.schema import BadContent, read_object
from train.telemetry.lines import parse_lines

METRICS = "metrics.jsonl"
COMMITTED = re.compile(r"checkpoints/step_([0-9]{1,18})/manifest\.json")
NOT_SCORES = re.compile("attempt|step|examples|epoch|cost_usd|.*_s")  # the other numbers of an eval line
MOST_SCORES = 6
Line = dict[str, Any]


@dataclass(frozen=True)
class RunEnd:
    """outcome.json."""

    outcome: str
    kind: str
    reason: str
    step: int | None
    goes_on: bool
    time_unix_s: float | None


@dataclass(frozen=True)
class Progress:
    """None is unknown."""

    exists: bool = False  # whether the trainer has described the run there
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    goodput: float | None = None  # share of the time since the first start in steps that were not lost
    cost_usd: float | None = None  # of all attempts, up to the last line
    evaluated_step: int | None = None
    scores: dict[str, float] = field(default_factory=dict)
    step_s: float | None = None  # between steps, with evaluations and saves
    save_s: float | None = None  # of the last save
    line_unix_s: float | None = None  # when the last line was written
    checkpoint: int | None = None  # the newest step that is committed
    outcome: RunEnd | None = None
    has_stop_file: bool = False


def read_progress(run: Folder, *, planned_steps: int | None = None) -> Progress:
    """Read a run folder, which need not exist yet. What is damaged counts as missing."""
    names = run.names_here()
    lines = list(parse_lines(content_of(run, METRICS))) if METRICS in names else []
    lines = [line for line in lines if count(line, "attempt") is not None and count(line, "step") is not None]
    trained, evaluated, saves, ends = (
        [line for line in lines if line["kind"] == kind] for kind in ("train", "eval", "checkpoint", "summary")
    )
    plan = table(read_environment(run), "plan") if ENVIRONMENT in names else {}
    last = trained[-1] if trained else {}
    return Progress(
        exists=ENVIRONMENT in names,
        attempt=lines[-1]["attempt"] if lines else None,
        step=reached(lines, run if "lease" in names else None),
        total_steps=(count(ends[-1], "steps_total") if ends else None) or count(plan, "total_steps") or planned_steps,
        loss=number(last, "loss"),
        tokens_per_s=number(last, "tokens_per_s"),
        mfu=number(last, "mfu"),
        goodput=newest_of(lines, "goodput"),
        cost_usd=newest_of(lines, "cost_usd"),
        evaluated_step=count(evaluated[-1], "step") if evaluated else None,
        scores=scores(evaluated[-1]) if evaluated else {},
        step_s=step_s(trained),
        save_s=newest_of(saves, "save_s"),
        line_unix_s=moment(lines[-1], "time_unix_s") if lines else None,
        checkpoint=newest_checkpoint(run) if "checkpoints" in names else None,
        outcome=read_end(run) if "outcome.json" in names else None,
        has_stop_file=STOP_FILE in names,
    )


def content_of(run: Folder, name: str) -> bytes:
    try:
        return run.read(name)
    except FileNotFoundError:  # removed meanwhile
        return b""


def read_environment(run: Folder) -> dict[str, Any]:
    try:
        return read_object(content_of(run, ENVIRONMENT))
    except BadContent:
        return {}


def newest_checkpoint(run: Folder) -> int | None:
    """The newest step that is committed, by name: nothing is verified."""
    matches = (COMMITTED.fullmatch(name) for name in run.names("checkpoints/step_"))
    return max((int(match[1]) for match in matches if match), default=None)


def read_end(run: Folder) -> RunEnd | None:
    outcome = read_outcome(run)
    if not outcome:
        return None
    return RunEnd(
        outcome=text(outcome, "outcome"),
        kind=text(outcome, "kind"),
        reason=text(outcome, "reason"),
        step=count(outcome, "step"),
        goes_on=outcome["goes_on"] is True,
        time_unix_s=moment(outcome, "time_unix_s"),
    )


def newest_of(lines: Sequence[Line], key: str) -> float | None:
    return next((value for line in reversed(lines) if (value := number(line, key)) is not None), None)


def reached(lines: Sequence[Line], leased: Folder | None) -> int | None:
    """The step of the last attempt, by its last line or by its lease, which is newer for a run in S3."""
    of_steps = (line["step"] for line in reversed(lines) if line["kind"] != "fault")  # one may come before any step
    lease = None if leased is None else parse(newest(leased)[1])
    return max(next(of_steps, 0), (count(lease, "step") or 0) if lease else 0) or None


def scores(evaluated: Line) -> dict[str, float]:
    values = ((key, number(evaluated, key)) for key in evaluated if not NOT_SCORES.fullmatch(key))
    return dict([(key, value) for key, value in values if value is not None][:MOST_SCORES])


def step_s(trained: Sequence[Line]) -> float | None:
    """Seconds between two steps of the last attempt, on average."""
    if not trained:
        return None
    last = [line for line in trained if line["attempt"] == trained[-1]["attempt"]]
    begin_s, end_s = moment(last[0], "time_unix_s"), moment(last[-1], "time_unix_s")
    steps = last[-1]["step"] - last[0]["step"]
    if begin_s is not None and end_s is not None and end_s > begin_s and steps > 0:
        return (end_s - begin_s) / steps
    value = number(last[-1], "step_s")
    return value if value is not None and value > 0 else None
