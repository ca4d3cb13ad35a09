"""How tests watch machines of EC2: a time that passes at once, machines that say what theirs would, and a kill."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from planning import plan
from services.fake_ec2 import UBUNTU, FakeEc2

from launch.ec2.api import Api
from launch.ec2.clock import Clock
from launch.ec2.config import Ec2Config
from launch.ec2.crew import BEAT, HELLO, Beat, Hello, read_crew, write
from launch.ec2.gang import Gang
from launch.ec2.intents import Intents
from launch.ec2.request import RUN_TAG, run_id
from launch.ec2.resolve import resolve
from launch.ec2.resolved import read_resolved
from launch.ec2.situation import Events
from launch.ec2.watch import Watch
from launch.job import Job
from launch.record import Record
from launch.schedulers import cluster_of
from train.config import S3Config

OWN = ["cluster=ec2", "instance=trn1.32xlarge", "nodes=4", "cluster.instance_profile=machine"]
OWN += [f"cluster.image={UBUNTU}"]
RUN = ["experiment=albert_pretrain", "data.path=s3://bucket/albert", "run_dir=s3://bucket/runs/mine"]
RUN += ["s3.region=us-east-1"]
USER_DATA = b"#!/bin/bash\n"


class Killed(BaseException):
    """What SIGKILL is to a process: nothing catches it."""


@dataclass
class World(Clock):
    """A run, its machines, and a clock whose every pause is a moment in which the machines act."""

    ec2: FakeEc2
    record: Record
    job: Job
    api: Api
    passed_s: float = 0.0
    known: set[str] = field(default_factory=set)  # machines that have said hello
    seen: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)  # machines that say nothing
    deaf: bool = False  # all machines say nothing
    happens: Callable[[World], None] = lambda _: None  # in every pause, after the machines have acted

    def now(self) -> float:
        return time.time() + self.passed_s

    def sleep(self, seconds: float) -> None:
        self.passed_s += seconds
        assert self.passed_s < 20_000, "the run never ended"
        for machine in self.machines():
            if machine.id not in self.seen:  # moto has the real time
                self.seen.add(machine.id)
                machine.launch_time = datetime.fromtimestamp(self.now() - seconds, timezone.utc).replace(tzinfo=None)
            if machine.id not in self.silent and not self.deaf:
                self.act(machine)
        self.happens(self)

    def made(self) -> list[Any]:
        """All machines that the run ever had."""
        seen = self.ec2.machines("pending", "running", "shutting-down", "stopping", "stopped", "terminated")
        return [each for each in seen if self.ec2.tags(each.id).get(RUN_TAG) == run_id(self.record)]

    def machines(self) -> list[Any]:
        return [each for each in self.made() if each.state == "running"]

    def act(self, machine: Any) -> None:
        """What a machine does by itself."""
        if Events(self.record).read().over is not None:
            self.ec2.client().terminate_instances(InstanceIds=[machine.id])
            return
        now_s, host = self.now(), machine.private_dns_name.split(".")[0]
        if machine.id not in self.known:
            hello = Hello(
                machine.id,
                host,
                machine.private_ip,
                machine.ami_launch_index,
                machine.placement.availability_zone,
                now_s,
            )
            write(self.record, HELLO.format(machine.id), hello)
            self.known.add(machine.id)
        write(self.record, BEAT.format(machine.id), Beat(0, "waiting", now_s))

    @property
    def crew(self) -> list[str]:
        return list(read_crew(self.record).members)

    @property
    def cluster(self) -> Ec2Config:
        cluster = cluster_of(self.job)
        assert isinstance(cluster, Ec2Config)
        return cluster

    def begin(self) -> None:
        """What a launch does before it starts the watcher."""
        self.record.write(self.job, plan={}, config="", bundle=b"")
        self.record.note("submitting")
        resolve(self.job, self.cluster, self.record, self.api).write(self.record)

    def watch(self) -> Watch:
        """A new watcher, which knows nothing but the record and EC2."""
        resolved = read_resolved(self.record)
        assert resolved is not None
        intents = Intents(self.record)
        gang = Gang(self.record, self.job, self.cluster, resolved, self.api, USER_DATA, intents)
        return Watch(gang, self)

    def until(self, watch: Watch, fact: Callable[[], bool], *, most: int = 400) -> None:
        """Let the watcher act until something is so."""
        for _ in range(most):
            is_over = watch.step()
            self.sleep(10.0)
            if fact():
                return
            assert not is_over, self.noted("ended")
        raise AssertionError("it never came")

    def left_behind(self) -> object:
        """The record, without signs that come and go, and what EC2 has and shows."""
        names = [name for name in self.record.folder.names() if "/beat/" not in name and "watcher.json" not in name]
        shown = [(each.id, each.state, self.ec2.hidden.get(each.id, 0) > 0) for each in self.made()]
        groups = self.ec2.client().describe_security_groups()["SecurityGroups"]
        return names, shown, sorted(self.ec2.groups), [(each["GroupId"], str(each)) for each in groups]

    def noted(self, kind: str) -> list[dict[str, Any]]:
        return [event.details for event in self.record.events() if event.kind == kind]


def world(ec2: FakeEc2, folder: Path, *own: str, api: Api | None = None) -> World:
    """A launch on EC2 whose record is in a local folder: the watcher does not mind."""
    _, job = plan([*OWN, *own], RUN)
    job = dataclasses.replace(job, run_dir=str(folder))
    made = World(ec2, Record(job.run_dir, S3Config(region="us-east-1")), job, api or Api())
    made.begin()
    return made


class KillAt:
    """An Api that ends the process at the n-th moment of its calls: before each one, and after it, unanswered."""

    def __init__(self) -> None:
        self.api = Api()
        for event in ("before-call", "after-call"):
            self.api.session.events.register(f"{event}.*.*", self.pass_by)
        self.arm(None)

    def arm(self, moment: int | None, state: Callable[[], object] = lambda: None) -> None:
        """`state`: all that a process which is killed leaves behind."""
        self.moment, self.state, self.ends_after = moment, state, ""
        self.passed: list[str] = []
        self.states: list[object] = []

    def pass_by(self, model: Any, event_name: str, **_: Any) -> None:
        self.passed.append(f"{event_name.split('.')[0]} {model.name}")
        self.states.append(self.state())
        if len(self.passed) - 1 == self.moment or self.passed[-1] == f"after-call {self.ends_after}":
            raise Killed

    def moments(self) -> list[int]:
        """The first moment of each state: at the others a kill would leave the same."""
        before = [None, *self.states]
        return [index for index, state in enumerate(self.states) if state != before[index]]
