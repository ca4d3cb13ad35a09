"""What a run folder says of its run. It is only read, and may hold anything."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from launch.values import count, moment, number, table, text
from train.run_folder.outcome import STOP_FILE, read_outcome
from train.run_folder.ownership import ENVIRONMENT, describe, newest, parse
from train.storage.folders import Folder, LocalFolder
from train.storage.untrusted import BadContent, read_object

METRICS = "metrics.jsonl"
TAIL_BYTES = 2**20  # of the metrics: the last few thousand lines
COMMITTED = re.compile(r"checkpoints/step_([0-9]{1,18})/manifest\.json")
NOT_SCORES = re.compile("attempt|step|examples|epoch|cost_usd|.*_s")  # the other numbers of an eval line
MOST_SCORES = 6
Line = dict[str, Any]


@dataclass(frozen=True)
class Owner:
    """The process that holds the run folder's lease."""

    text: str  # for people
    job: str | None
    host: str
    step: int
    is_released: bool


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
    line_gap_s: float = 0.0  # the longest time between two lines, of those that were read
    save_gap_s: float = 0.0  # the same of lines about checkpoints
    checkpoint: int | None = None  # the newest step that is committed
    outcome: RunEnd | None = None
    owner: Owner | None = None
    has_stop_file: bool = False
    damage: list[str] = field(default_factory=list)  # what could not be read


def read_progress(run: Folder, *, planned_steps: int | None = None) -> Progress:
    """Read a run folder, which need not exist yet."""
    names, damage = run.names_here(), []
    environment: dict[str, Any] = {}
    if ENVIRONMENT in names:
        try:
            environment = read_object(run.read(ENVIRONMENT))
        except FileNotFoundError:  # removed meanwhile
            pass
        except BadContent as error:
            damage.append(f"{run.location}/{ENVIRONMENT}: {error}")
    lines, num_damaged = read_tail(run, METRICS) if METRICS in names else ([], 0)
    if num_damaged:
        damage.append(f"{run.location}/{METRICS}: {num_damaged} of its last lines are no lines of metrics")
    owner = read_owner(run) if "lease" in names else None
    trained = [line for line in lines if line["kind"] == "train"]
    evaluated = next((line for line in reversed(lines) if line["kind"] == "eval"), {})
    saves = [line for line in lines if line["kind"] == "checkpoint"]
    summary = next((line for line in reversed(lines) if line["kind"] == "summary"), {})
    total = count(summary, "steps_total") or count(table(environment, "plan"), "total_steps") or planned_steps
    return Progress(
        exists=ENVIRONMENT in names,
        attempt=lines[-1]["attempt"] if lines else None,
        step=reached(lines, owner),
        total_steps=total,
        loss=number(trained[-1], "loss") if trained else None,
        tokens_per_s=number(trained[-1], "tokens_per_s") if trained else None,
        mfu=number(trained[-1], "mfu") if trained else None,
        goodput=newest_of(lines, "goodput"),
        cost_usd=newest_of(lines, "cost_usd"),
        evaluated_step=count(evaluated, "step"),
        scores=scores(evaluated),
        step_s=step_s(trained),
        save_s=newest_of(saves, "save_s"),
        line_unix_s=moment(lines[-1], "time_unix_s") if lines else None,
        line_gap_s=longest_gap_s(lines),
        save_gap_s=longest_gap_s(saves),
        checkpoint=newest_checkpoint(run) if "checkpoints" in names else None,
        outcome=read_end(run) if "outcome.json" in names else None,
        owner=owner,
        has_stop_file=STOP_FILE in names,
        damage=damage,
    )


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


def read_owner(run: Folder) -> Owner | None:
    content = newest(run)[1]
    lease = parse(content)
    if lease is None:
        return None
    step = count(lease, "step") or 0
    return Owner(describe(content), lease["job"], lease["host"], step, lease["released"])


# ---- lines of the metrics --------------------------------------------------------------------------------------------


def read_tail(run: Folder, name: str) -> tuple[list[Line], int]:
    """The last lines of metrics.jsonl in order, and how many of them are damaged. The last may be half written."""
    content, is_whole = read_last_bytes(run, name)
    rows = content.split(b"\n")[0 if is_whole else 1 : -1]
    parsed = [parse_line(row) for row in rows if row.strip()]
    return [line for line in parsed if line is not None], sum(line is None for line in parsed)


def read_last_bytes(run: Folder, name: str) -> tuple[bytes, bool]:
    """The last TAIL_BYTES of a file, and whether that is all of it."""
    if isinstance(run, LocalFolder):
        path = run.at(name)
        if not path.is_file():
            return b"", True
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read(TAIL_BYTES), size <= TAIL_BYTES
    try:
        content = run.read(name)
    except FileNotFoundError:
        return b"", True
    return content[-TAIL_BYTES:], len(content) <= TAIL_BYTES


def parse_line(row: bytes) -> Line | None:
    try:
        line = json.loads(row)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return None
    return None if count(line, "attempt") is None or count(line, "step") is None else line


def newest_of(lines: Sequence[Line], key: str) -> float | None:
    return next((value for line in reversed(lines) if (value := number(line, key)) is not None), None)


def reached(lines: Sequence[Line], owner: Owner | None) -> int | None:
    """The step of the last attempt, by its last line or by its heartbeat, which is newer for a run in S3."""
    of_steps = (line["step"] for line in reversed(lines) if line["kind"] != "fault")  # one may come before any step
    steps = [next(of_steps, 0), 0 if owner is None else owner.step]
    return max(steps) or None


def scores(evaluated: Line) -> dict[str, float]:
    values = ((key, number(evaluated, key)) for key in evaluated if not NOT_SCORES.fullmatch(key))
    return dict([(key, value) for key, value in values if value is not None][:MOST_SCORES])


def step_s(trained: Sequence[Line]) -> float | None:
    """Seconds between two steps of the last attempt, on average over the lines that were read."""
    if not trained:
        return None
    last = [line for line in trained if line["attempt"] == trained[-1]["attempt"]]
    begin_s, end_s = moment(last[0], "time_unix_s"), moment(last[-1], "time_unix_s")
    steps = last[-1]["step"] - last[0]["step"]
    if begin_s is not None and end_s is not None and end_s > begin_s and steps > 0:
        return (end_s - begin_s) / steps
    value = number(last[-1], "step_s")
    return value if value is not None and value > 0 else None


def longest_gap_s(lines: Sequence[Line]) -> float:
    """The longest time between two lines of one attempt."""
    gaps_s = [0.0]
    for before, after in pairwise(lines):
        begin_s, end_s = moment(before, "time_unix_s"), moment(after, "time_unix_s")
        if begin_s is not None and end_s is not None and before["attempt"] == after["attempt"]:
            gaps_s.append(end_s - begin_s)
    return max(gaps_s)
