"""The attempts of a run, one after another, until it is done, stopped or hopeless, in jobs of every scheduler.

The result of an attempt is read from the run folder: torchrun exits with 1 for a clean stop too, and srun with the code
of whichever task ended first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from launch.config import ClusterConfig
from launch.record import Event, History, Record, read_history
from launch.run_progress import newest_checkpoint
from train.config import Failure, InputError, Unreachable
from train.run.command import DONE, FAILED, REJECTED, STOPPED
from train.system.identity import ENVIRONMENT
from train.system.outcome import STOP_FILE, read_outcome

Answer = TypeVar("Answer")
CODES = {"done": DONE, "stopped": STOPPED, "failed": FAILED, "refused": REJECTED}
# Kinds of stops (train/run/stopping.py): a signal to torchrun, or its death; and the loss of machines.
KILLED = "SIGTERM"
TAKEN_BACK = (KILLED, "spot_notice", "scheduled_event", "capacity_block")
IDLE_ATTEMPTS = 2  # starts in a row without a new checkpoint, after which another one would fail too
RETRIES_S, ASKS_S = 900.0, 5.0  # for S3 and Slurm to answer again: the cause that ended an attempt may last
PAUSE_S = 5.0  # between two attempts: a service that failed both may need a moment


def retry(act: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """Act, repeatedly for RETRIES_S while a service does not answer."""
    again = retrying((Unreachable, OSError), RETRIES_S, ASKS_S)
    again.before_sleep = lambda state: print(f"tried again: {state.outcome and state.outcome.exception()}", flush=True)
    return again(act, *arguments, **named)


def retrying(kinds: type[Exception] | tuple[type[Exception], ...], limit_s: float, pause_s: float) -> Retrying:
    stop, wait = stop_after_delay(limit_s), wait_fixed(pause_s)
    return Retrying(retry=retry_if_exception_type(kinds), stop=stop, wait=wait, reraise=True)


class NeverBegan(Failure):
    """An error because the scheduler did not start a part of a job on its machines; the message is the scheduler's."""


@dataclass(frozen=True)
class Decision:
    """The next action: another attempt here ("again"), one on other machines or later ("requeue"), or none ("end")."""

    next: str
    outcome: str  # done | stopped | failed | refused
    reason: str


def decide(
    outcome: dict[str, Any],
    history: History,
    cluster: ClusterConfig,
    *,
    exit_code: int,
    asked: str | None = None,
    rejection: str = "",
) -> Decision:
    """Decide what follows an attempt.

    `outcome` describes its end, empty if it left none. `asked` says why the scheduler wants the machines back; None: it
    does not. `rejection` is the trainer's reason to reject the run: the outcome may be an earlier attempt's.
    """
    if rejection:
        return Decision("end", "refused", f"rejected: {rejection}")
    ended, reason, kind = (str(outcome.get(key, "")) for key in ("outcome", "reason", "kind"))
    if not outcome:
        ended, reason = "failed", f"ended with exit code {exit_code} and left no outcome"
    if ended in ("done", "refused") or (ended == "failed" and outcome and not outcome["goes_on"]):
        return Decision("end", ended, reason)
    if history.is_stop_asked:
        return Decision("end", "stopped", "stopped as asked")
    if ended == "stopped" and asked is None and kind not in TAKEN_BACK:
        return Decision("end", "stopped", reason)
    # An attempt that stopped as asked lost nothing. It counts as a fault only if it saved nothing new.
    if limit := exhausted(history, cluster):
        return Decision("end", "failed", f"{limit}; the last one {ended}: {reason}")
    is_here = asked is None and (ended == "failed" or (kind == KILLED and not cluster.signals_ranks))
    return Decision("again" if is_here else "requeue", ended, reason if ended == "failed" else asked or reason)


def prepared(code: int, what: str) -> Decision:
    """Return the decision after a preparation, or a part of one, from the exit code of train.prepare."""
    outcome = {DONE: "done", REJECTED: "refused"}.get(code, "failed")
    return Decision("end", outcome, f"{what} ended with exit code {code}{'; see its log' if code else ''}")


def exhausted(history: History, cluster: ClusterConfig) -> str:
    if history.faults >= cluster.attempts:
        return f"{history.faults} attempts failed, the limit (cluster.attempts)"
    if history.idle >= IDLE_ATTEMPTS:
        return f"{history.idle} attempts in a row saved nothing new"
    return ""


