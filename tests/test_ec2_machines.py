"""Machines of EC2 from their user data to the end of the run: network namespaces, a real S3, and the launch itself."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from ec2_launching import OWN, Trial
from launching import losses
from planning import plan
from running import eventually, run, train_overrides
from s3_fixtures import Bucket
from services.ec2_machines import Ec2Machines, ec2_machines
from services.fake_ec2 import FakeEc2, fake_ec2
from services.fake_imds import SPOT
from services.machines import Machines

from launch import code
from launch.ec2 import request as request_module
from launch.ec2.request import user_data
from launch.ec2.sweep import Clock
from launch.job import Code, Job
from launch.record import Record
from launch.run_progress import newest_checkpoint
from train.cli.command import DONE
from train.config import S3Config
from train.storage.schema import FileName, Sha256

LONG = ["max_steps=160", "checkpoint.every=40", "checkpoint.keep=2", "eval_every=80", "log_every=40", "export=false"]
LONG += ["lease.ttl_s=2", "preempt.poll_s=0.2", "preempt.notices=on", "watchdog.step_s=4"]
BUNDLE = code.pack()


@pytest.fixture
def ec2(machines: Machines, bucket: Bucket, tmp_path: Path) -> Iterator[Ec2Machines]:
    with ec2_machines(machines, tmp_path) as made:
        yield made


@dataclass
class Launched:
    record: Record
    job: Job
    inner: Record  # as the machines reach it

    def user_data(self, **named: Any) -> bytes:
        return user_data(self.job, self.inner, **{"request": 1, "max_run_s": 3600, **named})


@pytest.fixture
def launched(ec2: Ec2Machines, bucket: Bucket, prepared: Path) -> Iterator[Any]:
    """Write the record of a run of two machines."""
    with ec2.machines.reaching(bucket.service.server.port) as address:
        s3 = {"endpoint": f"http://{address}", "region": bucket.config().region, "path_style": True}

        def make(*cluster: str, bundle: bytes = BUNDLE.content, python: str = sys.executable) -> Launched:
            run_dir = bucket.location("runs/mine")
            own = [f"s3.endpoint={s3['endpoint']}", *bucket.overrides()[1:]]
            of_run = [*train_overrides(Path("-"), prepared), *LONG, f"run_dir={run_dir}", *own]
            given = list({each.partition("=")[0]: each for each in of_run}.values())  # the last one counts
            _, job = plan([*OWN, *cluster], given)
            code_of_job = Code(FileName(BUNDLE.file), Sha256(BUNDLE.sha256), "")
            overrides = [each for each in job.overrides if not each.startswith("instance")]
            job = replace(
                job, code=code_of_job, python=python, overrides=overrides, processes_per_node=1, environment={}, s3=s3
            )
            record = Record(run_dir, bucket.config())
            record.write(job, plan={}, config="", bundle=bundle)
            return Launched(record, job, Record(run_dir, S3Config(**s3)))

        yield make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> list[float]:
    """The losses of LONG on one rank of this machine."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run(train_overrides(folder, prepared, *LONG, "preempt.notices=off"))
    assert done.returncode == DONE, done.stderr
    return losses((folder / "metrics.jsonl").read_bytes())


# ---- a whole run -----------------------------------------------------------------------------------------------------


@dataclass
class Cloud(Trial):
    """moto's EC2, each machine of which is a namespace."""

    machines: Any = None  # Ec2Machines
    interruption: str = ""
    started: dict[str, int] = field(default_factory=dict)  # machine: its namespace
    lost: int = -1  # namespace of a machine that was lost
    stack: ExitStack = field(default_factory=ExitStack)

    @property
    def clock(self) -> Clock:
        return Clock(sleep=self.pause)

    def pause(self, seconds: float) -> None:
        time.sleep(0.2)
        for machine in self.made():
            if machine.id not in self.started and machine.state == "running":
                self.boot(machine)
            number = self.started.get(machine.id)
            if number is None:
                continue
            if machine.state == "running" and self.machines.shutdowns(number)[-1:] == ["-P now"]:
                self.ec2.client().terminate_instances(InstanceIds=[machine.id])
            elif machine.state == "terminated":
                self.machines.machines.kill_all(number)
                del self.started[machine.id]
                self.started[f"{machine.id} gone"] = -1
        if self.interruption and (newest_checkpoint(self.record.run) or 0) > 0:
            self.interrupt_one()

    def boot(self, machine: Any) -> None:
        if f"{machine.id} gone" in self.started:
            return
        number = next(each for each in (0, 1, 2) if each not in (*self.started.values(), self.lost))
        content = base64.b64decode(self.ec2.requests[-1]["UserData"])
        self.started[machine.id] = number
        self.machines.run_instances(number, machine.id, content, launch_index=machine.ami_launch_index)

    def interrupt_one(self) -> None:
        kind, self.interruption = self.interruption, ""
        ident, number = list(self.started.items())[-1]
        if kind == "spot":
            self.machines.services[number].say(SPOT, {"action": "terminate", "time": "2026-11-20T08:22:00Z"})
        else:  # it closes no connection
            self.lost = number
            self.stack.enter_context(self.machines.machines.dead(number))
            self.ec2.client().terminate_instances(InstanceIds=[ident])

    def says(self) -> str:
        events = [f"{event.kind} {event.details}" for event in self.record.events()]
        logs = [f"== {name}\n{self.record.folder.read(name).decode()}" for name in self.record.folder.names("logs/")]
        return "\n".join([*self.said, *events, *logs, *map(self.machines.console, range(3))])


