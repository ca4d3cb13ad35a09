"""What the record of a run says: its submissions, its attempts and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from launch.record import DAMAGED, Event
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
    begun_at: int = 0  # the newest checkpoint when it began
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
    excluded: list[str] = field(default_factory=list)  # nodes that requeues kept the job from
    ended: Ended | None = None
    tries: list[bool] = field(default_factory=list)  # whether each attempt, or a requeue without one, got on
    faults: int = 0  # tries but those that stopped in order and had saved something new
    is_tried: bool = False  # an attempt was made since the last requeue
    damaged: list[str] = field(default_factory=list)  # events that cannot be read

    @property
    def has_end(self) -> bool:
        return self.ended is not None or self.cancelled_unix_s is not None

    @property
    def idle(self) -> int:
        """Tries in a row, up to now, that saved nothing new."""
        return next((number for number, got_on in enumerate(reversed(self.tries)) if got_on), len(self.tries))

    @property
    def is_stop_asked(self) -> bool:
        """Whether the user wants no other attempt."""
        return self.stop_asked_unix_s is not None or self.cancelled_unix_s is not None

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
        begun_at = count(details, "checkpoint") or 0
        entry = AttemptEntry(count(details, "number") or 0, texts(details, "nodes"), time_unix_s, begun_at=begun_at)
        last = history.last_attempt
        if last is not None and not last.is_over:  # its machine was lost; what it saved shows now
            history = tried(history, got_on=begun_at > last.begun_at, in_order=False)
        return replace(history, attempts=[*history.attempts, entry], ended=None, is_tried=True)
    if event.kind == "attempt_ended" and history.last_attempt is not None:
        entry, got_on = over(history.last_attempt, event, time_unix_s), details.get("made_progress") is True
        history = tried(history, got_on=got_on, in_order=entry.outcome == "stopped")
        return replace(history, attempts=[*history.attempts[:-1], entry])
    if event.kind == "gate":
        failed = {str(node): str(reason)[:MOST_CHARS] for node, reason in table(details, "failed").items()}
        return replace(history, passed_gate=texts(details, "passed"), failed_gate=failed)
    if event.kind == "stop_asked":
        return replace(history, stop_asked_unix_s=time_unix_s or 0.0)
    if event.kind == "cancelled":
        return replace(history, cancelled_unix_s=time_unix_s or 0.0)
    if event.kind == "requeued":
        history = history if history.is_tried else tried(history, got_on=False, in_order=False)
        excluded = sorted({*history.excluded, *texts(details, "excluded")})
        return replace(history, requeues=history.requeues + 1, excluded=excluded, is_tried=False)
    if event.kind == DAMAGED:
        return replace(history, damaged=[*history.damaged, text(details, "name")])
    if event.kind == "ended":
        outcome = text(details, "outcome")
        return replace(
            history, ended=Ended(outcome if outcome in ENDS else "ended", text(details, "reason"), time_unix_s)
        )
    return history


def tried(history: History, *, got_on: bool, in_order: bool) -> History:
    return replace(history, tries=[*history.tries, got_on], faults=history.faults + (not (got_on and in_order)))


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
    begins = History(history.submissions + 1, now, history.attempts, len(history.attempts))
    return replace(begins, damaged=history.damaged)


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
