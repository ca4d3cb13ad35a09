"""The watcher of a run's machines: `python -m launch.ec2.watch RUN`, started by a launch and by `launch watch RUN`.

It alone has machines made, replaces those that are lost, names the crew, and removes everything at the end. It keeps
nothing in memory that matters: killed at any moment and started again, it goes on from the record and from what EC2
shows. Without it the machines go on to the end of the run, and then end themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from launch.ec2 import clean, watchers
from launch.ec2.api import Api, BadCredentials, NoCapacity
from launch.ec2.boot import user_data
from launch.ec2.clock import Clock
from launch.ec2.config import Ec2Config
from launch.ec2.crew import BEAT, CREW, Crew, Hello, read, read_beat, read_crew, read_hello, write
from launch.ec2.gang import Gang
from launch.ec2.intents import RUN, Answer, Intents
from launch.ec2.machines import Machine, look, terminate
from launch.ec2.request import run_id
from launch.ec2.resolved import Site, read_resolved
from launch.ec2.situation import BOOT, GATE, GONE, SILENT, SURPLUS, Events, Situation
from launch.gate import is_shared
from launch.record import Record
from launch.schedulers import cluster_of
from launch.supervise import StopRequest
from launch.values import shown_duration, text
from train.cli.command import DONE, add_s3_flags, command_parser, run_flags
from train.config import Failure, InputError, S3Config, Unreachable
from train.storage.untrusted import FileName, read_object

POLL_S = 10.0
RETRY_S = 60.0  # between two rounds over all subnets, none of which has capacity
VISIBLE_S = 120.0  # for a machine that EC2 has just made to be shown
LEAVE_S = 180.0  # for machines to upload their logs and end by themselves, once the run has ended
STOP_S = 900.0  # for a run to save and leave, once max_run_s is over
FAILED = "ec2/failed/{}.json"  # what a machine says whose start failed
LOG = "logs/watch.txt"


class Watch:
    def __init__(self, gang: Gang, clock: Clock) -> None:
        self.gang, self.clock, self.record = gang, clock, gang.record
        self.api, self.job, self.cluster = gang.api, gang.job, gang.cluster
        self.run_id = run_id(self.record)
        self.events = Events(self.record)
        self.signs: dict[str, tuple[bytes, float]] = {}  # the last beat of each machine, and when it came
        self.tried_s = float("-inf")  # when capacity was last asked for
        self.mine = watchers.begin(self.record, now_unix_s=clock.now())
        self.stop = StopRequest(self.record)

    def run(self) -> int:
        while True:
            try:
                if self.step():
                    return DONE
            except Unreachable as error:  # the machines go on meanwhile
                self.signs.clear()  # their beats may have been as unreachable as this one's record
                self.say(f"{error}; asked again")
            self.clock.sleep(POLL_S)

    def step(self) -> bool:
        """Look, and do what is due; whether all is over and cleaned up."""
        now = self.events.read()
        if not watchers.is_last(self.record, self.mine):
            raise Failure(f"another watcher of {self.record.run_dir} has begun; this one ends")
        if now.over is not None:
            return self.finish(now)
        self.watch_time(now)
        seen = look(self.api, self.gang.intents.regions, self.run_id)
        if self.gang.intents.open(RUN, self.gang.resolved.id):
            self.settle(seen)
            return False
        losses = self.losses(now, seen)
        if losses:
            now = self.events.read()  # a machine that ends since the run has ended is not lost
            if now.over is not None:
                return False
        for ident, (kind, reason) in losses.items():
            self.lose(now, ident, kind, reason)
        alive = [each for each in seen if each.is_alive]
        terminate(self.api, [each for each in alive if each.id in now.lost])
        self.complete(now, [each for each in alive if each.id not in now.lost], self.invisible(now, seen))
        return False

    def settle(self, seen: Sequence[Machine]) -> None:
        """Answer the requests of a watcher that was killed."""
        try:
            self.gang.settle(seen, now_unix_s=self.clock.now())
        except BadCredentials:  # that says nothing about the run, whose machines go on
            raise
        except InputError as error:
            self.give_up(f"the machines were refused: {error}")

    # ---- losses ------------------------------------------------------------------------------------------------------

    def losses(self, now: Situation, seen: Sequence[Machine]) -> dict[str, tuple[str, str]]:
        """The machines that must be given up, each with the kind of its loss and the reason."""
        lost, crew, own = {}, read_crew(self.record), self.own_intents()
        seen = [each for each in seen if each.is_alive or each.intent in own]  # EC2 shows those of before for an hour
        hellos = {each.id: read_hello(self.record, each.id) for each in seen}
        all_failed = is_shared(now.failed, crew.members)
        for each in seen:
            if each.id in now.lost:
                continue
            hello = hellos.get(each.id)
            if (loss := self.loss_of(each, hello)) is not None:
                lost[each.id] = loss
            elif hello is not None and hello.host in now.failed and not all_failed and each.id in crew.members:
                lost[each.id] = (GATE, now.failed[hello.host])
        shown, now_s = {each.id for each in seen}, self.clock.now()
        for answer in self.answers():
            for ident in answer.instances:
                if ident not in shown and ident not in now.lost and now_s - answer.time_unix_s > VISIBLE_S:
                    lost[ident] = (GONE, "EC2 does not show it any more")
        return lost

    def loss_of(self, machine: Machine, hello: Hello | None) -> tuple[str, str] | None:
        if not machine.is_alive:
            return (GONE if hello else BOOT), f"EC2: {machine.state}{f' ({machine.reason})' if machine.reason else ''}"
        content = read(self.record, FAILED.format(FileName(machine.id)))
        if content is not None:
            return BOOT, text(read_object(content), "reason") or "its start failed"
        now_s = self.clock.now()
        if hello is None:
            is_late = now_s - machine.launched_unix_s > self.cluster.boot_s
            return (BOOT, f"it said nothing in {shown_duration(self.cluster.boot_s)}") if is_late else None
        # By this machine's clock alone, which may differ from theirs: when did the beat last change?
        beat = read(self.record, BEAT.format(FileName(machine.id))) or b""
        if machine.id not in self.signs or self.signs[machine.id][0] != beat:
            self.signs[machine.id] = beat, now_s
        silent_s = now_s - self.signs[machine.id][1]
        if silent_s <= self.cluster.lost_s:
            return None
        last = read_beat(self.record, machine.id)
        return SILENT, f"no sign for {shown_duration(silent_s)}{f', the last while {last.doing}' if last else ''}"

    def lose(self, now: Situation, ident: str, kind: str, reason: str) -> None:
        """Note a loss before the machine is ended: whoever goes on from here ends it too."""
        self.record.note("machine_lost", instance=ident, cause=kind, reason=reason)
        now.lost[ident] = kind
        now.boots += kind == BOOT
        self.say(f"{ident} is given up: {reason}")

    def answers(self) -> list[Answer]:
        return [answer for number, answer in self.gang.intents.answers.items() if number in self.own_intents()]

    def own_intents(self) -> set[int]:
        """Numbers of the requests of this submission."""
        return {each.number for each in self.gang.intents.all if each.submission == self.gang.resolved.id}

    def invisible(self, now: Situation, seen: Sequence[Machine]) -> dict[str, int]:
        """How many machines EC2 has made and does not show yet, by subnet."""
        shown, counts = {each.id for each in seen}, dict[str, int]()
        for intent in self.gang.intents.all:
            answer = self.gang.intents.answers.get(intent.number)
            if answer is not None and intent.submission == self.gang.resolved.id:
                hidden = [each for each in answer.instances if each not in shown and each not in now.lost]
                counts[intent.target] = counts.get(intent.target, 0) + len(hidden)
        return {subnet: count for subnet, count in counts.items() if count}

    # ---- the crew ----------------------------------------------------------------------------------------------------

    def complete(self, now: Situation, alive: Sequence[Machine], invisible: dict[str, int]) -> None:
        """See to it that enough machines train: ask for those that are missing, and name them the crew."""
        crew = read_crew(self.record)
        if self.is_fit(crew, now, alive):
            self.doing(f"{len(alive)} machines, crew {crew.generation}")
            for each in alive:
                if each.id not in crew.members:
                    self.lose(now, each.id, SURPLUS, "it is not needed any more")
            return
        if now.stop_asked_unix_s is not None and now.over is None:  # no machine is made for a run that is to stop
            self.record.note("ended", outcome="stopped", reason="stopped as asked, while machines were missing")
            return
        subnet = main_subnet(alive, invisible)
        here = [each for each in alive if each.subnet == subnet]
        have = len(here) + invisible.get(subnet, 0)
        wanted = self.job.nodes if have else self.gang.size
        if have < wanted:
            self.acquire(now, subnet if have else None, wanted - have)
        elif not invisible.get(subnet) and all(read_hello(self.record, each.id) for each in here):
            self.name_crew(crew, here)
        else:
            self.doing(f"{have} machines in {subnet} start")

    def is_fit(self, crew: Crew, now: Situation, alive: Sequence[Machine]) -> bool:
        """Whether the crew, or those of it that passed the gate, can go on."""
        ids = {each.id for each in alive}
        if now.passed is None or is_shared(now.failed, crew.members):  # then the one that leads ends the run
            needed = crew.members[: self.job.nodes]
        else:
            hellos = {ident: read_hello(self.record, ident) for ident in crew.members}
            needed = [ident for ident, hello in hellos.items() if hello is not None and hello.host in now.passed]
        return len(needed) >= self.job.nodes and ids.issuperset(needed)

    def name_crew(self, crew: Crew, machines: Sequence[Machine]) -> None:
        """Write the next crew: those of the last one in their order, and then the new ones."""
        ids = [each.id for each in machines]
        members = [*(each for each in crew.members if each in ids), *(each for each in ids if each not in crew.members)]
        new = Crew(crew.generation + 1, [FileName(each) for each in members])
        self.record.note("crew", generation=new.generation, members=members)
        write(self.record, CREW, new)
        self.say(f"crew {new.generation}: {', '.join(members)}")

    def acquire(self, now: Situation, subnet: str | None, missing: int) -> None:
        """Ask for machines: beside those that are there at first, then for a whole gang elsewhere."""
        if now.boots >= 2 * self.gang.size:
            return self.give_up(f"{now.boots} machines in a row did not come up; see the events machine_lost")
        if self.clock.now() - self.tried_s < RETRY_S:
            return None
        self.tried_s = self.clock.now()
        sites = self.gang.resolved.sites
        beside = [(site, missing) for site in sites if site.subnet == subnet]
        elsewhere: list[tuple[Site, int]] = [
            (site, self.job.nodes if subnet else missing) for site in sites if site.subnet != subnet
        ]
        self.doing(f"asks for {missing} x {self.job.instance}")
        try:
            made = self.gang.request([*beside, *elsewhere])
        except NoCapacity as error:
            return self.wait(now, str(error))
        except BadCredentials:
            raise
        except InputError as error:
            return self.give_up(f"the machines were refused: {error}")
        self.tried_s = float("-inf")
        self.record.note("machines", instances=made)
        return self.say(f"{len(made)} machines: {', '.join(made)}")

    def wait(self, now: Situation, reason: str) -> None:
        """Note that there is no capacity, or that there was none for too long."""
        if now.waits_since_unix_s is None:
            self.record.note("waiting_for_capacity", reason=reason)
            self.say(f"{reason}; asked again every {RETRY_S:g} s")
        elif self.clock.now() - now.waits_since_unix_s > self.cluster.max_wait_s:
            self.give_up(f"no capacity for {shown_duration(self.cluster.max_wait_s)} (cluster.max_wait_s): {reason}")

    # ---- the end -----------------------------------------------------------------------------------------------------

    def still_removes(self) -> None:
        """Failure once the run is another watcher's, whose machines must stay."""
        if not watchers.is_last(self.record, self.mine):
            raise Failure(f"another watcher of {self.record.run_dir} has begun; this one ends")
        self.doing(self.mine.doing)

    def watch_time(self, now: Situation) -> None:
        """Ask the run to stop when its time is over, and end it if it does not."""
        over_s = self.clock.now() - now.began_unix_s - self.cluster.max_run_s
        if over_s > 0 and now.stop_asked_unix_s is None:
            self.record.note("stop_asked", reason="cluster.max_run_s is over")
        if over_s > 0:
            self.stop.ask("cluster.max_run_s is over")
            self.stop.write()
        if over_s > STOP_S:
            self.give_up(f"cluster.max_run_s={self.cluster.max_run_s} is over, and the run did not stop")

    def give_up(self, reason: str) -> None:
        self.record.note("ended", outcome="failed", reason=reason)
        self.say(f"the run is given up: {reason}")

    def finish(self, now: Situation) -> bool:
        """Remove everything, once the machines have had the time to end by themselves."""
        assert now.over is not None
        regions = list(dict.fromkeys([*self.gang.intents.regions, *self.gang.resolved.regions]))
        may_leave = now.over.kind == "ended" and self.clock.now() - now.over.time_unix_s < LEAVE_S
        if may_leave and any(each.is_alive for each in look(self.api, regions, self.run_id)):
            self.doing("waits for the machines to end themselves")
            return False
        self.doing("removes what is left on EC2")
        left = clean.remove(self.api, regions, self.run_id, self.clock, say=self.say, meanwhile=self.still_removes)
        if left:
            raise Failure(
                f"left on EC2: {', '.join(map(str, left))}; python -m launch clean {self.record.run_dir} --yes"
            )
        self.record.note("cleaned", regions=regions)
        self.doing("done: nothing is left on EC2")
        return True

    # ---- signs -------------------------------------------------------------------------------------------------------

    def doing(self, doing: str) -> None:
        """Say that this watcher is there, at every change and every BEAT_S."""
        now_s = self.clock.now()
        if doing != self.mine.doing or now_s - self.mine.time_unix_s >= watchers.BEAT_S:
            self.mine = replace(self.mine, doing=doing, time_unix_s=now_s)
            watchers.beat(self.record, self.mine)

    def say(self, line: str) -> None:
        print(line, flush=True)
        log = self.record.local_folder() / LOG
        if self.record.is_remote and log.is_file():  # the launcher has directed standard output there
            with suppress(Unreachable, OSError):  # it is on standard output, and there the next time
                self.record.folder.write(LOG, log.read_bytes())


