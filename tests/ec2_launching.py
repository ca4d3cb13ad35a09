"""How tests launch on EC2: a time that passes at once, what happens in it, and a launch that is killed at any call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from planning import plan
from services.fake_ec2 import ALIVE, REGION, UBUNTU, FakeEc2

from launch import launched, record
from launch.ec2 import instances, launcher, setup
from launch.ec2 import request as request_module
from launch.ec2.account import Resolved, last_resolved, resolve
from launch.ec2.api import Api
from launch.ec2.config import Ec2Config
from launch.ec2.instances import Instance, end_all
from launch.ec2.launcher import Launcher
from launch.ec2.request import RUN_TAG, run_id
from launch.record import CANCEL, END, Attempt, Job, Record
from launch.schedulers import cluster_of
from launch.supervise import Decision, conclude
from train.config import S3Config
from train.storage.folders import LocalFolder

OWN = ["cluster=ec2", "instance=trn1.2xlarge", "nodes=2", f"cluster.image={UBUNTU}"]
RUN = [
    "experiment=albert_pretrain",
    "data.path=s3://bucket/albert",
    "run_dir=s3://bucket/runs/mine",
    "s3.region=us-east-1",
    "seq_len=null",
]
USER_DATA = b"#!/bin/bash\n"
PRICES = "{instance: {usd_per_hour: 36.0}}"


def with_own(*own: str) -> list[str]:
    """OWN and further settings, of which the last one with a key counts."""
    return list({each.partition("=")[0]: each for each in (*OWN, *own)}.values())


def set_up() -> None:
    """What `launch setup --yes` makes."""
    api = Api()
    parameters = setup.folder_parameters("s3://bucket/runs", ["s3://bucket/albert"])
    vpc = setup.default_vpc(api, REGION)
    setup.make_stack(api, REGION, {**parameters, "Vpc": vpc})
    setup.make_placement_groups(api, REGION)


class Killed(BaseException):
    """What SIGKILL is to a process: nothing catches it."""


@dataclass
class Trial:
    """A run on EC2; every pause of its launch is a moment in which something may happen."""

    ec2: FakeEc2
    record: Record
    job: Job
    api: Api = field(default_factory=Api)
    happens: Callable[[Trial], None] = lambda _: None
    bundle: bytes = b""  # the code of the job

    @property
    def cluster(self) -> Ec2Config:
        return cluster_of(self.job, Ec2Config)

    def sleep(self, seconds: float) -> None:
        self.ec2.passed_s += seconds
        assert self.ec2.passed_s < 200_000, "the run never ended"
        self.happens(self)

    def submit(self, resolved: Resolved | None = None) -> None:
        """What a launch does before it is attended; what its settings come to is found out unless it is given."""
        self.record.write(self.job, config=PRICES, bundle=self.bundle)
        self.record.job_sha256 = self.job.sha256
        submission = self.record.claim(self.record.next_submission(), "ec2", self.job.nodes)
        assert submission is not None
        resolved = resolved or resolve(self.job, self.cluster, self.record, self.api)
        handle = {"resolved": dataclasses.asdict(resolved)}
        self.record.keep_answer(dataclasses.replace(submission, handle=handle))
        launched.keep(self.record, handle)

    def launcher(self) -> Launcher:
        resolved = last_resolved(self.record)
        assert resolved is not None
        return Launcher(self.record, self.job, self.cluster, resolved, self.api)

    def clean(self) -> list[Instance]:
        """What `launch clean --yes` does."""
        self.record.ask(CANCEL)
        return end_all(self.api, self.record, [REGION])

    @property
    def ended(self) -> Attempt | None:
        return self.record.history().ended

    def made(self) -> list[Any]:
        """All machines that the run ever had."""
        seen = self.ec2.machines(*ALIVE, "shutting-down", "stopping", "stopped", "terminated")
        own = run_id(self.record)
        return [each for each in seen if self.ec2.tags(each.id).get(RUN_TAG) == own]

    def running(self) -> list[Any]:
        return [each for each in self.made() if each.state == "running"]

    def interrupt(self) -> None:
        """EC2 takes a machine."""
        self.ec2.client().terminate_instances(InstanceIds=[self.running()[-1].id])


def done(run: Trial) -> None:
    """The machines train, and the first one notes the end."""
    if run.running() and run.record.history().ended is None:
        conclude(run.record, Decision(END, "done", "the last step"))


def trial(
    ec2: FakeEc2, monkeypatch: Any, folder: Path, *own: str, api: Api | None = None
) -> Trial:
    """A launch whose record is in a local folder: the launcher does not mind."""
    monkeypatch.setattr(request_module, "user_data", lambda *_, **__: USER_DATA)
    _, job = plan(with_own(*own), RUN)
    job = dataclasses.replace(job, run_dir=str(folder))
    run = Record(job.run_dir, S3Config(region=REGION), job.sha256)
    made = Trial(ec2, run, job, api or Api(), happens=done)
    set_time(monkeypatch, ec2.now, made.sleep)
    return made


def set_time(monkeypatch: Any, now: Callable[[], float], sleep: Callable[[float], None]) -> None:
    """A time that tests make, for all that launches on EC2."""
    for module in (instances, launcher, record):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=now, sleep=sleep))


class KillAt:
    """Ends the process at the n-th moment: before and after each call of EC2, and each file of the record."""

    def __init__(self, monkeypatch: Any) -> None:
        self.api = Api()
        self.passed: list[str] = []
        self.moment: int | None = None
        for event in ("before-call", "after-call"):
            self.api.session.events.register(f"{event}.*.*", self.pass_by)
        for name in ("write", "create"):
            monkeypatch.setattr(LocalFolder, name, self.around(getattr(LocalFolder, name)))

    def around(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(folder: LocalFolder, name: str, content: bytes) -> Any:
            self.reach(f"before {name}")
            answer = usual(folder, name, content)
            self.reach(f"after {name}")
            return answer

        return call

    def pass_by(self, model: Any, event_name: str, **_: Any) -> None:
        if not model.name.startswith("Describe"):  # which change nothing
            self.reach(f"{event_name.split('.')[0]} {model.name}")

    def arm(self, moment: int | None) -> None:
        self.moment = moment
        self.passed = []

    def reach(self, name: str) -> None:
        self.passed.append(name)
        if len(self.passed) - 1 == self.moment:
            raise Killed
