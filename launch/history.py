"""What the record of a run says: its submissions, its attempts and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from launch.record import DAMAGED, Event
from launch.values import MAX_CHARS, count, moment, table, text, texts

ENDS = ("done", "stopped", "failed", "refused")


@dataclass
class Submission:
    """What a scheduler was asked to start, and what it called it."""

    scheduler: str
    time_unix_s: float | None
    nodes: int | None = None
    handle: dict[str, Any] = field(default_factory=dict)  # empty: no answer of the scheduler is known
    rejection: str = ""  # why the job could not be started


def attempt_name(number: int) -> str:
    """Return the name of an attempt, which is that of its folder in logs/ too."""
    return f"attempt_{number:04d}"


@dataclass
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


@dataclass
class Ended:
    outcome: str
    reason: str
    time_unix_s: float | None


@dataclass
class History:
    """All attempts of the run; the rest is of its last submission."""

    submissions: int = 0
    submission: Submission | None = None
    attempts: list[AttemptEntry] = field(default_factory=list)
    attempts_before: int = 0  # of earlier submissions
    failed_gate: dict[str, str] = field(default_factory=dict)  # node: reason
    stop_asked_unix_s: float | None = None
    cancelled_unix_s: float | None = None
    excluded: list[str] = field(default_factory=list)  # nodes that requeues kept the job from
    ended: Ended | None = None
    faults: int = 0  # attempts that failed or saved nothing new, and requeues without an attempt
    idle: int = 0  # of them those in a row, up to now, that saved nothing new
    is_tried: bool = False  # an attempt was made since the last requeue
    damaged: list[str] = field(default_factory=list)  # events that cannot be read

    @property
    def has_end(self) -> bool:
        return self.ended is not None or self.cancelled_unix_s is not None

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

    def add(self, event: Event) -> None:
        """Add an event of the submission that began last."""
        details, last, at_unix_s = event.details, self.last_attempt, moment(vars(event), "time_unix_s")
        match event.kind:
            case "submitted":
                self.submission = submission_of(event)
            case "not_submitted" if self.submission is not None:
                self.submission.rejection = text(details, "reason") or "rejected"
            case "attempt_began":
                begun_at = count(details, "checkpoint") or 0
                if last is not None and not last.is_over:  # its machine was lost; what it saved shows now
                    self.add_try(progressed=begun_at > last.begun_at)
                number, nodes = count(details, "number") or 0, texts(details, "nodes")
                self.attempts.append(AttemptEntry(number, nodes, at_unix_s, begun_at=begun_at))
                self.ended, self.is_tried = None, True
            case "refused" if last is not None and details.get("attempt") == attempt_name(last.number):
                last.reason = last.reason or text(details, "reason")
            case "attempt_ended" if last is not None:
                last.ended_unix_s, last.exit_code, last.is_over = at_unix_s, count(details, "exit_code"), True
                last.step, last.checkpoint = count(details, "step"), count(details, "checkpoint")
                last.outcome, last.reason = text(details, "outcome"), text(details, "reason")
                last.next = text(details, "next")
                self.add_try(progressed=details.get("made_progress") is True, in_order=last.outcome == "stopped")
            case "gate":
                failed = table(details, "failed").items()
                self.failed_gate = {node: str(reason)[:MAX_CHARS] for node, reason in failed}
            case "stop_asked":
                self.stop_asked_unix_s = at_unix_s or 0.0
            case "cancelled":
                self.cancelled_unix_s = at_unix_s or 0.0
            case "requeued":
                if not self.is_tried:
                    self.add_try(progressed=False)
                self.excluded = sorted({*self.excluded, *texts(details, "excluded")})
                self.is_tried = False
            case "ended":
                outcome = text(details, "outcome")
                self.ended = Ended(outcome if outcome in ENDS else "ended", text(details, "reason"), at_unix_s)
            case kind if kind == DAMAGED:
                self.damaged.append(text(details, "name"))

    def add_try(self, *, progressed: bool, in_order: bool = False) -> None:
        self.idle = 0 if progressed else self.idle + 1
        self.faults += not (progressed and in_order)


def read_history(events: Sequence[Event]) -> History:
    """Return what the events say. Details of a wrong type count as missing, and unknown events are passed over."""
    history = History()
    for event in events:
        if event.kind == "submitting":
            before, damaged = history.attempts, history.damaged
            history = History(history.submissions + 1, submission_of(event), before, len(before), damaged=damaged)
        else:
            history.add(event)
    return history


def submission_of(event: Event) -> Submission:
    scheduler, at_unix_s = text(event.details, "scheduler"), moment(vars(event), "time_unix_s")
    return Submission(scheduler, at_unix_s, count(event.details, "nodes"), table(event.details, "handle"))
