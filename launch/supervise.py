"""Attempts of a run, one after another, until it is done, stopped or hopeless. Every scheduler's jobs run in this loop.

What came of an attempt is read from the run folder: torchrun exits with 1 for a clean stop too, and srun with the code
of whichever task ended first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from launch.config import ClusterConfig
from launch.history import History, after, read_history
from launch.record import Event, Record
from launch.values import text
from train.cli.command import DONE, FAILED, REFUSED, STOPPED
from train.config import InputError, Unreachable
from train.run_folder.outcome import STOP_FILE, read_outcome

Answer = TypeVar("Answer")
CODES = {"done": DONE, "stopped": STOPPED, "failed": FAILED, "refused": REFUSED}
COMMITTED = re.compile(r"checkpoints/step_([0-9]{1,18})/manifest\.json")
FIRST_FILE = "environment.json"  # of a run folder
# Kinds of stops (train/attempt/notices.py): a signal to torchrun, or its death; and machines that are taken away. A job
# that began with an earlier version goes on with its code, which writes sentences.
KILLED = "SIGTERM"
TAKEN_BACK = (KILLED, "spot_notice", "rebalance", "scheduled_event", "capacity_block", "EC2 ", "the capacity block ")
PATIENCE_S, ASKS_S = 900.0, 5.0  # for S3 and Slurm to answer again: what ended an attempt may last
PAUSE_S = 5.0  # between two attempts: a service that failed both may need a moment


def retry(act: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """Act, and again for PATIENCE_S while a service does not answer."""
    again = Retrying(
        retry=retry_if_exception_type((Unreachable, OSError)),
        stop=stop_after_delay(PATIENCE_S),
        wait=wait_fixed(ASKS_S),
        before_sleep=lambda state: print(f"tried again: {state.outcome and state.outcome.exception()}", flush=True),
        reraise=True,
    )
    return again(act, *arguments, **named)


@dataclass(frozen=True)
class Seen:
    """What a run folder says at one moment."""

    outcome: dict[str, Any]  # of the last attempt; empty if it left none
    checkpoint: int  # the newest step that is committed; -1: none


@dataclass(frozen=True)
class Attempt:
    """An attempt that has ended."""

    before: Seen
    after: Seen
    exit_code: int
    asked: str | None = None  # why the scheduler wants the machines back; None: it does not
    refusal: str = ""  # what the trainer refused before it took the run folder: then there is no outcome

    @property
    def outcome(self) -> dict[str, Any]:
        """How it ended; empty if it left no outcome: then the one that is there is older."""
        return {} if self.after.outcome == self.before.outcome else self.after.outcome

    @property
    def made_progress(self) -> bool:
        return self.after.checkpoint > self.before.checkpoint


@dataclass(frozen=True)
class Decision:
    """What comes next: another attempt here ("again"), one on other machines or later ("requeue"), or none ("end")."""

    next: str
    outcome: str  # done | stopped | failed | refused
    reason: str


def look(record: Record) -> Seen:
    names = record.run.names("checkpoints/")
    steps = [int(match[1]) for name in names if (match := COMMITTED.fullmatch(name))]
    return Seen(read_outcome(record.run), max(steps, default=-1))


def decide(attempt: Attempt, history: History, cluster: ClusterConfig) -> Decision:
    """Decide what follows an attempt."""
    outcome = attempt.outcome
    ended, reason, kind = (str(outcome.get(key, "")) for key in ("outcome", "reason", "kind"))
    if not outcome:
        ended, reason = "failed", f"ended with exit code {attempt.exit_code} and left no outcome"
        if attempt.refusal:
            return Decision("end", "refused", f"refused: {attempt.refusal}")
    if ended in ("done", "refused"):
        return Decision("end", ended, reason)
    if ended == "failed" and outcome and not outcome["goes_on"]:
        return Decision("end", "failed", reason)
    if history.is_stop_asked:
        return Decision("end", "stopped", "stopped as asked")
    limit = exhausted(history, cluster)
    if ended == "stopped":
        if attempt.asked is None and not kind.startswith(TAKEN_BACK):
            return Decision("end", "stopped", reason)
        # Stopping in order loses nothing, so that such attempts count as idle only if they saved nothing new.
        if limit:
            return Decision("end", "failed", limit)
        is_here = not cluster.signals_ranks and attempt.asked is None and kind == KILLED
        return Decision("again" if is_here else "requeue", "stopped", attempt.asked or reason)
    if limit:
        return Decision("end", "failed", f"{limit}; the last one {reason}")
    return Decision("requeue" if attempt.asked else "again", "failed", reason)


def prepared(code: int, what: str) -> Decision:
    """What came of a preparation, or of a part of one, by the exit code of train.prepare."""
    outcome = {DONE: "done", REFUSED: "refused"}.get(code, "failed")
    return Decision("end", outcome, f"{what} ended with exit code {code}{'; see its log' if code else ''}")


def exhausted(history: History, cluster: ClusterConfig) -> str:
    if history.faults >= cluster.attempts:
        return f"{history.faults} attempts failed, the limit (cluster.attempts)"
    if history.idle >= cluster.idle_attempts:
        return f"{history.idle} attempts in a row saved nothing new, the limit (cluster.idle_attempts)"
    return ""


def settled(decision: Decision, record: Record, cluster: ClusterConfig) -> Decision:
    """The decision that stands: a requeue becomes an end once the user has asked for a stop, or a limit is reached."""
    if decision.next != "requeue":
        return decision
    history = read_history([*retry(record.events), Event("requeued", 0.0, "")])
    if history.is_stop_asked:
        return replace(decision, next="end")
    limit = exhausted(history, cluster)
    return Decision("end", "failed", f"{limit}; {decision.reason}") if limit else decision


@contextmanager
def recording_failure(record: Record) -> Iterator[None]:
    """Whatever ends the job by an error is in the record: else it would look as if its machine had been lost."""
    try:
        yield
    except Exception as error:
        reason = f"the launcher failed: {error or type(error).__name__}"
        retry(record.append_event, "ended", outcome="failed", reason=reason)
        raise


class StopRequest:
    """A request to stop with a checkpoint: signals leave it, and it becomes the file STOP in the run folder."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.reason: str | None = None
        self.is_written = False

    def ask(self, reason: str) -> None:
        """Note the request; the first reason stays. Signal handlers call this, so nothing is written yet."""
        self.reason = self.reason or reason

    def write(self) -> None:
        """Write the file once it has been asked for, and once the trainer has made its folder: it takes a folder with
        nothing but STOP for another program's. What cannot be written now is tried again at the next call.
        """
        if self.reason is None or self.is_written:
            return
        try:
            if self.record.run.size(FIRST_FILE) is not None:
                self.record.run.write(STOP_FILE, b"")
                self.is_written = True
        except (InputError, Unreachable, OSError) as error:
            print(f"the run cannot be asked to stop: {error}; tried again", flush=True)


