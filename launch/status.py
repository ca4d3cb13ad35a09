"""How a run stands, by its scheduler, its record and its run folder: as an object, and as text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from launch.history import History, Submission, read_history
from launch.record import Record
from launch.run_progress import Progress, read_progress
from launch.schedulers import scheduler
from launch.spec import Handle, State
from launch.values import shown_duration, shown_moment
from train.cli.command import printable
from train.config import Failure, InputError, Unreachable

MAX_ATTEMPTS = 5  # shown: the last ones
MAX_CHARS = 400  # of a text from elsewhere


@dataclass(frozen=True)
class Status:
    run_dir: str
    kind: str  # train | prepare
    job_id: str
    config_sha256: str  # of the job's settings
    state: str  # see `state_of`
    time_unix_s: float  # when this was asked
    answer: State  # of the last job
    history: History
    progress: Progress
    time_left_s: float | None = None
    line_age_s: float | None = None  # time since the last line of the metrics

    @property
    def is_waiting(self) -> bool:
        """Whether the job has no machine yet, or none now."""
        return self.answer.is_active is True and not self.answer.nodes

    def to_json(self) -> str:
        """Return one line, in which all characters that a terminal could act on are escaped."""
        return json.dumps(plain(asdict(self)), sort_keys=True, allow_nan=False)


def plain(value: Any) -> Any:
    """Return JSON without NaN and infinities, which a handle may hold."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


def ask(record: Record, name: str, handle: Handle) -> State:
    return scheduler(name).state(record, handle)


def status(record: Record, *, asks: Callable[[str, Handle], State] | None = None) -> Status:
    """Return how a run stands. InputError if it was not launched, or if its record is damaged."""
    now_unix_s = time.time()
    job, history = record.job(), read_history(record.events())
    answer = answer_of(history.submission, asks or partial(ask, record))
    if answer.is_active is False and not history.has_end:  # perhaps it ended after the record was read
        history = read_history(record.events())
    progress = read_progress(record.run) if job.kind == "train" else Progress()
    total, step, step_s, line_unix_s = progress.total_steps, progress.step, progress.step_s, progress.line_unix_s
    has_pace = answer.is_active and total is not None and step is not None and step_s is not None
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
        time_left_s=max(0, total - step) * step_s if has_pace else None,  # type: ignore[operator]
        line_age_s=None if line_unix_s is None else max(0.0, now_unix_s - line_unix_s),
    )


def answer_of(submission: Submission | None, asks: Callable[[str, Handle], State]) -> State:
    """Return what the scheduler says; a failure if it was not asked for the job, or does not answer."""
    if submission is None:
        return State(False, failure="no submission is recorded")
    name = submission.scheduler
    if submission.refusal:
        return State(False, f"not started: {submission.refusal}", scheduler=name)
    if not submission.handle:
        never = "it never answered the submission; look there for a job of this run"
        return State(scheduler=name, failure=never)
    try:
        return replace(asks(name, submission.handle), scheduler=name)
    except (Failure, InputError) as error:
        return State(scheduler=name, failure=str(error))


def state_of(kind: str, answer: State, history: History) -> str:
    """Return one term. The job is active: waiting, starting, running, stopping, ending. It is not: done, stopped,
    failed, refused, ended (with an outcome that is not known), cancelled, vanished (nobody knows its end), not
    submitted. The scheduler does not say: unknown.
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


# ---- as text ---------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Return one line that no terminal acts on, cut if it is very long."""
    line = printable(text)
    return line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]}..."


def lines_of(status: Status) -> list[str]:
    """Return the run and its state, then a line for each fact that is known."""
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
        end = f"nothing recorded how; python -m launch resume {status.run_dir} continues from what was saved"
    return [
        ("scheduler", f"{answer.scheduler}: {says}" if answer.scheduler else says),
        ("machines", ", ".join(answer.nodes) or (f"{nodes} asked for" if nodes and answer.is_active else "")),
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
        ("outcome", f"{end['outcome']}: {end['reason']}" if end and not status.history.running_attempt else ""),
    ]


def of_attempts(status: Status) -> Iterator[tuple[str, str]]:
    for each in status.history.attempts[-MAX_ATTEMPTS:]:
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


def watch(ask: Callable[[], Status], every_s: float, *, as_json: bool = False) -> None:
    """Print the status until the job has ended: a line for each change of its state or step, or JSON each time. A
    service that does not answer is asked again.
    """
    before = ""
    while True:
        try:
            seen = ask()
            line = f"{seen.state}  {shown_step(seen)}  {clean(seen.answer.failure or seen.answer.text)}"
            is_over = seen.answer.is_active is False
            if as_json:
                print(seen.to_json(), flush=True)
        except Unreachable as error:
            line, is_over = clean(str(error)), False
            if as_json:
                print(line, file=sys.stderr, flush=True)
        if not as_json and line != before:
            print(f"{shown_moment(time.time())}  {line}", flush=True)
        if is_over:
            return
        before = line
        time.sleep(every_s)
