"""How a run stands, by its scheduler, its record and its run folder: as an object, and as text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from launch.history import History, Submission, read_history
from launch.record import PLAN, Record
from launch.run_progress import Progress, read_progress
from launch.schedulers import scheduler
from launch.spec import Handle, State
from launch.values import count, shown_duration, shown_moment, table
from train.cli.command import printable
from train.config import Failure, InputError, Unreachable
from train.storage.schema import BadContent, read_object

MOST_ATTEMPTS = 5  # shown: the last ones
MOST_CHARS = 400  # of a text from elsewhere


@dataclass(frozen=True)
class Answer:
    """What the scheduler says of the last job."""

    scheduler: str
    is_active: bool | None = None  # None: it is not known
    text: str = ""
    nodes: list[str] = field(default_factory=list)
    failure: str = ""  # why it does not say
    outcome: str = ""  # of a job that is over: cancelled | failed


@dataclass(frozen=True)
class Status:
    run_dir: str
    kind: str  # train | prepare
    job_id: str
    config_sha256: str  # of the job's settings
    state: str  # see `state_of`
    time_unix_s: float  # when this was asked
    answer: Answer
    history: History
    progress: Progress
    time_left_s: float | None = None
    line_age_s: float | None = None  # time since the last line of the metrics

    @property
    def is_active(self) -> bool:
        """Whether the job waits or runs, as far as is known."""
        return self.answer.is_active is True

    @property
    def is_waiting(self) -> bool:
        """Whether the job has no machine yet, or none now."""
        return self.is_active and not self.answer.nodes

    def to_json(self) -> str:
        """One line. All characters that a terminal could act on are escaped."""
        return json.dumps(plain(asdict(self)), sort_keys=True, allow_nan=False)


def plain(value: Any) -> Any:
    """JSON without NaN and infinities, which a handle may hold."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


def ask(name: str, handle: Handle) -> State:
    return scheduler(name).state(handle)


def status(record: Record, *, asks: Callable[[str, Handle], State] = ask, now_unix_s: float | None = None) -> Status:
    """How a run stands. InputError if it was not launched, or if its record is damaged."""
    now_unix_s = time.time() if now_unix_s is None else now_unix_s
    job, history = record.job(), read_history(record.events())
    answer = answer_of(history.submission, asks)
    if answer.is_active is False and not history.has_end:  # perhaps it ended after the record was read
        history = read_history(record.events())
    is_run = job.kind == "train"
    progress = read_progress(record.run, planned_steps=planned_steps(record)) if is_run else Progress()
    return Status(
        run_dir=record.run_dir,
        kind=job.kind,
        job_id=job.id,
        config_sha256=job.config_sha256,
        state=state_of(job.kind, answer, history),
        time_unix_s=round(now_unix_s, 3),
        answer=answer,
        history=history,
        progress=progress,
        time_left_s=time_left_s(progress) if answer.is_active else None,
        line_age_s=None if progress.line_unix_s is None else max(0.0, now_unix_s - progress.line_unix_s),
    )


def answer_of(submission: Submission | None, asks: Callable[[str, Handle], State]) -> Answer:
    """What the scheduler says; a failure if nobody was asked for the job, or if the scheduler does not answer."""
    if submission is None:
        return Answer("", False, failure="no submission is recorded")
    if submission.refusal:
        return Answer(submission.scheduler, False, text=f"not started: {submission.refusal}")
    if not submission.handle:
        return Answer(
            submission.scheduler, failure="it never answered the submission; look there for a job of this run"
        )
    try:
        state = asks(submission.scheduler, submission.handle)
    except (Failure, InputError) as error:
        return Answer(submission.scheduler, failure=str(error))
    return Answer(submission.scheduler, state.is_active, state.text, list(state.nodes), outcome=state.outcome)


def state_of(kind: str, answer: Answer, history: History) -> str:
    """One term. The job is active: waiting, starting, running, stopping, ending. It is not: done, stopped, failed,
    refused, ended (with an outcome that is not known), cancelled, vanished (nobody knows its end), not submitted. The
    scheduler does not say: unknown.
    """
    submission, ended = history.submission, history.ended
    if submission is None or submission.refusal:
        return "not submitted"
    if answer.is_active:
        if ended is not None:
            return "ending"
        if history.stop_asked_unix_s is not None or history.cancelled_unix_s is not None:
            return "stopping"
        if not answer.nodes:  # as after the loss of one, when the record still has an attempt
            return "waiting"
        return "running" if kind == "prepare" or history.running_attempt is not None else "starting"
    if history.cancelled_unix_s is not None:
        return "cancelled"
    if ended is not None:
        return ended.outcome
    return "unknown" if answer.is_active is None else answer.outcome or "vanished"


def time_left_s(progress: Progress) -> float | None:
    total, step, step_s = progress.total_steps, progress.step, progress.step_s
    return None if total is None or step is None or step_s is None else max(0, total - step) * step_s


def planned_steps(record: Record) -> int | None:
    """The number of steps that the plan estimates; None if it has none."""
    try:
        return count(table(read_object(record.folder.read(PLAN)), "estimate"), "steps")
    except (FileNotFoundError, BadContent):  # the plan is for people; a damaged one stops nobody
        return None


