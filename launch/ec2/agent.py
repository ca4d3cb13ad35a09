"""On every machine of a run on EC2: say hello and beat, follow the crew, run the orders of the machine that leads.

boot.sh starts it from the code of the job. It ends when the run has ended, and then the machine ends. Nothing here
waits for long, so that beats come whatever the trainer does: what takes time is a child process.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO

import launch
from launch import code
from launch.ec2 import orders
from launch.ec2.config import Ec2Config
from launch.ec2.crew import BEAT, BEAT_S, HELLO, Beat, Crew, Hello, read, read_crew, read_hello, write
from launch.ec2.orders import Number
from launch.ec2.watchers import WATCHER
from launch.job import Job
from launch.record import Record
from launch.schedulers import cluster_of
from launch.supervise import patiently
from train.cli.command import DONE, add_s3_flags, command_parser, run_flags
from train.config import InputError, S3Config, Unreachable
from train.host import children
from train.host.metadata import Metadata, metadata_endpoint
from train.storage.untrusted import BadContent, FileName

MOST_LOG_BYTES = 32 * 2**20  # of a file that is sent while the run goes on; larger ones are sent at its end
POLL_S, LOGS_S = 2.0, 30.0  # between two looks at the record, and two uploads of logs
END_S = 30.0  # for what is to end: the trainer may be saving
KILLED = 128 + 9  # exit code of an order whose machine was restarted
ALIVE, LOG = "alive", "machine.txt"  # in boot.sh's folder: made after each beat; what was printed
LEAD_LOG, MACHINE_LOG = "lead_{:04d}.txt", "machines/{}.txt"  # in the record's logs
OVER = ("ended", "cancelled")  # events


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "launch.ec2.agent",
        "Run one machine of a run on EC2. launch/ec2/boot.sh starts this.",
        examples=("s3://bucket/runs/mine --state /run/baretrain",),
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--state", type=Path, required=True, help="folder that boot.sh looks at")
    add_s3_flags(parser, caches=False)
    return run_flags(parser, arguments, act)


def act(options: argparse.Namespace, s3: S3Config) -> int:
    record = Record(options.run, s3)
    agent = Agent(record, patiently(record.job), patiently(hello), options.state)
    return agent.run()


def hello() -> Hello:
    """What this machine is, by EC2's metadata service."""
    metadata = Metadata(metadata_endpoint(os.environ))
    try:
        return Hello(
            instance=FileName(metadata.text("instance-id")),
            host=FileName(platform.node()),
            address=metadata.text("local-ipv4"),
            launch_index=int(metadata.text("ami-launch-index")),
            zone=metadata.text("placement/availability-zone"),
            time_unix_s=time.time(),
        )
    except (HTTPException, ValueError) as error:
        raise OSError(f"the metadata service {metadata.endpoint} answers as no EC2 does: {error}") from error


class Task:
    """A child process that can be ended without waiting for it."""

    def __init__(self, name: str, command: Sequence[str], *, number: Number, output: IO[bytes] | None = None) -> None:
        self.name, self.number = name, number
        self.process = children.start(command, env=os.environ, output=output)
        self.ends_by_s: float | None = None  # time.monotonic(); None: it was not asked to

    def exit_code(self) -> int | None:
        """As shells report it; None while it runs. One that was asked to end some time ago is killed."""
        result = self.process.poll()
        if result is None and self.ends_by_s is not None and time.monotonic() > self.ends_by_s:
            self.kill()
            result = self.process.wait()
        return None if result is None else 128 - result if result < 0 else result

    def end(self) -> None:
        if self.ends_by_s is None:
            self.ends_by_s = time.monotonic() + END_S
            self.process.terminate()

    def kill(self) -> None:
        """End it and all that it has started."""
        children.kill([self.process.pid, *children.descendants(self.process.pid)])


