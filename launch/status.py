"""The state of a run according to its scheduler, its record and its run folder, as an object and as text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from launch.record import AttemptEntry, History, Record, Submission
from launch.run_progress import RunProgress, read_progress
from launch.schedulers import scheduler
from launch.spec import State
from launch.values import shown_duration, shown_moment
from train.config import Failure, InputError, Unreachable
from train.machine.console import printable, say

MAX_ATTEMPTS = 5  # number of most recent attempts that are shown
MAX_CHARS = 400  # maximum length of a text from a scheduler or a record


@dataclass(frozen=True)
class Status:
    run_dir: str
    kind: str  # train | prepare
    job_id: str
    config_sha256: str  # checksum of the job's settings
    state: str  # see `state_of`
    time_unix_s: float  # time of this status
    answer: State  # the scheduler's answer about the last job
    history: History
    progress: RunProgress
    time_left_s: float | None = None
    line_age_s: float | None = None  # time since the last line of metrics.jsonl

    def to_json(self) -> str:
        """Return one line of JSON. Control characters are escaped, and NaN becomes null."""
        values = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return json.dumps(values, sort_keys=True)


def status(record: Record) -> Status:
    """Return the status of a run. Raises InputError if it was not launched, or if its record is damaged."""
    now_unix_s = time.time()
    job, history = record.job(), record.history()
    answer = ask(record, history.submission)
    # the job may have ended after the record was read
    if answer.is_active is False and not history.has_end:
        history = record.history()
    progress = read_progress(record.run) if job.kind == "train" else RunProgress()
    total, step, step_s, line_unix_s = (
        progress.total_steps,
        progress.step,
        progress.step_s,
        progress.line_unix_s,
    )
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


def ask(record: Record, submission: Submission | None) -> State:
    """Return the scheduler's answer about a job, or why there is none: no submission, a rejection, or no reply."""
    if submission is None:
        return State(False, failure="no submission is recorded")
    name = submission.scheduler
    if submission.rejection:
        return State(False, f"not started: {submission.rejection}", scheduler=name)
    try:
        asked, handle = scheduler(name), submission.handle
        return replace(
            asked.state(record, handle) if handle else asked.unanswered(record), scheduler=name
        )
    except (Failure, InputError) as error:
        return State(scheduler=name, failure=str(error))


def state_of(kind: str, answer: State, history: History) -> str:
    """Return one term for the state of a run.

    An active job is waiting, starting, running, stopping or ending. Any other is done, stopped, failed, refused, ended
    (with an unknown outcome), cancelled, vanished (no end is recorded) or not submitted. The state is unknown if the
    scheduler does not answer.
    """
    submission, ended = history.submission, history.ended
    if submission is None or submission.rejection:
        return "not submitted"
    if answer.is_active:
        if ended is not None:
            return "ending"
        if history.is_stop_asked:
            return "stopping"
        if not answer.nodes:  # a node may be lost while the record still has a running attempt
            return "waiting"
        return (
            "running" if kind == "prepare" or history.running_attempt is not None else "starting"
        )
    if history.cancelled_unix_s is not None:
        return "cancelled"
    if ended is not None:
        return ended.outcome
    return "unknown" if answer.is_active is None else answer.outcome or "vanished"


# ---- as text ---------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Return a text as one line without control characters, cut to MAX_CHARS."""
    line = printable(text)
    return line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]}..."


def lines_of(status: Status) -> list[str]:
    attempts = [
        (f"attempt {each.number}", attempt_text(each))
        for each in status.history.attempts[-MAX_ATTEMPTS:]
    ]
    facts = [*of_job(status), *of_run(status), *attempts]
    rows = [(label, clean(text)) for label, text in facts if text]
    width = max(len(label) for label, _ in rows)
    return [
        f"{clean(status.run_dir)}: {status.state}",
        *(f"{label:{width}}  {text}" for label, text in rows),
    ]


