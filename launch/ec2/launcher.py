"""The foreground process of a launch on EC2, from the first request to the end of the run.

Only this process makes machines. If it is killed, its machines train to the end of the run and then shut down.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from launch.ec2.account import Resolved, Site
from launch.ec2.api import LATER, NEVER, Api, growing
from launch.ec2.config import Ec2Config
from launch.ec2.instances import ASKED, LISTS_S, Instance, end_all, find, regions_of
from launch.ec2.machine import MAX_RUN, REGISTERED, settle
from launch.ec2.request import run_instances
from launch.record import CONFIG, END, REQUEUE, Attempt, Job, Record
from launch.run_progress import newest_checkpoint, read_progress
from launch.supervise import CODES, Decision, close, conclude
from launch.values import shown_duration, shown_moment, text
from train.config import Failure, InputError, Unreachable
from train.machine.console import say
from train.run.command import FAILED
from train.storage.aws_errors import BadCredentials, Rejected
from train.storage.schema import read_object, read_yaml

POLL_S = 20.0
MAX_WAIT_S = 3600.0  # time to wait for capacity, or for an answer
FIRST_S, MOST_S = 10.0, 300.0  # first and longest pause between rounds over all subnets
LEAVE_S = 180.0  # time for machines to upload their logs and shut down, once the run has ended
FAILED_START = "ec2/failed/{}.json"  # the reason why a machine could not start, see boot.sh
REQUESTS = 1000  # more than a submission ever makes
Result = TypeVar("Result")


class NoCapacity(Failure):
    """An error raised because no subnet has capacity for the machines at present."""


class Cancelled(Failure):
    """An error raised because, according to the record, this launch must not make any more machines."""


class Superseded(Failure):
    """An error raised because another launch of the run has begun, to which the run's machines now belong."""


