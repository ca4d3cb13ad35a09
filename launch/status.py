"""The state of a run according to its scheduler, its record and its run folder, as an object and as text."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace

from launch.record import Attempt, History, Record, Submission
from launch.run_progress import RunProgress, read_progress
from launch.schedulers import scheduler
from launch.spec import State
from launch.values import shown_duration, shown_moment
from train.config import Failure, InputError
from train.machine.console import printable

MAX_ATTEMPTS = 5  # number of most recent attempts that are shown
MAX_CHARS = 400  # maximum length of a text from a scheduler or a record


@dataclass(frozen=True)
class Status:
    run_dir: str
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
    """Return the status of a run. Raises InputError if it was not launched, or if its job is damaged."""
    now_unix_s = time.time()
    job = record.job()
    history = record.history()
    answer = ask(record, history.submission)
    if answer.is_active is False and not history.has_end:
        history = record.history()  # the job may have ended after the record was read
    progress = read_progress(record.run)
    line_age_s = None
    if progress.line_unix_s is not None:
        line_age_s = max(0.0, now_unix_s - progress.line_unix_s)
    return Status(
        run_dir=record.run_dir,
        job_id=job.id,
        config_sha256=job.config_sha256,
        state=state_of(answer, history),
        time_unix_s=round(now_unix_s, 3),
        answer=answer,
        history=history,
        progress=progress,
        time_left_s=time_left_s(progress) if answer.is_active else None,
        line_age_s=line_age_s,
    )


def time_left_s(progress: RunProgress) -> float | None:
    total = progress.total_steps
    step = progress.step
    step_s = progress.step_s
    if total is None or step is None or step_s is None:
        return None
    return max(0, total - step) * step_s


def ask(record: Record, submission: Submission | None) -> State:
    """Return the scheduler's answer about a job, or why there is none: no submission, a rejection, or no reply."""
    if submission is None:
        return State(False, failure="no submission is recorded")
    name = submission.scheduler
    if submission.rejection:
        return State(False, f"not started: {submission.rejection}", scheduler=name)
    try:
        if submission.handle:
            answer = scheduler(name).state(record, submission.handle)
        else:
            answer = scheduler(name).unanswered(record)
        return replace(answer, scheduler=name)
    except (Failure, InputError) as error:
        return State(scheduler=name, failure=str(error))


def state_of(answer: State, history: History) -> str:
    """Return one term for the state of a run.

    An active job is waiting, starting, running, stopping or ending. Any other is done, stopped, failed, refused,
    cancelled, vanished (no end is recorded) or not submitted. The state is unknown if the scheduler does not answer.
    """
    submission = history.submission
    ended = history.ended
    if submission is None or submission.rejection:
        return "not submitted"
    if answer.is_active:
        return state_of_active(answer, history)
    if history.is_cancelled:
        return "cancelled"
    if ended is not None:
        return ended.outcome or "vanished"
    if answer.is_active is None:
        return "unknown"
    return answer.outcome or "vanished"


def state_of_active(answer: State, history: History) -> str:
    running = history.running_attempt
    if history.ended is not None:
        return "ending"
    if history.is_stop_asked:
        return "stopping"
    if not answer.nodes:  # a node may be lost while the record still has a running attempt
        return "waiting"
    if running is not None and running.is_training:
        return "running"
    return "starting"


# ---- as text ---------------------------------------------------------------------------------------------------------


def clean(text: str) -> str:
    """Return a text as one line without control characters, cut to MAX_CHARS."""
    line = printable(text)
    if len(line) <= MAX_CHARS:
        return line
    return f"{line[:MAX_CHARS]}..."


def lines_of(status: Status) -> list[str]:
    rows = [*of_job(status), *of_run(status)]
    for attempt in status.history.attempts[-MAX_ATTEMPTS:]:
        rows.append((f"attempt {attempt.number}", attempt_text(attempt)))
    rows = [row for row in rows if row[1]]
    width = max(len(label) for label, _ in rows)
    lines = [f"{clean(status.run_dir)}: {status.state}"]
    for label, text in rows:
        lines.append(f"{label:{width}}  {clean(text)}")
    return lines


def of_job(status: Status) -> list[tuple[str, str]]:
    answer = status.answer
    history = status.history
    rows = [
        ("job", status.job_id),
        ("scheduler", f"{answer.scheduler}: {answer.failure or answer.text}"),
        ("nodes", ", ".join(answer.nodes)),
    ]
    if history.submission is not None:
        rows.append(("submitted", shown_moment(history.submission.time_unix_s)))
    if history.request is not None:
        asked = f"{history.request.what}, {shown_moment(history.request.time_unix_s)}"
        rows.append(("asked for", asked))
    if status.state == "vanished":
        rows.append(("resume", f"baretrain launch resume {status.run_dir} continues it"))
    return rows


# Figures of a run's progress, and how they are shown.
FIGURES = {
    "loss": "{:.4f}",
    "tokens_per_s": "{:,.0f}",
    "checkpoint": "step {:,}",
    "cost_usd": "${:,.2f}",
}


def of_run(status: Status) -> list[tuple[str, str]]:
    progress = status.progress
    rows = [("step", shown_step(status))]
    for name, form in FIGURES.items():
        figure = getattr(progress, name)
        if figure is not None:
            rows.append((name, form.format(figure)))
    if status.time_left_s is not None:
        rows.append(("time left", shown_duration(status.time_left_s)))
    if status.line_age_s is not None:
        rows.append(("last line", f"{shown_duration(status.line_age_s)} ago"))
    end = progress.outcome
    if end and status.history.running_attempt is None:
        rows.append(("outcome", f"{end['outcome']}: {end['reason']}"))
    return rows


def attempt_text(attempt: Attempt) -> str:
    if not attempt.is_over:
        if attempt.nodes:
            where = f" on {', '.join(attempt.nodes)}"
        else:
            where = ""
        return f"since {shown_moment(attempt.began_unix_s)}{where}"
    if attempt.step:
        step = f" at step {attempt.step:,}"
    else:
        step = ""
    return f"{attempt.outcome}{step}, {attempt.reason}; then: {attempt.next}"


def shown_step(status: Status) -> str:
    step = status.progress.step
    total = status.progress.total_steps
    if total is None:
        if step is None:
            return ""
        return f"{step:,}"
    if step is None:
        return f"none of {total:,} yet"
    return f"{step:,} of {total:,} ({step / total:.1%})"
