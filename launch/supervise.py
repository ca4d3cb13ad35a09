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
from launch.record import AGAIN, END, ENDS, REQUEUE, Attempt, History, Record, now_unix_s
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
TAKEN_BACK = (KILLED, "spot_notice", "capacity_block")
ATTEMPTS = 20  # number of failed attempts after which a run is given up
# number of attempts in a row without a new checkpoint after which a run is given up
IDLE_ATTEMPTS = 2
RETRIES_S = 900.0  # how long to retry S3 or Slurm, whose outages may be long
ASKS_S = 5.0  # pause between two tries
PAUSE_S = 5.0  # pause between two attempts, during which a failed service may recover


def retry(act: Callable[..., Answer], *arguments: Any, **named: Any) -> Answer:
    """Call `act`, and call it again for up to RETRIES_S while a service does not answer."""
    again = Retrying(
        retry=retry_if_exception_type((Unreachable, OSError)),
        stop=stop_after_delay(RETRIES_S),
        wait=wait_fixed(ASKS_S),
        before_sleep=lambda state: say(
            f"trying again: {state.outcome and state.outcome.exception()}"
        ),
        reraise=True,
    )
    return again(act, *arguments, **named)


class NeverBegan(Failure):
    """An error raised because the scheduler did not start a step of a job. It contains the scheduler's message."""


# ---- decisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decision:
    """The next action: another attempt here (AGAIN), one on other machines or later (REQUEUE), or none (END)."""

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
    """Decide what to do after an attempt, which is the last one in `history`.

    `outcome` is the content of outcome.json, or {} if the attempt wrote none. `asked` says why the scheduler wants the
    machines back, if it does. `rejection` says why the trainer rejected the run, if it did; `outcome` may then be from
    an earlier attempt.
    """
    if rejection:
        return Decision(END, "refused", f"rejected: {rejection}")
    if outcome:
        ended = outcome["outcome"]
        reason = outcome["reason"]
        kind = outcome["kind"]
    else:
        ended = "failed"
        kind = ""
        reason = f"ended with exit code {exit_code} and left no outcome"
    if ended in ("done", "refused") or (ended == "failed" and not outcome.get("goes_on", True)):
        return Decision(END, ended, reason)
    if history.is_stop_asked:
        return Decision(END, "stopped", "stopped as asked")
    is_taken_back = asked is not None or kind in TAKEN_BACK
    if ended == "stopped" and not is_taken_back:
        return Decision(END, "stopped", reason)
    # An attempt that stopped as asked lost nothing. It counts as a fault only if it saved nothing new.
    limit = exhausted(history)
    if limit:
        return Decision(END, "failed", f"{limit}; the last one {ended}: {reason}")
    if ended == "failed":
        return Decision(AGAIN if asked is None else REQUEUE, ended, reason)
    was_killed = asked is None and kind == KILLED and not cluster.signals_ranks
    return Decision(AGAIN if was_killed else REQUEUE, ended, asked or reason)


def exhausted(history: History) -> str:
    """Return which limit the attempts of a submission have reached; "" if none."""
    if history.faults >= ATTEMPTS:
        return f"{history.faults} attempts failed, which is the limit"
    if history.idle >= IDLE_ATTEMPTS:
        return f"{history.idle} attempts in a row saved nothing new"
    return ""


# ---- the status of attempts ------------------------------------------------------------------------------------------


def close(record: Record, attempt: Attempt, decision: Decision) -> None:
    """Write the end of an attempt."""
    ended = replace(
        attempt,
        ended_unix_s=now_unix_s(),
        outcome=decision.outcome,
        reason=decision.reason,
        next=decision.next,
    )
    retry(record.keep, ended)


def conclude(record: Record, decision: Decision) -> None:
    """Record a decision that was not made by `supervise`: in the running attempt, or else in a new one.

    An end is recorded in the job's last attempt, even if that is over.
    """
    history = retry(record.history)
    attempt = history.last_attempt if decision.next == END else history.running_attempt
    if attempt is None:
        attempt = retry(record.begin, [], 0)
    if attempt is None:  # another part of a preparation ends at the same time
        conclude(record, decision)
        return
    close(record, attempt, decision)


@contextmanager
def recording_failure(record: Record) -> Iterator[None]:
    """Record an error that ends the job. Without the record, it would look as if the machine had been lost."""
    try:
        yield
    except Exception as error:
        reason = f"the launcher failed: {error or type(error).__name__}"
        conclude(record, Decision(END, "failed", reason))
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
        if self.reason is None or self.is_written:
            return
        try:
            if self.record.run.size(ENVIRONMENT) is not None:
                self.record.run.write(STOP_FILE, b"")
                self.is_written = True
        except (InputError, Unreachable, OSError) as error:
            say(f"the run cannot be asked to stop: {error}; trying again")


