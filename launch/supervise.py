"""The supervisor of a run, for every scheduler. It makes attempts until the run is done, is stopped, or keeps failing.

It reads the result of an attempt from the run folder, since exit codes are ambiguous: torchrun exits with 1 even after
a clean stop, and srun with the code of the task that ended first.
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
from train.machine.console import say
from train.run.command import DONE, FAILED, REJECTED, STOPPED
from train.run_folder.identity import ENVIRONMENT
from train.run_folder.outcome import STOP_FILE, read_outcome

Answer = TypeVar("Answer")
CODES = {"done": DONE, "stopped": STOPPED, "failed": FAILED, "refused": REJECTED}
# Kinds of stops (train/run/stopping.py). KILLED: torchrun got a signal or died. TAKEN_BACK: machines may be lost.
KILLED = "SIGTERM"
TAKEN_BACK = (KILLED, "spot_notice", "scheduled_event", "capacity_block")
# after this number of attempts in a row without a new checkpoint, the run is given up
IDLE_ATTEMPTS = 2
# how long to retry S3 or Slurm, whose outages may be long; the pause between tries
RETRIES_S, ASKS_S = (
    900.0,
    5.0,
)
PAUSE_S = 5.0  # pause between two attempts, during which a failed service may recover


def retry(act: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """Call `act`, and call it again for up to RETRIES_S while a service does not answer."""
    again = retrying((Unreachable, OSError), RETRIES_S, ASKS_S)
    again.before_sleep = lambda state: say(
        f"trying again: {state.outcome and state.outcome.exception()}"
    )
    return again(act, *arguments, **named)


def retrying(
    kinds: type[Exception] | tuple[type[Exception], ...], limit_s: float, pause_s: float
) -> Retrying:
    stop, wait = stop_after_delay(limit_s), wait_fixed(pause_s)
    return Retrying(retry=retry_if_exception_type(kinds), stop=stop, wait=wait, reraise=True)


class NeverBegan(Failure):
    """An error raised because the scheduler did not start a step of a job. It contains the scheduler's message."""


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
    """Decide what to do after an attempt.

    `outcome` is the content of outcome.json, or {} if the attempt wrote none. `asked` says why the scheduler wants the
    machines back, if it does. `rejection` says why the trainer rejected the run, if it did; `outcome` may then be from
    an earlier attempt.
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
    is_here = asked is None and (
        ended == "failed" or (kind == KILLED and not cluster.signals_ranks)
    )
    return Decision(
        "again" if is_here else "requeue", ended, reason if ended == "failed" else asked or reason
    )


def prepared(code: int, what: str) -> Decision:
    """Return the decision after a preparation, or a part of one, from the exit code of baretrain prepare."""
    outcome = {DONE: "done", REJECTED: "refused"}.get(code, "failed")
    return Decision(
        "end", outcome, f"{what} ended with exit code {code}{'; see its log' if code else ''}"
    )


def exhausted(history: History, cluster: ClusterConfig) -> str:
    if history.faults >= cluster.attempts:
        return f"{history.faults} attempts failed, which is the limit (cluster.attempts)"
    if history.idle >= IDLE_ATTEMPTS:
        return f"{history.idle} attempts in a row saved nothing new"
    return ""


def settled(
    decision: Decision, record: Record, cluster: ClusterConfig, **details: Any
) -> Decision:
    """Return the decision; a requeue becomes an end if the user asked for a stop, or if a limit is reached.

    `details` are those of the event that will record the requeue.
    """
    if decision.next != "requeue":
        return decision
    history = read_history([*retry(record.events), Event("requeued", 0.0, "", details)])
    if history.is_stop_asked:
        return replace(decision, next="end")
    limit = exhausted(history, cluster)
    return Decision("end", "failed", f"{limit}; {decision.reason}") if limit else decision


@contextmanager
def recording_failure(record: Record) -> Iterator[None]:
    """Record an error that ends the job. Without the record, it would look as if the machine had been lost."""
    try:
        yield
    except Exception as error:
        reason = f"the launcher failed: {error or type(error).__name__}"
        retry(record.append_event, "ended", outcome="failed", reason=reason)
        raise


class StopFile:
    """A request to stop with a checkpoint: a signal handler calls `ask`, and `write` makes STOP in the run folder."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.reason: str | None = None
        self.is_written = False

    def ask(self, reason: str) -> None:
        """Make the request; only the first reason is kept. Signal handlers call this, so it writes no file."""
        self.reason = self.reason or reason

    def write(self) -> None:
        """Write STOP if a stop was requested and the trainer has made the run folder. A failed write is tried again.

        The trainer rejects a folder that contains only STOP, since it looks like another program's.
        """
        try:
            if (
                self.reason
                and not self.is_written
                and self.record.run.size(ENVIRONMENT) is not None
            ):
                self.record.run.write(STOP_FILE, b"")
                self.is_written = True
        except (InputError, Unreachable, OSError) as error:
            say(f"the run cannot be asked to stop: {error}; trying again")


