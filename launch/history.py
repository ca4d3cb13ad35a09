"""What the record of a run says: its submissions, its attempts and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launch.record import Event
from launch.values import MOST_CHARS, count, moment, table, text, texts

ENDS = ("done", "stopped", "failed", "refused")


@dataclass(frozen=True)
class Submission:
    """What a scheduler was asked to start, and what it called it."""

    scheduler: str
    time_unix_s: float | None
    nodes: int | None = None
    handle: dict[str, Any] = field(default_factory=dict)  # empty: no answer of the scheduler is known
    config_sha256: str = ""
    refusal: str = ""  # why the job could not be started


@dataclass(frozen=True)
class AttemptEntry:
    number: int
    nodes: list[str]
    began_unix_s: float | None
    ended_unix_s: float | None = None
    exit_code: int | None = None
    outcome: str = ""
    reason: str = ""
    step: int | None = None
    checkpoint: int | None = None
    next: str = ""  # again | requeue | end
    is_over: bool = False


@dataclass(frozen=True)
class Ended:
    outcome: str
    reason: str
    time_unix_s: float | None


@dataclass(frozen=True)
class History:
    """All attempts of the run; the rest is of its last submission."""

    submissions: int = 0
    submission: Submission | None = None
    attempts: list[AttemptEntry] = field(default_factory=list)
    attempts_before: int = 0  # of earlier submissions
    passed_gate: list[str] = field(default_factory=list)
    failed_gate: dict[str, str] = field(default_factory=dict)  # node: reason
    stop_asked_unix_s: float | None = None
    cancelled_unix_s: float | None = None
    requeues: int = 0
    ended: Ended | None = None

    @property
    def has_end(self) -> bool:
        return self.ended is not None or self.cancelled_unix_s is not None

    @property
    def last_attempt(self) -> AttemptEntry | None:
        """The last attempt of the last submission."""
        return self.attempts[-1] if len(self.attempts) > self.attempts_before else None

    @property
    def running_attempt(self) -> AttemptEntry | None:
        """The attempt that has begun and not ended."""
        last = self.last_attempt
        return None if last is None or last.is_over or self.ended is not None else last


def read_history(events: Sequence[Event]) -> History:
    """What the events say. Details of a wrong type count as missing, and unknown events are passed over."""
    history = History()
    for event in events:
        history = after(history, event)
    return history


def after(history: History, event: Event) -> History:
    details, time_unix_s = event.details, moment({"at": event.time_unix_s}, "at")
    if event.kind in ("submitting", "submitted"):
        return submitted(history, event, time_unix_s)
    if event.kind == "not_submitted" and history.submission is not None:
        return replace(history, submission=replace(history.submission, refusal=text(details, "reason") or "refused"))
    if event.kind == "attempt_began":
        entry = AttemptEntry(count(details, "number") or 0, texts(details, "nodes"), time_unix_s)
        return replace(history, attempts=[*history.attempts, entry], ended=None)
    if event.kind == "attempt_ended" and history.last_attempt is not None:
        return replace(history, attempts=[*history.attempts[:-1], over(history.last_attempt, event, time_unix_s)])
    if event.kind == "gate":
        failed = {str(node): str(reason)[:MOST_CHARS] for node, reason in table(details, "failed").items()}
        return replace(history, passed_gate=texts(details, "passed"), failed_gate=failed)
    if event.kind == "stop_asked":
        return replace(history, stop_asked_unix_s=time_unix_s or 0.0)
    if event.kind == "cancelled":
        return replace(history, cancelled_unix_s=time_unix_s or 0.0)
    if event.kind == "requeued":
        return replace(history, requeues=history.requeues + 1)
    if event.kind == "ended":
        outcome = text(details, "outcome")
        return replace(
            history, ended=Ended(outcome if outcome in ENDS else "ended", text(details, "reason"), time_unix_s)
        )
    return history


def submitted(history: History, event: Event, time_unix_s: float | None) -> History:
    """A submission begins, or is answered."""
    asked, details = history.submission, event.details
    now = Submission(
        scheduler=text(details, "scheduler"),
        time_unix_s=time_unix_s,
        nodes=count(details, "nodes"),
        handle=table(details, "handle"),
        config_sha256=text(details, "config_sha256"),
    )
    is_answer = event.kind == "submitted" and asked is not None and not asked.handle and not asked.refusal
    if is_answer and asked is not None:
        now = replace(now, config_sha256=now.config_sha256 or asked.config_sha256)
        return replace(history, submission=now)
    return History(history.submissions + 1, now, history.attempts, len(history.attempts))


def over(entry: AttemptEntry, event: Event, time_unix_s: float | None) -> AttemptEntry:
    details = event.details
    return replace(
        entry,
        ended_unix_s=time_unix_s,
        exit_code=count(details, "exit_code"),
        outcome=text(details, "outcome"),
        reason=text(details, "reason"),
        step=count(details, "step"),
        checkpoint=count(details, "checkpoint"),
        next=text(details, "next"),
        is_over=True,
    )
