"""The foreground process of a launch on EC2, from the first request to the end of the run.

Only this process makes machines. If it is killed, its machines train to the end of the run and then shut down.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from launch.ec2 import calls
from launch.ec2.account import Resolved, Site
from launch.ec2.api import LATER, NEVER, Api, growing
from launch.ec2.calls import PLACEMENT, RUN, SECURITY, Call, Cancelled, Superseded
from launch.ec2.config import Ec2Config
from launch.ec2.machine import MAX_RUN, REGISTERED, settle
from launch.ec2.request import name_of, placement_name, run_instances, tags
from launch.ec2.sweep import say
from launch.record import CONFIG, END, REQUEUE, Attempt, Job, Record
from launch.run_progress import read_progress
from launch.supervise import CODES, Decision, conclude
from launch.values import shown_duration, shown_moment, text
from train.config import Failure, InputError, Unreachable
from train.run.command import FAILED
from train.storage.aws_errors import BadCredentials, Rejected
from train.storage.schema import read_object, read_yaml

POLL_S = 20.0
# first and longest pause between rounds over all subnets, and between tries of a call
FIRST_S, MOST_S = (
    10.0,
    300.0,
)
LEAVE_S = 180.0  # time for machines to upload their logs and shut down, once the run has ended
VISIBLE_S = 10.0  # time for EC2 to recognise a new group
FAILED_START = "ec2/failed/{}.json"  # the reason why a machine could not start, see boot.sh
Result = TypeVar("Result")


class NoCapacity(Failure):
    """An error raised because no subnet has capacity for the machines at present."""


class Launcher:
    def __init__(
        self, record: Record, job: Job, cluster: Ec2Config, resolved: Resolved, api: Api
    ) -> None:
        self.record, self.job, self.cluster, self.resolved, self.api = (
            record,
            job,
            cluster,
            resolved,
            api,
        )
        api.before_create = lambda: calls.check(record, resolved.id)
        submission = record.history().submission
        assert submission is not None
        self.ends_unix_s = submission.time_unix_s + cluster.max_run_s
        price = "usd_per_hour_spot" if cluster.market == "spot" else "usd_per_hour"
        self.usd_per_hour: float | None = read_yaml(record.folder.read(CONFIG))["instance"][price]
        self.cost_usd, self.line, self.seen_s = 0.0, "", time.time()
        self.is_training = False  # whether machines have been made and are not known to have ended
        self.attempts_before = 0  # number of attempts when the machines were made

    def run(self) -> int:
        """Train, remove all resources, and return the run's exit code."""
        try:
            while self.is_interrupted():
                say("asking for all machines again (cluster.again)")
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
                self.remove(leaves=False)
            raise
        ended = self.record.history().ended
        self.remove(leaves=ended is not None and self.is_training)
        say("nothing of the run is left on EC2")
        return CODES.get(ended.outcome, FAILED) if ended else FAILED

    def is_interrupted(self) -> bool:
        """Make machines and wait for the end of the run. Returns whether it was interrupted and has to restart."""
        call = self.acquire()
        self.is_training, self.seen_s = True, time.time()
        while (reason := self.retried(lambda: self.look(call))) is None:
            time.sleep(POLL_S)
        if not reason:
            return False
        say(f"interrupted: {reason}")
        last = self.attempt_since_machines()
        is_decided = last is not None and last.next == REQUEUE  # the first machine has decided
        # The groups are kept for the next machines.
        self.remove(leaves=is_decided, only=("instance", "spot-instances-request"))
        self.is_training = False
        if not is_decided and not settle(
            self.record, self.cluster, Decision(REQUEUE, "failed", reason)
        ):
            return False
        calls.check(self.record, self.resolved.id)
        if time.time() >= self.ends_unix_s:
            conclude(self.record, Decision(END, "stopped", MAX_RUN))
            return False
        return True

    # ---- making machines ---------------------------------------------------------------------------------------------

    def acquire(self) -> Call:
        """Ask for all machines in one subnet after another, for at most max_wait_s; return the call that made them."""
        wanted = f"{self.job.nodes} x {self.job.instance}"
        sites, errors = list(self.resolved.sites), dict[str, Rejected]()

        def ask() -> Call:
            for site in list(sites):
                try:
                    return self.make_machines(site)
                except Rejected as error:
                    if error.code not in (*LATER, *NEVER):
                        raise
                    errors[site.subnet] = last = error
                    if error.code in NEVER:
                        sites.remove(site)
            seen = "; ".join(f"{subnet}: {error.code}" for subnet, error in errors.items())
            if not sites:
                raise InputError(f"no subnet can provide {wanted} ({seen}). {last}")
            raise NoCapacity(f"no capacity for {wanted}: {seen}")

        return self.retried(ask, NoCapacity)

    def make_machines(self, site: Site) -> Call:
        group, placement = self.security_group(site), self.placement_group(site)
        self.attempts_before = len(self.record.history().attempts)
        left_s = max(60, int(self.ends_unix_s - time.time()))
        request = partial(
            run_instances,
            self.job,
            self.cluster,
            self.record,
            self.resolved,
            site,
            max_run_s=left_s,
        )
        call = self.make(
            RUN,
            site.region,
            lambda call: request(number=call.number, group=group, placement=placement),
        )
        say(
            f"{len(call.made)} x {self.job.instance} in {site.subnet} ({site.zone}): {', '.join(call.made)}"
        )
        return call

    def make(
        self, operation: str, region: str, parameters: Callable[[Call], Mapping[str, Any]]
    ) -> Call:
        """Make a resource: record the call, then send it. If no answer arrives, send it again with the same token."""
        call = calls.begin(self.record, operation, region, submission=self.resolved.id)
        request = parameters(call)

        def send() -> dict[str, Any]:
            try:
                return self.api.create(region, operation, **request)
            except (Cancelled, Superseded, BadCredentials):
                if not call.error:  # nothing was sent before, either
                    self.answered(call, error="not sent")
                raise
            except Rejected as error:
                self.answered(call, error=error.code)
                raise
            except Unreachable as error:
                # shown by the status command
                call.error, call.sent_unix_s = (
                    str(error),
                    time.time(),
                )
                call.write(self.record)
                raise

        answer = self.retried(send)
        made = [str(each["InstanceId"]) for each in answer.get("Instances", ())]
        made += [str(answer["GroupId"])] if "GroupId" in answer else []
        made += [str(request["GroupName"])] if operation == PLACEMENT else []
        self.answered(call, made=made)
        if operation != RUN:
            time.sleep(VISIBLE_S)
            calls.check(self.record, self.resolved.id)  # the run may have been cancelled meanwhile
        return call

    def answered(self, call: Call, *, made: Sequence[str] = (), error: str = "") -> None:
        call.answered_unix_s, call.made, call.error = round(time.time(), 3), [*made], error
        call.write(self.record)

    def retried(self, act: Callable[[], Result], kind: type[Failure] = Unreachable) -> Result:
        """Call `act` until it does not raise this kind of error, for at most max_wait_s."""
        began_s = time.time()
        for pause_s in growing(FIRST_S, MOST_S):
            try:
                return act()
            except kind as error:
                waited_s = time.time() - began_s
                if waited_s + pause_s > self.cluster.max_wait_s:
                    cure = (
                        ""
                        if self.is_training
                        else f"; baretrain launch resume {self.record.run_dir} asks again"
                    )
                    waited = f"waited {shown_duration(waited_s)} (cluster.max_wait_s)"
                    raise kind(f"{error}; {waited}{cure}") from error
                self.tell(f"{error}; asking again")
            time.sleep(pause_s)
        raise AssertionError

    def security_group(self, site: Site) -> str:
        """Return the configured security group, or else the run's group in the site's VPC, which is made if absent."""
        if self.cluster.security_group is not None:
            return self.cluster.security_group  # launch.ec2.account has checked its rules
        name = name_of(self.record)
        by = {"group-name": [name], "vpc-id": [site.vpc]}
        there = self.api.pages(site.region, "describe_security_groups", "SecurityGroups", by=by)
        ident = str(there[0]["GroupId"]) if there else ""
        if not there:
            about = (
                "Machines of one baretrain run: all traffic among themselves, none from outside"
            )
            marked = tags(self.record, "security-group")
            request = {
                "GroupName": name,
                "VpcId": site.vpc,
                "Description": about,
                "TagSpecifications": marked,
            }
            [ident] = self.make(SECURITY, site.region, lambda _: request).made
        allow_itself(self.api, site.region, ident)
        return ident

    def placement_group(self, site: Site) -> str | None:
        """Return the name of the site's placement group, which is made if necessary; None if none is wanted."""
        name, is_made = placement_name(self.record, self.cluster, site, self.job.nodes)
        # EC2 lists deleted groups for a while
        by = {
            "group-name": [str(name)],
            "state": ["pending", "available"],
        }
        if is_made and not self.api.pages(
            site.region, "describe_placement_groups", "PlacementGroups", by=by
        ):
            marked = tags(self.record, "placement-group")
            request = {"GroupName": name, "Strategy": "cluster", "TagSpecifications": marked}
            self.make(PLACEMENT, site.region, lambda _: request)
        return name

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def look(self, call: Call) -> str | None:
        """Return None while the run trains, "" if it has ended, or the reason for its interruption."""
        now_s = time.time()
        seen = {
            each.id: each
            for each in calls.resources(self.api, self.record, [call.region], "instance")
        }
        # Read after EC2's answer: a machine records its reason before it ends.
        last = self.attempt_since_machines()
        if self.record.history().ended is not None:
            return ""
        calls.check(self.record, self.resolved.id)
        if last is not None and last.next == REQUEUE:
            return last.reason or "its machines were taken back"
        is_listed = now_s > call.listed_unix_s(self.record)
        for ident in call.made:
            machine = seen.get(ident)
            if not (machine.is_alive if machine else not is_listed):
                return f"machine {ident} has ended: {self.reason_of(ident, machine.seen if machine else {})}"
        self.cost_usd += len(call.made) * (self.usd_per_hour or 0.0) * (now_s - self.seen_s) / 3600
        self.seen_s = now_s
        self.show(call)
        return None

    def attempt_since_machines(self) -> Attempt | None:
        """Return the last attempt on the machines that were made last; None if there is none yet."""
        attempts = self.record.history().attempts
        return attempts[-1] if len(attempts) > self.attempts_before else None

    def reason_of(self, ident: str, seen: Mapping[str, Any]) -> str:
        with suppress(FileNotFoundError):
            return text(read_object(self.record.folder.read(FAILED_START.format(ident))), "reason")
        reason = seen.get("StateReason", {}).get("Message") or seen.get(
            "StateTransitionReason", ""
        )
        return f"{seen['State']['Name']} {reason}".strip() if seen else "EC2 no longer lists it"

    def show(self, call: Call) -> None:
        registered = len(self.record.folder.names(REGISTERED.format(call.number)))
        progress = read_progress(self.record.run)
        parts = [f"{registered} of {self.job.nodes} machines have started"]
        parts += (
            [f"step {progress.step:,} of {progress.total_steps or 0:,}"] if progress.step else []
        )
        parts += [f"loss {progress.loss:.4f}"] if progress.loss is not None else []
        self.tell(", ".join(parts))

    def tell(self, line: str) -> None:
        if line != self.line:
            cost = f" about ${self.cost_usd:,.2f} so far" if self.cost_usd else ""
            say(f"{shown_moment(time.time())}  {line}{cost}")
        self.line = line

    # ---- the end -----------------------------------------------------------------------------------------------------

    def remove(self, *, leaves: bool, only: Sequence[str] = calls.KINDS) -> None:
        """Remove all resources of the kinds `only`. With `leaves`, first let the machines shut down by themselves."""
        regions = calls.regions_of(self.record, self.resolved.regions)
        until_s = time.time() + LEAVE_S if leaves else 0.0
        while time.time() < until_s:
            if not any(
                each.is_alive
                for each in calls.resources(self.api, self.record, regions, "instance")
            ):
                break
            time.sleep(POLL_S)
        if left := calls.remove(self.api, self.record, regions, only=only):
            raise Failure(f"left on EC2: {', '.join(map(str, left))}; {undo(self.record)}")


def allow_itself(api: Api, region: str, group: str) -> None:
    """Allow all traffic among the members of a security group, in both directions."""
    permission = [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]}]
    for way in ("ingress", "egress"):
        try:
            api.ask(
                region, f"authorize_security_group_{way}", GroupId=group, IpPermissions=permission
            )
        except Rejected as error:
            if error.code != "InvalidPermission.Duplicate":
                raise


def undo(record: Record) -> str:
    return f"baretrain launch clean {record.run_dir} --yes removes everything"