def supervise(
    record: Record,
    cluster: ClusterConfig,
    start: Callable[[int], int],
    *,
    nodes: list[str],
    stop: StopFile,
) -> Decision:
    """Make attempts, and record their events, until the decision is not "again".

    `start(number)` makes an attempt, numbered over the whole run, and returns its exit code. If it raises NeverBegan,
    the job is requeued. `stop` has a reason once the scheduler has requested a stop.
    """
    run = record.run
    while True:
        # read before the events: `stop` writes its event first
        has_stop_file = retry(run.size, STOP_FILE) is not None
        history = retry(record.history)
        if history.is_stop_asked:
            return Decision("end", "stopped", "stopped as asked")
        if stop.reason is not None:  # the request came between two attempts, or before the first
            return Decision("requeue", "stopped", stop.reason)
        if has_stop_file:
            # it was meant for an attempt that died before it could stop
            retry(run.remove, STOP_FILE)
        number, before, saved = (
            len(history.attempts) + 1,
            retry(read_outcome, run),
            retry(newest_checkpoint, run) or 0,
        )
        began = {"number": number, "nodes": nodes, "checkpoint": saved}
        history.add(Event("attempt_began", 0.0, "", began))
        # an attempt whose machine was lost is counted only now
        if limit := exhausted(history, cluster):
            return Decision("end", "failed", limit)
        retry(record.append_event, "attempt_began", **began)

        code, never_began = FAILED, ""
        try:
            code = start(number)
        except NeverBegan as error:
            never_began = str(error)
        outcome, checkpoint = retry(read_outcome, run), retry(newest_checkpoint, run) or 0
        outcome = {} if outcome == before else outcome  # an earlier attempt wrote it
        ended: dict[str, Any] = {
            "number": number,
            "exit_code": code,
            "made_progress": checkpoint > saved,
        }
        ended |= {
            "never_began": bool(never_began),
            "checkpoint": checkpoint,
            "step": outcome.get("step"),
        }
        ended |= {"outcome": outcome.get("outcome", "failed")}
        history = retry(record.history)
        # recorded by a machine
        rejection = history.last_attempt.reason if history.last_attempt else ""
        history.add(Event("attempt_ended", time.time(), "", ended))
        decision = decide(
            outcome, history, cluster, exit_code=code, asked=stop.reason, rejection=rejection
        )
        if never_began and decision.next == "again":
            decision = replace(decision, next="requeue", reason=never_began)
        ended |= {"next": decision.next, "outcome": decision.outcome, "reason": decision.reason}
        retry(record.append_event, "attempt_ended", **ended)
        say(f"attempt {number}: {decision.outcome}, {decision.reason}; next: {decision.next}")
        if decision.next != "again":
            return decision
        time.sleep(PAUSE_S)