class Agent:
    def __init__(self, record: Record, job: Job, own: Hello, state: Path) -> None:
        self.record, self.job, self.own, self.state = record, job, own, state
        cluster = cluster_of(job)
        assert isinstance(cluster, Ec2Config)
        self.cluster = cluster
        self.python = [job.python, str(Path(launch.__file__).parents[1] / code.START)]  # of the code that runs now
        self.run_flags = [record.run_dir, *record.s3.flags()]
        self.logs = record.local_folder() / "logs"
        self.crew = Crew()
        self.number = Number(0, 0)  # of the last order
        self.lead: Task | None = None
        self.task: Task | None = None  # the order that runs
        self.over = ""  # why this machine has nothing more to do
        self.seen: set[str] = set()  # events
        self.signs: dict[str, tuple[bytes | None, float]] = {}  # of the watcher and of the leader, and when they came
        self.beat_s = self.logs_s = -LOGS_S  # when they were last sent, time.monotonic()
        self.sent: dict[Path, tuple[int, int]] = {}  # logs as they were uploaded: bytes, time of change

    def run(self) -> int:
        was_here = patiently(read_hello, self.record, self.own.instance) is not None  # before a reboot
        self.look_at_events(since_submission=True)
        patiently(write, self.record, HELLO.format(self.own.instance), self.own)
        print(f"{self.own.instance}, {self.own.host} at {self.own.address} in {self.own.zone}", flush=True)
        if was_here:
            self.crew = patiently(read_crew, self.record)
            self.number = Number(self.crew.generation, 0)
            patiently(self.answer_old_orders)
            self.start_lead()
        while not self.over or self.task is not None:
            try:
                self.step()
            except BadContent:  # of the crew or an order: nothing will go on from it
                raise
            except (InputError, Unreachable, OSError) as error:
                print(f"tried again: {error}", flush=True)
            time.sleep(POLL_S)
        print(f"this machine ends: {self.over}", flush=True)
        patiently(self.upload)
        return DONE

    def step(self) -> None:
        """Do what is to be done now."""
        if time.monotonic() - self.beat_s >= BEAT_S:
            began_s = time.monotonic()
            doing = self.task.name if self.task else "ending" if self.over else "waiting"
            write(self.record, BEAT.format(self.own.instance), Beat(self.crew.generation, doing, time.time()))
            (self.state / ALIVE).touch()
            self.beat_s = began_s
            if not self.over:
                self.look_for_others()
        self.follow_task()
        self.look_at_events()
        if not self.over:
            self.follow_crew()
            self.follow_lead()
        if not self.over and self.task is None:
            self.follow_orders()
        if time.monotonic() - self.logs_s >= LOGS_S:  # last, so that logs that cannot be sent hold nothing else
            self.logs_s = time.monotonic()
            self.upload(most_bytes=MOST_LOG_BYTES)

    def look_for_others(self) -> None:
        """Leave if nobody is there any more who could bring the run on: this machine would wait, and cost, for long."""
        leader, cluster = self.crew.members[0] if self.crew.members else None, self.cluster
        is_member = self.own.instance in self.crew.members
        if leader == self.own.instance:
            return
        names = [WATCHER, *([BEAT.format(leader)] if is_member and leader is not None else [])]
        limit_s = cluster.max_wait_s + (cluster.lost_s if is_member else cluster.boot_s)
        if min(self.silent_s(name) for name in names) > limit_s:
            who = "watcher and leader are" if is_member else "the watcher is"
            reason = f"{who} silent for {limit_s} s"
            if is_member:
                self.record.note("ended", outcome="failed", reason=f"{reason}; launch resume goes on")
            self.leave(reason)

    def silent_s(self, name: str) -> float:
        """How long a file of the record has not changed, by this machine's clock."""
        content, now_s = read(self.record, name), time.monotonic()
        if name not in self.signs or self.signs[name][0] != content:
            self.signs[name] = content, now_s
        return now_s - self.signs[name][1]

    # ---- the crew ----------------------------------------------------------------------------------------------------

    def follow_crew(self) -> None:
        """Leave what the last generation of the crew did once there is another one."""
        crew, before = read_crew(self.record), self.crew
        if crew.generation <= before.generation:
            return
        self.stop_leading()
        self.answer_old_orders()
        if self.task is not None:
            self.task.end()
        self.crew, self.number = crew, Number(crew.generation, 0)
        if self.own.instance in crew.members:
            self.start_lead()
        elif self.own.instance in before.members:
            self.leave("it was replaced")

    def start_lead(self) -> None:
        """Lead, if this machine is the first of the crew."""
        if self.crew.members[:1] == [self.own.instance]:
            command = [*self.python, "launch.ec2.lead", *self.run_flags, f"--generation={self.crew.generation}"]
            self.logs.mkdir(parents=True, exist_ok=True)
            with (self.logs / LEAD_LOG.format(self.crew.generation)).open("ab") as output:
                self.lead = Task("lead", command, number=self.number, output=output)

    def stop_leading(self) -> None:
        if self.lead is not None:
            self.lead.kill()
            self.lead.process.wait()
            self.lead = None

    def follow_lead(self) -> None:
        """A lead that has ended has noted the end of the run, unless it has failed itself."""
        exit_code = self.lead.exit_code() if self.lead is not None else None
        if exit_code is not None:
            self.look_at_events()
            if not self.over:
                log = LEAD_LOG.format(self.crew.generation)
                reason = f"launch.ec2.lead ended with exit code {exit_code}, see logs/{log}"
                self.record.note("ended", outcome="failed", reason=reason)
            self.lead = None

    def look_at_events(self, *, since_submission: bool = False) -> None:
        """See whether the run is over, by the events that are new; at first by those since the last submission."""
        names = [name for name in self.record.event_names() if name not in self.seen]
        events = [self.record.event(name) for name in names]
        self.seen.update(names)
        if since_submission:
            kinds = [event.kind for event in events]
            events = events[len(kinds) - kinds[::-1].index("submitting") :] if "submitting" in kinds else events
        for event in events:
            if event.kind in OVER:
                if event.kind == "cancelled" and self.task is not None:
                    self.task.kill()
                self.leave(f"the run has {event.kind}" if event.kind == "ended" else "the run was cancelled")

    def leave(self, reason: str) -> None:
        self.over = self.over or reason
        self.stop_leading()
        if self.task is not None:
            self.task.end()

    # ---- orders ------------------------------------------------------------------------------------------------------

    def follow_task(self) -> None:
        """Answer the order under way once it has ended, and end it where that is wanted."""
        if self.task is None:
            return
        if (exit_code := self.task.exit_code()) is not None:
            orders.answer(self.record, self.task.number, self.own.instance, exit_code)
            self.task = None
        elif orders.must_end(self.record, self.task.number):
            self.task.end()

    def follow_orders(self) -> None:
        """Start the next order, if it is for this machine."""
        number, own = self.number.next(), self.own.instance
        order = orders.read_order(self.record, number) if own in self.crew.members else None
        if order is not None and own in order.instances:
            if orders.must_end(self.record, number):
                orders.answer(self.record, number, own, KILLED)
            else:
                command = [*self.python, "launch.node", order.verb, *self.run_flags, *order.arguments()]
                self.task = Task(order.name, command, number=number)
        if order is not None:
            self.number = number

    def answer_old_orders(self) -> None:
        """Say that this machine's part in the crew's orders has ended: it was restarted, or they came too late."""
        runs = self.task.number if self.task is not None else None
        for number in orders.numbers(self.record):
            if number.generation == self.crew.generation:
                if number != runs and self.own.instance not in orders.answered(self.record, number):
                    orders.answer(self.record, number, self.own.instance, KILLED)
                self.number = number

    # ---- logs --------------------------------------------------------------------------------------------------------

    def upload(self, *, most_bytes: float = math.inf) -> None:
        """Put the logs that have changed into the record: what this machine holds is gone with it."""
        files = {path.relative_to(self.logs).as_posix(): path for path in sorted(self.logs.rglob("*"))}
        files[MACHINE_LOG.format(self.own.instance)] = self.state / LOG
        for name, path in files.items():
            if not path.is_file():
                continue
            status = path.stat()
            if self.sent.get(path) != (status.st_size, status.st_mtime_ns) and status.st_size <= most_bytes:
                self.record.folder.write(f"logs/{name}", path.read_bytes())
                self.sent[path] = status.st_size, status.st_mtime_ns


if __name__ == "__main__":
    sys.exit(main())