class Launcher:
    def __init__(
        self, record: Record, job: Job, cluster: Ec2Config, resolved: Resolved, api: Api
    ) -> None:
        self.record = record
        self.job = job
        self.cluster = cluster
        self.resolved = resolved
        self.api = api
        submission = record.last_submission()
        assert submission is not None
        self.submission = submission
        self.ends_unix_s = submission.time_unix_s + cluster.max_run_s
        settings = read_yaml(record.folder.read(CONFIG))
        self.usd_per_hour: float | None = settings["instance"]["usd_per_hour"]
        self.is_training = False  # whether machines have been made and are not known to have ended
        self.request = 0  # number of the last request for machines, counted over all submissions
        self.asks = 0  # how often EC2 was asked for machines
        self.machines: list[str] = []  # ids of the machines that were made last
        self.made_unix_s = 0.0
        self.attempts_before = 0  # number of attempts when the machines were made
        self.line = ""

    def run(self) -> int:
        """Train, end all machines, and return the run's exit code."""
        try:
            self.train()
        except Superseded:
            raise
        except Cancelled as error:
            say(str(error))
        except (InputError, Failure) as error:
            if self.is_training:
                say(
                    f"this launch ends here; its machines continue to train, and then shut down. {undo(self.record)}"
                )
                raise
            conclude(self.record, Decision(END, "failed", str(error)))
            with suppress(BadCredentials, Unreachable):  # the earlier error already reports it
                self.end_machines()
            raise
        ended = self.record.history().ended
        is_ending = ended is not None and self.is_training
        self.end_machines(LEAVE_S if is_ending else 0.0)
        say("no machine of the run is left on EC2")
        if ended:
            return CODES.get(ended.outcome, FAILED)
        return FAILED

    def train(self) -> None:
        """Make machines and wait for the end of the run. After an interruption, make new ones."""
        for number in itertools.count(REQUESTS * self.submission.number + 1):
            self.request = number
            self.retried(self.make_machines, NoCapacity)
            reason = self.wait_for_end()
            if not reason:
                return
            say(f"interrupted: {reason}")
            last = self.attempt_on_machines()
            is_decided = last is not None and last.next == REQUEUE  # the first machine has decided
            self.end_machines(LEAVE_S if is_decided else 0.0)
            self.is_training = False
            if not is_decided and not settle(self.record, self.interrupted(reason)):
                return
            self.check()
            if time.time() >= self.ends_unix_s:
                conclude(self.record, Decision(END, "stopped", MAX_RUN))
                return
            say("asking for all machines again")

    def interrupted(self, reason: str) -> Decision:
        """Record that the machines were lost: in the running attempt, or else in a new one, which saved nothing."""
        decision = Decision(REQUEUE, "failed", reason)
        running = self.record.history().running_attempt
        if running is None:
            conclude(self.record, decision)
        else:
            saved = newest_checkpoint(self.record.run) or 0
            close(self.record, replace(running, checkpoint=saved), decision)
        return decision

    def check(self) -> None:
        """Raise Superseded if another launch has begun, Cancelled if this one has ended or was cancelled."""
        history = self.record.history()
        if history.submission is None or history.submission.number != self.submission.number:
            raise Superseded(f"another launch of {self.record.run_dir} has begun; this one ends")
        if history.has_end:
            raise Cancelled(
                f"{self.record.run_dir} was cancelled or has ended: nothing more is made"
            )

    # ---- making machines ---------------------------------------------------------------------------------------------

    def make_machines(self) -> None:
        """Ask for all machines in one subnet after another. Raises NoCapacity if none has capacity at present."""
        wanted = f"{self.job.nodes} x {self.job.instance}"
        errors = dict[str, Rejected]()
        for site in self.resolved.sites:
            try:
                self.ask(site)
                return
            except Rejected as error:
                if error.code not in (*LATER, *NEVER):
                    raise
                errors[site.subnet] = error
        seen = "; ".join(f"{subnet}: {error.code}" for subnet, error in errors.items())
        if all(error.code in NEVER for error in errors.values()):
            raise InputError(f"no subnet can provide {wanted} ({seen}). {errors.popitem()[1]}")
        raise NoCapacity(f"no capacity for {wanted}: {seen}")

    def ask(self, site: Site) -> None:
        """Ask for machines in one subnet. If no answer arrives, ask again with the same token."""
        self.check()
        self.asks += 1
        self.attempts_before = len(self.record.history().attempts)
        parameters = run_instances(
            self.job,
            self.cluster,
            self.record,
            self.resolved,
            site,
            request=self.request,
            ask=self.asks,
            max_run_s=max(60, int(self.ends_unix_s - time.time())),
        )

        def send() -> dict[str, Any]:
            self.note(is_answered=False)
            self.check()  # after the note, which whoever cancels the launch reads after cancelling
            return self.api.ask(site.region, "run_instances", **parameters)

        try:
            answer = self.retried(send, Unreachable)
        except BadCredentials:
            raise  # an earlier request, without an answer, may have made machines
        except Rejected:
            self.note(is_answered=True)
            raise
        self.is_training = True
        self.made_unix_s = time.time()
        self.machines = [each["InstanceId"] for each in answer["Instances"]]
        self.note(is_answered=True, machines=self.machines)
        listed = ", ".join(self.machines)
        say(f"{self.job.nodes} x {self.job.instance} in {site.subnet} ({site.zone}): {listed}")

    def note(self, **answer: Any) -> None:
        """Write into the submission when EC2 was asked for machines, and the answer."""
        handle = {**self.submission.handle, ASKED: {"unix_s": time.time(), **answer}}
        self.record.keep_answer(replace(self.submission, handle=handle))

    def retried(self, act: Callable[[], Result], kind: type[Failure]) -> Result:
        """Call `act` until it does not raise this kind of error, for at most MAX_WAIT_S."""
        began_s = time.time()
        for pause_s in growing(FIRST_S, MOST_S):
            try:
                return act()
            except kind as error:
                waited_s = time.time() - began_s
                if waited_s + pause_s > MAX_WAIT_S:
                    waited = f"waited {shown_duration(waited_s)}"
                    cure = f"baretrain launch resume {self.record.run_dir} asks again"
                    raise kind(f"{error}; {waited}. {cure}") from error
                tell(f"{error}; asking again")
            time.sleep(pause_s)
        raise AssertionError

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait_for_end(self) -> str:
        """Wait until the run has ended; return "" then, or the reason for its interruption."""
        while True:
            reason = self.retried(self.look, Unreachable)
            if reason is not None:
                return reason
            time.sleep(POLL_S)

    def look(self) -> str | None:
        """Return None while the run trains, "" if it has ended, or the reason for its interruption."""
        found = find(self.api, self.record, regions_of(self.record))
        # Read after EC2's answer: a machine records its reason before it ends.
        if self.record.history().ended is not None:
            return ""
        self.check()
        last = self.attempt_on_machines()
        if last is not None and last.next == REQUEUE:
            return last.reason or "its machines were taken back"
        now_s = time.time()
        seen = {each.id: each for each in found}
        for ident in self.machines:
            machine = seen.get(ident)
            if machine is None and now_s < self.made_unix_s + LISTS_S:
                continue
            if machine is None or not machine.is_alive:
                return f"machine {ident} has ended: {self.reason_of(ident, machine)}"
        self.show()
        return None

    def attempt_on_machines(self) -> Attempt | None:
        """Return the last attempt on the machines that were made last; None if there is none yet."""
        attempts = self.record.history().attempts
        if len(attempts) > self.attempts_before:
            return attempts[-1]
        return None

    def reason_of(self, ident: str, machine: Instance | None) -> str:
        with suppress(FileNotFoundError):
            return text(read_object(self.record.folder.read(FAILED_START.format(ident))), "reason")
        if machine is None:
            return "EC2 no longer lists it"
        reason = machine.seen.get("StateReason", {}).get("Message", "")
        return f"{machine.state} {reason}".strip()

    def show(self) -> None:
        """Print the progress, if it has changed."""
        started = len(self.record.folder.names(REGISTERED.format(self.request)))
        progress = read_progress(self.record.run)
        line = f"{started} of {self.job.nodes} machines have started"
        if progress.step:
            line += f", step {progress.step:,} of {progress.total_steps or 0:,}"
        if progress.loss is not None:
            line += f", loss {progress.loss:.4f}"
        if line == self.line:
            return
        self.line = line
        if self.usd_per_hour is not None:
            hours = len(self.machines) * (time.time() - self.made_unix_s) / 3600
            line += f"; these machines have cost about ${hours * self.usd_per_hour:,.2f}"
        tell(line)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def end_machines(self, leave_s: float = 0.0) -> None:
        """End the machines. For `leave_s`, they may upload their logs and shut down by themselves."""
        regions = regions_of(self.record)
        left = end_all(self.api, self.record, regions, leave_s=leave_s)
        if left:
            raise Failure(f"left on EC2: {', '.join(map(str, left))}; {undo(self.record)}")


def tell(line: str) -> None:
    say(f"{shown_moment(time.time())}  {line}")


def undo(record: Record) -> str:
    return f"baretrain launch clean {record.run_dir} --yes ends them"
