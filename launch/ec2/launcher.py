"""The process of a launch on EC2, in the foreground from the first request to the end of the run: nothing else ever has
machines made. Killed, it leaves machines that go on to the end of the run and then end themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from launch.ec2 import clean, groups
from launch.ec2.api import LATER, REGION, Api, NoCapacity, growing
from launch.ec2.boot import user_data
from launch.ec2.clean import Clock
from launch.ec2.config import Ec2Config
from launch.ec2.intents import LISTS_S, PLACEMENT, RUN, SECURITY, STOPS, Cancelled, Intent, Intents, Superseded, check
from launch.ec2.machines import Machine, look
from launch.ec2.request import body, name_of, run_id, tag_specifications, tags
from launch.ec2.resolved import Resolved, Site
from launch.history import read_history
from launch.job import Job
from launch.record import CONFIG, Event, Record
from launch.spec import State
from launch.status import shown_step, status
from launch.supervise import CODES, Decision, settled
from launch.values import number, shown_duration, shown_moment, text
from train.cli.command import FAILED, printable
from train.config import Failure, InputError, Unreachable
from train.storage.aws_errors import BadCredentials, Rejected
from train.storage.schema import read_object, read_yaml

POLL_S = 20.0
FIRST_S, MOST_S = 10.0, 300.0  # between two rounds over all subnets, and two calls that are not answered
LEAVE_S = 180.0  # for machines to upload their logs and end by themselves, once the run has ended
FAILED_START = "ec2/failed/{}.json"  # why a machine could not start, see boot.sh
REGISTERED = "ec2/machines/{:04d}/"  # files of the machines of a request, see launch.ec2.machine


class Launcher:
    def __init__(
        self,
        record: Record,
        job: Job,
        cluster: Ec2Config,
        resolved: Resolved,
        api: Api,
        *,
        clock: Clock | None = None,
        say: Callable[[str], None] = lambda line: print(printable(line), flush=True),
    ) -> None:
        self.record, self.job, self.cluster, self.resolved, self.api = record, job, cluster, resolved, api
        self.clock = clock = clock or clean.CLOCK
        self.say = say
        self.intents = Intents(record)
        api.before_create = lambda: check(record, resolved.id)
        submitted = [each.time_unix_s for each in record.events() if each.kind == "submitting"]
        self.ends_unix_s = (submitted or [clock.now()])[-1] + cluster.max_run_s
        self.usd_per_hour = price(record, cluster.market)
        self.cost_usd, self.line, self.seen_s = 0.0, "", clock.now()
        self.is_training = False  # machines have been made, and are not known to have ended

    def run(self) -> int:
        """Train, remove everything, and return the run's exit code."""
        try:
            while self.is_interrupted():
                self.say("all machines are asked for again (cluster.again)")
        except Superseded:
            raise
        except Cancelled as error:
            self.say(str(error))
        except (InputError, Failure) as error:
            if self.is_training:
                self.say(f"this launch ends here; its machines go on, and end by themselves. {undo(self.record)}")
                raise
            self.record.append_event("ended", outcome="failed", reason=str(error))
            with suppress(BadCredentials, Unreachable):  # what came before says it
                self.remove()
            raise
        return self.remove()

    def is_interrupted(self) -> bool:
        """Have machines made and wait for the end of the run; whether it was interrupted, and is to go on at once."""
        request = self.acquire()
        self.is_training = True
        reason = self.wait(request)
        if not reason:
            return False
        self.say(f"interrupted: {reason}")
        is_noted = self.noted_since(request, "requeued") is not None
        if is_noted:
            self.let_machines_leave([request.region])
        if left := clean.remove(
            self.api,
            self.record,
            [request.region],
            self.clock,
            say=self.say,
            only=["instance", "spot-instances-request"],
        ):
            raise Failure(f"machines of the last attempt are still there: {', '.join(map(str, left))}")
        self.is_training = False
        if not is_noted:
            decision = settled(Decision("requeue", "failed", reason), self.record, self.cluster)
            if decision.next == "end" or not self.cluster.again:
                again = "" if decision.next == "end" else f"; python -m launch resume {self.record.run_dir} goes on"
                self.record.append_event("ended", outcome=decision.outcome, reason=f"{decision.reason}{again}")
                return False
            self.record.append_event("requeued", reason=reason)
        check(self.record, self.resolved.id)
        if self.clock.now() >= self.ends_unix_s:
            self.record.append_event("ended", outcome="stopped", reason="cluster.max_run_s is over")
            return False
        return True

    # ---- making machines ---------------------------------------------------------------------------------------------

    def acquire(self) -> Intent:
        """Ask in one subnet after another for all machines, and again for max_wait_s; the request that was answered."""
        sites, errors, began_s = list(self.resolved.sites), dict[str, NoCapacity](), self.clock.now()
        is_noted = False
        for pause_s in growing(FIRST_S, MOST_S):
            for site in self.resolved.sites:
                if site not in sites:
                    continue
                try:
                    return self.run_instances(site)
                except NoCapacity as error:
                    errors[site.subnet] = last = error
                    if error.scope != LATER:
                        sites = [each for each in sites if each != site]
                    if error.scope == REGION:
                        sites = [each for each in sites if each.region != site.region]
            seen = "; ".join(f"{subnet}: {error.code}" for subnet, error in errors.items())
            if not sites:
                raise InputError(f"no subnet can have {self.job.nodes} x {self.job.instance} ({seen}). {last}")
            waited_s = self.clock.now() - began_s
            if waited_s + pause_s > self.cluster.max_wait_s:
                waited = f"no capacity for {shown_duration(waited_s)} (cluster.max_wait_s)"
                raise Failure(f"{waited}: {seen}; python -m launch resume {self.record.run_dir} asks again")
            if not is_noted:
                self.record.append_event("waiting_for_capacity", reason=seen)
                is_noted = True
            self.tell(f"no capacity for {self.job.nodes} x {self.job.instance}: {seen}; asked again")
            self.clock.sleep(pause_s)
        raise AssertionError

    def run_instances(self, site: Site) -> Intent:
        group, placement = self.security_group(site), self.placement_group(site)
        left_s = int(self.ends_unix_s - self.clock.now())

        def request(number: int) -> dict[str, Any]:
            data = user_data(self.job, self.record, request=number, max_run_s=max(60, left_s))
            return body(
                self.job,
                self.cluster,
                self.resolved,
                site,
                number=number,
                record=self.record,
                user_data=data,
                group=group,
                placement=placement,
            )

        intent = self.make(RUN, site.region, site.subnet, request)
        made = self.intents.answers[intent.number].made
        self.record.append_event("machines", request=intent.number, instances=made)
        self.say(f"{len(made)} x {self.job.instance} in {site.subnet} ({site.zone}): {', '.join(made)}")
        return intent

    def make(self, operation: str, region: str, target: str, parameters: Callable[[int], Mapping[str, Any]]) -> Intent:
        """Make something, with the intent first. A call that is not answered is sent again with the same token."""
        began_s, is_sent = self.clock.now(), False
        intent = self.intents.begin(operation, region, target, submission=self.resolved.id, now_unix_s=began_s)
        request = parameters(intent.number)
        for pause_s in growing(FIRST_S, MOST_S):
            waited_s = self.clock.now() - began_s
            try:
                answer = self.api.create(region, operation, **request)
                break
            except (Cancelled, Superseded, BadCredentials):
                if not is_sent:
                    self.intents.end(intent, now_unix_s=self.clock.now(), error="not sent")
                raise
            except Rejected as error:
                if error.code in groups.UNKNOWN and waited_s < groups.VISIBLE_S:  # EC2 has just made it
                    self.clock.sleep(groups.ASKS_S)
                    continue
                self.intents.end(intent, now_unix_s=self.clock.now(), error=error.code)
                raise
            except Unreachable as error:
                is_sent = True
                if waited_s + pause_s > self.cluster.max_wait_s:
                    raise Unreachable(
                        f"{error}; not answered for {shown_duration(waited_s)} (cluster.max_wait_s)"
                    ) from error
                self.tell(f"{error}; asked again")
                self.clock.sleep(pause_s)
        made = [str(each["InstanceId"]) for each in answer.get("Instances", ())]
        made += [str(answer["GroupId"])] if "GroupId" in answer else []
        made += [str(request["GroupName"])] if operation == PLACEMENT else []
        self.intents.end(intent, now_unix_s=self.clock.now(), made=made)
        return intent

    def security_group(self, site: Site) -> str:
        """The group of the run in the VPC of a site, made if it is absent, and checked; or the one that was given."""
        if self.cluster.security_group is not None:
            return self.cluster.security_group  # launch.ec2.resolve has checked it
        name = name_of(self.record)

        def request(number: int) -> dict[str, Any]:
            listed = tag_specifications(tags(self.record, number), "security-group")
            what = "Machines of one baretrain run: all traffic among themselves, none from outside"
            return {"GroupName": name, "VpcId": site.vpc, "Description": what, "TagSpecifications": listed}

        there = groups.find_security_group(self.api, site.region, name, site.vpc)
        if there is None:
            [ident] = self.intents.answers[self.make(SECURITY, site.region, site.vpc, request).number].made
        else:
            ident = str(there["GroupId"])
        groups.allow_itself(self.api, site.region, ident)
        return ident

    def placement_group(self, site: Site) -> str | None:
        """The group of the run in a subnet, made if it is absent: a cluster is in one zone."""
        made = f"{name_of(self.record)}-{site.subnet}"
        name = self.cluster.group_name(made, self.job.nodes)
        filters = [{"Name": "group-name", "Values": [made]}]
        if name == made and not groups.find_placement_groups(self.api, site.region, filters):

            def request(number: int) -> dict[str, Any]:
                listed = tag_specifications(tags(self.record, number), "placement-group")
                return {"GroupName": made, "Strategy": "cluster", "TagSpecifications": listed}

            self.make(PLACEMENT, site.region, made, request)
        return name

    # ---- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, request: Intent) -> str:
        """Wait for the end of the run; empty if it has come, else why the run was interrupted."""
        heard_s = self.seen_s = self.clock.now()
        while True:
            self.clock.sleep(POLL_S)
            try:
                answer = self.look(request)
                heard_s = self.clock.now()
            except Unreachable as error:
                silent_s = self.clock.now() - heard_s
                if silent_s > self.cluster.max_wait_s:
                    raise Unreachable(
                        f"{error}; not answered for {shown_duration(silent_s)} (cluster.max_wait_s)"
                    ) from error
                self.tell(f"{error}; asked again")
                continue
            if answer is not None:
                return answer

    def look(self, request: Intent) -> str | None:
        """Empty if the run is over, the reason of an interruption, None while it goes on."""
        answer, now_s = self.intents.answers[request.number], self.clock.now()
        seen = {each.id: each for each in look(self.api, [request.region], run_id(self.record))}
        if self.is_over():
            return ""
        if requeued := self.noted_since(request, "requeued"):
            return text(requeued.details, "reason") or "its machines were taken back"
        late = now_s - answer.time_unix_s > LISTS_S
        for ident in answer.made:
            machine = seen.get(ident)
            if machine.is_alive if machine else not late:
                continue
            return f"machine {ident} has ended: {self.reason_of(ident, machine)}"
        alive = [seen[ident] for ident in answer.made if ident in seen]
        self.cost_usd += len(alive) * (self.usd_per_hour or 0.0) * (now_s - self.seen_s) / 3600
        self.seen_s = now_s
        self.show(request, alive)
        return None

    def reason_of(self, ident: str, machine: Machine | None) -> str:
        with suppress(FileNotFoundError):
            return text(read_object(self.record.folder.read(FAILED_START.format(ident))), "reason")
        return f"{machine.state} {machine.reason}".strip() if machine else "EC2 does not show it any more"

    def is_over(self) -> bool:
        """Whether the run has ended. Cancelled if it was cancelled."""
        events = self.record.events()
        last = next((each.kind for each in reversed(events) if each.kind in ("submitted", *STOPS)), "")
        if last == "ended":
            return True
        check(self.record, self.resolved.id)
        return False

    def noted_since(self, request: Intent, kind: str) -> Event | None:
        """The last event of a kind since the machines of a request were made."""
        for event in reversed(self.record.events()):
            if event.kind == kind:
                return event
            if event.kind == "machines" and event.details.get("request") == request.number:
                return None
        return None

    def show(self, request: Intent, alive: list[Machine]) -> None:
        """Say how the run stands, if that has changed."""
        registered = len(self.record.folder.names(REGISTERED.format(request.number)))
        state = State(True, "", [each.host or each.id for each in alive] if registered else [])
        seen = status(self.record, asks=lambda *_: state)
        step, loss = shown_step(seen), seen.progress.loss
        parts = [seen.state, f"{registered} of {self.job.nodes} machines have started"]
        parts += [f"step {step}"] if step else []
        self.tell(", ".join([*parts, *([f"loss {loss:.4f}"] if loss is not None else [])]))

    def tell(self, line: str) -> None:
        if line != self.line:
            cost = f"  about ${self.cost_usd:,.2f} so far" if self.cost_usd else ""
            self.say(f"{shown_moment(self.clock.now())}  {line}{cost}")
        self.line = line

    # ---- the end -----------------------------------------------------------------------------------------------------

    def remove(self) -> int:
        """Remove what is left, once the machines have had the time to end by themselves; the run's exit code."""
        regions = list(dict.fromkeys([*self.intents.regions, *self.resolved.regions]))
        ended = read_history(self.record.events()).ended
        if ended and self.is_training:
            self.let_machines_leave(regions)
        if left := clean.remove(self.api, self.record, regions, self.clock, say=self.say):
            raise Failure(f"left on EC2: {', '.join(map(str, left))}; {undo(self.record)}")
        self.say("nothing of the run is left on EC2")
        return CODES.get(ended.outcome, FAILED) if ended else FAILED

    def let_machines_leave(self, regions: list[str]) -> None:
        until_s = self.clock.now() + LEAVE_S
        while any(each.is_alive for each in look(self.api, regions, run_id(self.record))):
            if self.clock.now() > until_s:
                return
            self.clock.sleep(POLL_S)


def undo(record: Record) -> str:
    return f"python -m launch clean {record.run_dir} --yes removes everything"


def price(record: Record, market: str) -> float | None:
    """Dollars an hour of one machine, by the settings of the run; None: unknown."""
    with suppress(FileNotFoundError):
        settings = (read_yaml(record.folder.read(CONFIG)) or {}).get("instance") or {}
        return number(settings, "usd_per_hour_spot" if market == "spot" else "usd_per_hour")
    return None
