"""How a run stands: what scheduler, record and run folder say of it, and where they disagree."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from launch.disagreements import disagreements
from launch.history import History, Submission, read_history
from launch.progress import Progress, read_progress
from launch.record import PLAN, Record
from launch.schedulers import Handle, State, scheduler
from launch.values import count, table
from train.config import Failure, InputError
from train.storage.untrusted import BadContent, read_object


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
    disagreements: list[str] = field(default_factory=list)

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
    seen = Status(
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
    return replace(seen, disagreements=list(disagreements(seen)))


def answer_of(submission: Submission | None, asks: Callable[[str, Handle], State]) -> Answer:
    """What the scheduler says; a failure if nobody was asked for the job, or if the scheduler does not answer."""
    if submission is None:
        return Answer("", False, failure="no submission is recorded")
    if submission.refusal:
        return Answer(submission.scheduler, False, text=f"not started: {submission.refusal}")
    if not submission.handle:
        return Answer(submission.scheduler, failure="the submission was not answered")
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
