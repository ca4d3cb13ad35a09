"""The progress of a run, read from its folder, whose content is not trusted. The folder is not changed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from launch.values import count, number, table
from train.observe.lines import read_back
from train.run_folder.identity import ENVIRONMENT
from train.run_folder.lease import newest, parse
from train.run_folder.outcome import read_outcome
from train.storage.folders import Folder
from train.storage.schema import BadContent, read_object
from train.tasks import scores_of

# bytes read from the end of metrics.jsonl: about 10,000 lines, probably including an evaluation
TAIL_BYTES = 2**22
COMMITTED = re.compile(r"checkpoints/step_([0-9]{1,18})/manifest\.json")
MAX_SCORES = 6


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run. None means unknown."""

    exists: bool = False  # whether the trainer has written environment.json
    attempt: int | None = None
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    # share of the time since the first start that was spent in steps that were not lost
    goodput: float | None = None
    cost_usd: float | None = None  # cost of all attempts, up to the last line
    evaluated_step: int | None = None
    scores: dict[str, float] = field(default_factory=dict)
    step_s: float | None = None  # mean time from step to step, including evaluations and saves
    line_unix_s: float | None = None  # when the last line was written
    checkpoint: int | None = None  # step of the newest committed checkpoint
    outcome: dict[str, Any] | None = None  # the content of outcome.json


def read_progress(run: Folder) -> RunProgress:
    """Read the progress of a run from its folder, which need not exist yet. Damaged files count as missing."""
    names = run.names_here()
    lines = list(read_back(run, limit_bytes=TAIL_BYTES))[::-1]
    trained, evaluated, ended = (
        [line for line in lines if line["kind"] == k] for k in ("train", "eval", "summary")
    )
    last, score = (trained or [{}])[-1], (evaluated or [{}])[-1]
    try:
        environment = read_object(run.read(ENVIRONMENT))
    except (FileNotFoundError, BadContent):
        environment = {}
    planned = count(table(environment, "plan"), "total_steps") or None
    declared = scores_of(str(table(environment, "identity").get("task.kind")))
    scores = [(key, number(score, key)) for key in score if key in declared]
    # Skip fault lines: a fault may occur before the first step. If the run is in S3, its lease may have a newer step.
    lease = parse(newest(run)[1]) if "lease" in names else None
    steps = [line["step"] for line in lines if line["kind"] != "fault"][-1:]
    figures = [(key, number(line, key)) for line in lines for key in ("goodput", "cost_usd")]
    newest_of = {key: figure for key, figure in figures if figure is not None}
    return RunProgress(
        exists=ENVIRONMENT in names,
        attempt=lines[-1]["attempt"] if lines else None,
        step=max(0, *steps, count(lease or {}, "step") or 0) or None,
        total_steps=(count(ended[-1], "steps_total") if ended else None) or planned,
        loss=number(last, "loss"),
        tokens_per_s=number(last, "tokens_per_s"),
        mfu=number(last, "mfu"),
        goodput=newest_of.get("goodput"),
        cost_usd=newest_of.get("cost_usd"),
        evaluated_step=score.get("step"),
        scores=dict([(key, found) for key, found in scores if found is not None][:MAX_SCORES]),
        step_s=mean_step_s([line for line in trained if line["attempt"] == last["attempt"]]),
        line_unix_s=number(lines[-1], "time_unix_s") if lines else None,
        checkpoint=newest_checkpoint(run),
        outcome=read_outcome(run) or None,
    )


def newest_checkpoint(run: Folder) -> int | None:
    """Return the step of the newest committed checkpoint, according to file names. No content is verified."""
    matches = (COMMITTED.fullmatch(name) for name in run.names("checkpoints/step_"))
    return max((int(match[1]) for match in matches if match), default=None)


def mean_step_s(trained: list[dict[str, Any]]) -> float | None:
    """Return the mean seconds per step in an attempt's newest lines, including evaluations and saves."""
    if not trained:
        return None
    first, last = trained[0], trained[-1]
    begin_s, end_s, steps = (
        number(first, "time_unix_s"),
        number(last, "time_unix_s"),
        last["step"] - first["step"],
    )
    if begin_s is not None and end_s is not None and end_s > begin_s and steps > 0:
        return (end_s - begin_s) / steps
    return number(last, "step_s") or None