def main_subnet(alive: Sequence[Machine], invisible: dict[str, int]) -> str:
    """The subnet with most of the machines, in which the others must be too; the newest one of several."""
    counts = dict(invisible)
    for each in alive:
        counts[each.subnet] = counts.get(each.subnet, 0) + 1
    newest = {each.subnet: each.intent for each in alive}
    return max(counts, key=lambda subnet: (counts[subnet], newest.get(subnet, 0)), default="")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "launch.ec2.watch",
        "Watch the machines of a run on EC2. A launch starts this in the background; people use launch watch.",
        examples=("s3://bucket/runs/mine",),
    )
    parser.add_argument("run", help="run folder")
    add_s3_flags(parser, caches=False)
    return run_flags(parser, arguments, act)


def act(options: argparse.Namespace, s3: S3Config) -> int:
    record = Record(options.run, s3)
    return Watch(gang_of(record), Clock()).run()


def gang_of(record: Record) -> Gang:
    """What asks for the machines of the last submission. InputError for a run that is not on EC2."""
    job, resolved = record.job(), read_resolved(record)
    cluster = cluster_of(job)
    if not isinstance(cluster, Ec2Config) or resolved is None:
        raise InputError(f"{record.run_dir} was not launched on EC2 (cluster={job.scheduler})")
    api = Api(record.s3.profile, record.s3.region)
    return Gang(record, job, cluster, resolved, api, user_data(job, record), Intents(record))


if __name__ == "__main__":
    sys.exit(main())