def of_job(status: Status) -> list[tuple[str, str]]:
    answer, history = status.answer, status.history
    submission, ended = history.submission, history.ended
    handle = submission.handle if submission else {}
    named = ", ".join(
        f"{key} {value}" for key, value in handle.items() if not isinstance(value, dict)
    )
    says = f"does not answer: {answer.failure}" if answer.failure else f"{answer.text} ({named})"
    asked = (
        f"{submission.nodes} requested"
        if submission and submission.nodes and answer.is_active
        else ""
    )
    times = f", {history.submissions} times" if history.submissions > 1 else ""
    end = f"{shown_moment(ended.time_unix_s)}: {ended.outcome}, {ended.reason}" if ended else ""
    if status.state == "vanished":
        end = f"no record of the reason; baretrain launch resume {status.run_dir} continues from what was saved"
    return [
        ("scheduler", f"{answer.scheduler}: {says}" if answer.scheduler else says),
        ("machines", ", ".join(answer.nodes) or asked),
        ("submitted", f"{shown_moment(submission.time_unix_s)}{times}" if submission else ""),
        ("stop requested", shown(history.stop_asked_unix_s, shown_moment)),
        ("cancelled", shown(history.cancelled_unix_s, shown_moment)),
        (
            "preflight",
            "; ".join(f"{node} failed: {reason}" for node, reason in history.failed_gate.items()),
        ),
        ("requeued", history.requeued),
        ("ended", end),
    ]


def of_run(status: Status) -> list[tuple[str, str]]:
    progress, end = status.progress, status.progress.outcome
    scores = "  ".join(f"{name} {value:.4f}" for name, value in progress.scores.items())
    speed = [
        shown(progress.tokens_per_s, "{:,.0f} tokens/s".format),
        shown(progress.mfu, "MFU {:.1%}".format),
    ]
    return [
        ("step", shown_step(status)),
        ("loss", shown(progress.loss, "{:.4f}".format)),
        ("evaluation", f"step {progress.evaluated_step or 0:,}: {scores}" if scores else ""),
        ("speed", ", ".join(filter(None, speed))),
        ("goodput", shown(progress.goodput, "{:.1%}".format)),
        ("time left", shown(status.time_left_s, shown_duration)),
        ("checkpoint", shown(progress.checkpoint, "step {:,}".format)),
        ("cost", shown(progress.cost_usd, "${:,.2f}".format)),
        ("last line", shown(status.line_age_s, lambda age_s: f"{shown_duration(age_s)} ago")),
        (
            "outcome",
            f"{end['outcome']}: {end['reason']}"
            if end and not status.history.running_attempt
            else "",
        ),
    ]


def shown(value: Any, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)


def attempt_text(attempt: AttemptEntry) -> str:
    if attempt.is_over:
        step = f" at step {attempt.step:,}" if attempt.step else ""
        return f"{attempt.outcome}{step}, {attempt.reason}{f'; then: {attempt.next}' if attempt.next else ''}"
    where = f" on {', '.join(attempt.nodes)}" if attempt.nodes else ""
    return f"since {shown_moment(attempt.began_unix_s)}{where}"


def shown_step(status: Status) -> str:
    step, total = status.progress.step, status.progress.total_steps
    if step is None:
        return "" if total is None else f"none of {total:,} yet"
    return f"{step:,}" if total is None else f"{step:,} of {total:,} ({step / total:.1%})"


def watch(record: Record, every_s: float) -> None:
    """Print a line for each change of a job's state or step, until the job has ended."""
    # If S3 or the scheduler does not answer, the next round asks again.
    line, is_over = "", False
    while not is_over:
        before = line
        try:
            seen = status(record)
            line = f"{seen.state}  {shown_step(seen)}  {clean(seen.answer.failure or seen.answer.text)}"
            is_over = seen.answer.is_active is False
        except Unreachable as error:
            line = clean(str(error))
        if line != before:
            say(f"{shown_moment(time.time())}  {line}")
        if not is_over:
            time.sleep(every_s)