# ---- as text ---------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """One line that no terminal acts on, cut if it is very long."""
    line = printable(text)
    return line if len(line) <= MOST_CHARS else f"{line[:MOST_CHARS]}..."


def lines_of(status: Status) -> list[str]:
    """The run and its state, then a line for each fact that is known."""
    rows = [(label, clean(text)) for label, text in [*of_job(status), *of_run(status), *of_attempts(status)] if text]
    width = max(len(label) for label, _ in rows)
    return [f"{clean(status.run_dir)}: {status.state}", *(f"{label:{width}}  {text}" for label, text in rows)]


def of_job(status: Status) -> list[tuple[str, str]]:
    answer, history = status.answer, status.history
    submission, ended = history.submission, history.ended
    named = ", ".join(f"{key} {value}" for key, value in (submission.handle if submission else {}).items())
    says = f"does not answer: {answer.failure}" if answer.failure else f"{answer.text} ({named})"
    nodes = (submission.nodes if submission else None) or 0
    times = f", {history.submissions} times" if history.submissions > 1 else ""
    end = f"{shown_moment(ended.time_unix_s)}: {ended.outcome}, {ended.reason}" if ended else ""
    if status.state == "vanished":
        end = f"nobody noted how; python -m launch resume {status.run_dir} goes on from what was saved"
    return [
        ("scheduler", f"{answer.scheduler}: {says}" if answer.scheduler else says),
        ("machines", ", ".join(answer.nodes) or (f"{nodes} asked for" if nodes and status.is_active else "")),
        ("submitted", f"{shown_moment(submission.time_unix_s)}{times}" if submission else ""),
        ("stop asked", "" if history.stop_asked_unix_s is None else shown_moment(history.stop_asked_unix_s)),
        ("cancelled", "" if history.cancelled_unix_s is None else shown_moment(history.cancelled_unix_s)),
        ("preflight", "; ".join(f"{node} failed: {reason}" for node, reason in history.failed_gate.items())),
        ("ended", end),
        ("damaged", ", ".join(f"{status.run_dir}.launch/{name}" for name in history.damaged)),
    ]


def of_run(status: Status) -> list[tuple[str, str]]:
    progress = status.progress
    evaluation = "  ".join(f"{name} {value:.4f}" for name, value in progress.scores.items())
    mfu = "" if progress.mfu is None else f", MFU {progress.mfu:.1%}"
    left_s, age_s, end = status.time_left_s, status.line_age_s, progress.outcome
    return [
        ("step", shown_step(status)),
        ("loss", "" if progress.loss is None else f"{progress.loss:.4f}"),
        ("evaluation", f"step {progress.evaluated_step or 0:,}: {evaluation}" if evaluation else ""),
        ("speed", "" if progress.tokens_per_s is None else f"{progress.tokens_per_s:,.0f} tokens/s{mfu}"),
        ("goodput", "" if progress.goodput is None else f"{progress.goodput:.1%}"),
        ("time left", "" if left_s is None else shown_duration(left_s)),
        ("checkpoint", "" if progress.checkpoint is None else f"step {progress.checkpoint:,}"),
        ("cost", "" if progress.cost_usd is None else f"${progress.cost_usd:,.2f}"),
        ("last line", "" if age_s is None else f"{shown_duration(round(age_s))} ago"),
        ("outcome", f"{end.outcome}: {end.reason}" if end and not status.history.running_attempt else ""),
    ]


def of_attempts(status: Status) -> Iterator[tuple[str, str]]:
    for each in status.history.attempts[-MOST_ATTEMPTS:]:
        where = f" on {', '.join(each.nodes)}" if each.nodes else ""
        text = f"since {shown_moment(each.began_unix_s)}{where}"
        if each.is_over:
            text = f"{each.outcome}{f' at step {each.step:,}' if each.step else ''}, {each.reason}"
            text += f"; then: {each.next}" if each.next else ""
        yield f"attempt {each.number}", text


def shown_step(status: Status) -> str:
    step, total = status.progress.step, status.progress.total_steps
    if step is None:
        return "" if total is None else f"none yet of {total:,}"
    return f"{step:,}" if total is None else f"{step:,} of {total:,} ({step / total:.1%})"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def watch(ask: Callable[[], Status], every_s: float, *, as_json: bool = False) -> None:
    """Print the status until the job has ended: a line for each change of its state or step, or JSON each time. A
    service that does not answer is asked again.
    """
    before = ""
    while True:
        try:
            seen: Status | None = ask()
            assert seen is not None
            line = f"{seen.state}  {shown_step(seen)}  {clean(seen.answer.failure or seen.answer.text)}"
        except Unreachable as error:
            seen, line = None, clean(str(error))
        if as_json:
            print(*([seen.to_json()] if seen else [line]), file=sys.stdout if seen else sys.stderr, flush=True)
        elif line != before:
            print(f"{shown_moment(time.time())}  {line}", flush=True)
        before = line
        if seen is not None and seen.answer.is_active is False:
            return
        time.sleep(every_s)