# ---- the supervisor --------------------------------------------------------------------------------------------------


def supervise(
    record: Record,
    cluster: ClusterConfig,
    start: Callable[[int], int],
    *,
    nodes: list[str],
    stop: StopFile,
    examine: Callable[[], str] | None = None,
) -> Decision:
    """Make attempts, and record their status, until the decision is not AGAIN.

    `start(number)` makes an attempt, numbered over the whole run, and returns its exit code. `examine()` runs before
    the first attempt and returns why the machines cannot train, "" if they can. If one of both raises NeverBegan, the
    job is requeued. `stop` has a reason once the scheduler has requested a stop.
    """
    while True:
        attempt = begin(record, nodes)
        decision = reason_not_to_train(record, stop)
        attempt = replace(attempt, never_began=decision is not None)
        try:
            if decision is None and examine is not None:
                decision = preflight(examine, stop)
                examine = None
            if decision is None:
                attempt, decision = train(record, cluster, attempt, start, stop)
        except NeverBegan as error:
            attempt = replace(attempt, never_began=True)
            decision = Decision(REQUEUE, "failed", str(error))
        close(record, attempt, decision)
        say(
            f"attempt {attempt.number}: {decision.outcome}, {decision.reason}; next: {decision.next}"
        )
        if decision.next != AGAIN:
            return decision
        time.sleep(PAUSE_S)


def begin(record: Record, nodes: list[str]) -> Attempt:
    """Record a new attempt, and the end of the one before if its supervisor was lost with its machine."""
    saved = retry(newest_checkpoint, record.run) or 0
    lost = retry(record.history).running_attempt
    if lost is not None:
        reason = "its machine was lost, or its supervisor was killed"
        close(record, replace(lost, checkpoint=saved), Decision(AGAIN, "failed", reason))
    attempt = retry(record.begin, nodes, saved)
    if attempt is None:
        raise Failure(f"another supervisor of {record.run_dir} has begun; this one ends")
    return attempt


def reason_not_to_train(record: Record, stop: StopFile) -> Decision | None:
    """Return a decision if the user or the scheduler wants no attempt, or if a limit is reached; otherwise None."""
    # Look for STOP first: who asks for a stop records the request before writing the file.
    has_stop_file = retry(record.run.size, STOP_FILE) is not None
    history = retry(record.history)
    if history.is_stop_asked:
        return Decision(END, "stopped", "stopped as asked")
    if stop.reason is not None:
        return Decision(REQUEUE, "stopped", stop.reason)
    limit = exhausted(history)
    if limit:
        return Decision(END, "failed", limit)
    if has_stop_file:
        # The file was meant for an attempt that died before it could stop.
        retry(record.run.remove, STOP_FILE)
    return None


def preflight(examine: Callable[[], str], stop: StopFile) -> Decision | None:
    """Return a decision if the machines cannot train, or if the scheduler has requested a stop meanwhile."""
    reason = examine()
    if stop.reason is not None:
        return Decision(REQUEUE, "stopped", stop.reason)
    if reason:
        return Decision(END, "failed", reason)
    return None


def train(
    record: Record,
    cluster: ClusterConfig,
    attempt: Attempt,
    start: Callable[[int], int],
    stop: StopFile,
) -> tuple[Attempt, Decision]:
    """Run the trainer; return the status of the attempt with its result, and the decision."""
    run = record.run
    before = retry(read_outcome, run)
    attempt = replace(attempt, is_training=True)
    retry(record.keep, attempt)
    code = start(attempt.number)
    outcome = retry(read_outcome, run)
    if outcome == before or outcome.get("outcome") not in ENDS:
        outcome = {}  # an earlier attempt or another program wrote it
    attempt = replace(
        attempt,
        outcome=outcome.get("outcome", "failed"),
        step=outcome.get("step"),
        checkpoint=retry(newest_checkpoint, run) or 0,
        ended_unix_s=now_unix_s(),
    )
    history = retry(record.history)
    history = replace(history, attempts=[*history.attempts[:-1], attempt])
    rejection = retry(record.rejection, attempt.number)
    decision = decide(
        outcome, history, cluster, exit_code=code, asked=stop.reason, rejection=rejection
    )
    return attempt, decision