def attempt_name(number: int) -> str:
    """Of the folder in logs/ that holds what an attempt printed."""
    return f"attempt_{number:04d}"


def refusal_of(record: Record, attempt: str) -> str:
    """What the trainer refused in an attempt, as a machine has noted it; empty if it refused nothing."""
    noted = [event.details for event in record.events() if event.kind == "refused"]
    return next((text(each, "reason") for each in noted if each.get("attempt") == attempt), "")


def supervise(
    record: Record,
    cluster: ClusterConfig,
    start: Callable[[int], int],
    *,
    nodes: list[str],
    stop: StopRequest,
    pause_s: float = PAUSE_S,
    meet: Callable[[], object] = lambda: None,
) -> Decision:
    """Make attempts until the decision is another than "again", and note each in the record.

    `start` makes the attempt of a number, counted over all of the run, and returns its exit code. `stop` holds the
    scheduler's request for the machines. `meet` waits between two attempts for machines that may be lost.
    """
    while True:
        has_stop_file = retry(record.run.size, STOP_FILE) is not None  # before the events: a stop is noted first
        events = retry(record.events)
        if read_history(events).is_stop_asked:
            return Decision("end", "stopped", "stopped as asked")
        if stop.reason is not None:  # it came between two attempts, or before the first
            return Decision("requeue", "stopped", stop.reason)
        if has_stop_file:
            retry(record.run.remove, STOP_FILE)  # of an attempt that died before it could obey
        number = 1 + sum(event.kind == "attempt_began" for event in events)
        before = retry(look, record)
        begins = Event("attempt_began", 0.0, "", {"number": number, "checkpoint": max(0, before.checkpoint)})
        if limit := exhausted(after(read_history(events), begins), cluster):  # by attempts whose machines were lost
            return Decision("end", "failed", limit)
        retry(record.append_event, "attempt_began", number=number, nodes=nodes, checkpoint=max(0, before.checkpoint))
        code = start(number)
        refusal = retry(refusal_of, record, attempt_name(number))
        attempt = Attempt(before, retry(look, record), code, stop.reason, refusal)
        details: dict[str, Any] = {"number": number, "exit_code": code, "made_progress": attempt.made_progress}
        details |= {"checkpoint": attempt.after.checkpoint, "step": attempt.outcome.get("step")}
        details |= {"outcome": attempt.outcome.get("outcome", "failed")}
        ended = Event("attempt_ended", time.time(), "", details)
        decision = decide(attempt, read_history([*retry(record.events), ended]), cluster)
        details |= {"next": decision.next, "outcome": decision.outcome, "reason": decision.reason}
        retry(record.append_event, "attempt_ended", **details)
        print(f"attempt {number}: {decision.outcome}, {decision.reason}; next: {decision.next}", flush=True)
        if decision.next != "again":
            return decision
        time.sleep(pause_s)
        meet()