@pytest.fixture
def cloud(ec2, launched, bucket, monkeypatch) -> Iterator[Any]:
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    with fake_ec2(monkeypatch) as fake, ExitStack() as stack:
        assert isinstance(fake, FakeEc2)
        for name, value in {**keys, "AWS_ENDPOINT_URL_EC2": fake.endpoint}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_ENDPOINT_URL")

        def make(*cluster: str, interruption: str = "") -> Cloud:
            run = launched("cluster.gate=false", *cluster)
            monkeypatch.setattr(request_module, "user_data", lambda *_, **named: run.user_data(**named))
            return Cloud(
                fake, run.record, run.job, bundle=BUNDLE.content, machines=ec2, interruption=interruption, stack=stack
            )

        yield make


@pytest.mark.parametrize("interruption", ["spot", "lost"])
def test_an_interrupted_run_resumes_on_new_machines_to_the_same_losses(cloud, undisturbed, interruption):
    run = cloud("cluster.again=true", interruption=interruption)
    run.submit()
    assert run.launcher().run() == DONE, run.says()
    assert losses(run.record.run.read("metrics.jsonl")) == pytest.approx(undisturbed, rel=1e-5)
    began = [event.details for event in run.record.events() if event.kind == "attempt_began"]
    assert [each["checkpoint"] > 0 for each in began] == [False, True], run.says()
    assert len(run.events_of("machines")) == 2 and len(run.events_of("requeued")) == 1
    assert ("spot notice" in run.events_of("requeued")[0]["reason"]) == (interruption == "spot")
    assert run.ec2.anything() == [] and run.events_of("cleaned")
    names = run.record.folder.names("logs/")
    assert f"logs/machines/{run.events_of('machines')[-1]['instances'][0]}.txt" in names
    assert any(name.startswith("logs/attempt_0002/machine") for name in names)


def test_machines_that_are_not_fit_end_the_run(cloud):
    """Each knows itself by 127.0.1.1, which train.doctor takes for a fault."""
    run = cloud("cluster.gate=true")
    run.submit()
    assert run.launcher().run() == 1
    [ended] = run.events_of("ended")
    assert ended["outcome"] == "failed" and "0 of 2 nodes passed the preflight" in ended["reason"], run.says()
    [preflight] = run.events_of("gate")
    assert set(preflight["failed"]) == {"machine0", "machine1"} and run.ec2.anything() == []


# ---- one machine -----------------------------------------------------------------------------------------------------


def wait_for_end(ec2: Ec2Machines, number: int) -> None:
    eventually(lambda: ec2.shutdowns(number)[-1:] == ["-P now"] and not ec2.machines.running(number))


def wait_for_registration(run: Launched) -> None:
    eventually(lambda: run.record.folder.names("ec2/machines/"))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"bundle": b"damaged"}, "does not match its checksum"),
        ({"python": "/opt/nowhere/bin/python"}, "/opt/nowhere/bin/python: No such file or directory"),
    ],
)
def test_a_machine_that_cannot_start_says_so_and_ends(launched, ec2, changed, line):
    run = launched(**changed)
    ec2.run_instances(0, "i-00000000", run.user_data())
    wait_for_end(ec2, 0)
    assert line in (ec2.folder / "console.0").read_text() and not run.record.folder.names("ec2/machines/")
    if "bundle" in changed:  # there is a Python that can write into the record
        assert line in json.loads(run.record.folder.read("ec2/failed/i-00000000.json"))["reason"]


def test_a_machine_whose_others_do_not_come_ends_the_run(launched, ec2):
    run = launched("cluster.boot_s=1")
    ec2.run_instances(0, "i-00000000", run.user_data())
    wait_for_end(ec2, 0)
    [ended] = [event.details for event in run.record.events() if event.kind == "ended"]
    assert ended["outcome"] == "failed" and "cluster.boot_s" in ended["reason"]


def test_a_machine_whose_node_program_hangs_ends(launched, ec2):
    run = launched()
    ec2.run_instances(0, "i-00000000", run.user_data(dead_s=20))  # a sign comes every ten seconds
    wait_for_registration(run)
    [program] = (
        pid for pid in ec2.machines.running(0) if b"launch.ec2.machine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(program, signal.SIGSTOP)
    wait_for_end(ec2, 0)
    assert "silent for 20 s" in ec2.console(0)


def test_a_machine_has_a_deadline_and_ends_when_it_is_rebooted(launched, ec2):
    """The script of another machine's disk ends nothing."""
    run = launched()
    ec2.run_instances(0, "i-00000000", run.user_data(max_run_s=3600))
    wait_for_registration(run)
    assert ec2.shutdowns(0) == ["-P +90"]
    ec2.machines.kill_all(0)
    ident = ec2.path(0, "/var/lib/cloud/data/instance-id")
    ident.write_text("i-00000009\n")
    ec2.boot_again(0)
    eventually(lambda: not ec2.machines.running(0))
    assert ec2.shutdowns(0) == ["-P +90"]
    ident.write_text("i-00000000\n")
    ec2.boot_again(0)
    eventually(lambda: ec2.shutdowns(0) == ["-P +90", "-P now"])