def settled(decision: Decision, record: Record, cluster: ClusterConfig, **details: Any) -> Decision:
    """Return the final decision: no requeue after the user's stop or a limit. `details` go into the requeue's event."""
    if decision.next != "requeue":
        return decision
    history = read_history([*retry(record.events), Event("requeued", 0.0, "", details)])
    if history.is_stop_asked:
        return replace(decision, next="end")
    limit = exhausted(history, cluster)
    return Decision("end", "failed", f"{limit}; {decision.reason}") if limit else decision


@contextmanager
def recording_failure(record: Record) -> Iterator[None]:
    """Record the error that ends the job: otherwise its machine would seem to have been lost."""
    try:
        yield
    except Exception as error:
        reason = f"the launcher failed: {error or type(error).__name__}"
        retry(record.append_event, "ended", outcome="failed", reason=reason)
        raise


class StopFile:
    """A request to stop with a checkpoint: signals leave it, and it becomes the file STOP in the run folder."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.reason: str | None = None
        self.is_written = False

    def ask(self, reason: str) -> None:
        """Keep the request; the first reason counts. Signal handlers call this, so nothing is written yet."""
        self.reason = self.reason or reason

    def write(self) -> None:
        """Write the file once it has been asked for, and once the trainer has made its folder.

        The trainer takes a folder with nothing but STOP for another program's. A failed write is tried again at the
        next call.
        """
        try:
            if self.reason and not self.is_written and self.record.run.size(ENVIRONMENT) is not None:
                self.record.run.write(STOP_FILE, b"")
                self.is_written = True
        except (InputError, Unreachable, OSError) as error:
            print(f"the run cannot be asked to stop: {error}; tried again", flush=True)


def supervise(
    record: Record,
    cluster: ClusterConfig,
    start: Callable[[int], int],
    *,
    nodes: list[str],
    stop: StopFile,
    pause_s: float = PAUSE_S,
) -> Decision:
    """Make attempts until the decision is not "again", each with its events in the record.

    `start` makes the attempt of a number, counted over all of the run, and returns its exit code, or raises NeverBegan:
    then the job is requeued. `stop` holds the scheduler's request for the machines.
    """
    run = record.run
    while True:
        has_stop_file = retry(run.size, STOP_FILE) is not None  # before the events: a stop is recorded first
        history = retry(record.history)
        if history.is_stop_asked:
            return Decision("end", "stopped", "stopped as asked")
        if stop.reason is not None:  # it came between two attempts, or before the first
            return Decision("requeue", "stopped", stop.reason)
        if has_stop_file:
            retry(run.remove, STOP_FILE)  # of an attempt that died before it could obey
        number, before, saved = len(history.attempts) + 1, retry(read_outcome, run), retry(newest_checkpoint, run) or 0
        began = {"number": number, "nodes": nodes, "checkpoint": saved}
        history.add(Event("attempt_began", 0.0, "", began))
        if limit := exhausted(history, cluster):  # attempts whose machines were lost were not counted until now
            return Decision("end", "failed", limit)
        retry(record.append_event, "attempt_began", **began)

        code, never_began = FAILED, ""
        try:
            code = start(number)
        except NeverBegan as error:
            never_began = str(error)
        outcome, checkpoint = retry(read_outcome, run), retry(newest_checkpoint, run) or 0
        outcome = {} if outcome == before else outcome  # an older one
        ended: dict[str, Any] = {"number": number, "exit_code": code, "made_progress": checkpoint > saved}
        ended |= {"never_began": bool(never_began), "checkpoint": checkpoint, "step": outcome.get("step")}
        ended |= {"outcome": outcome.get("outcome", "failed")}
        history = retry(record.history)
        rejection = history.last_attempt.reason if history.last_attempt else ""  # a machine has recorded it
        history.add(Event("attempt_ended", time.time(), "", ended))
        decision = decide(outcome, history, cluster, exit_code=code, asked=stop.reason, rejection=rejection)
        if never_began and decision.next == "again":
            decision = replace(decision, next="requeue", reason=never_began)
        ended |= {"next": decision.next, "outcome": decision.outcome, "reason": decision.reason}
        retry(record.append_event, "attempt_ended", **ended)
        print(f"attempt {number}: {decision.outcome}, {decision.reason}; next: {decision.next}", flush=True)
        if decision.next != "again":
            return decision
        time.sleep(pause_s)
