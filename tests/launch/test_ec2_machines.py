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
from ec2_launching import Trial, set_time, set_up, with_own
from held import HELD
from launching import losses, settings_of_run
from planning import plan
from running import eventually
from s3_fixtures import Bucket
from services.ec2_machines import HURRIES, Ec2Machines, ec2_machines
from services.fake_ec2 import fake_ec2
from services.fake_imds import SPOT
from services.machines import Machines

from launch import code
from launch.ec2 import request as request_module
from launch.ec2.request import user_data
from launch.record import Record
from launch.run_progress import newest_checkpoint
from train.config import S3Config
from train.run.command import DONE
from train.run_folder.metrics_files import rows


@pytest.fixture
def ec2(machines: Machines, bucket: Bucket, tmp_path: Path) -> Iterator[Ec2Machines]:
    with ec2_machines(machines, tmp_path) as made:
        yield made


METADATA = {  # of the machines
    "AWS_EC2_METADATA_DISABLED": "false",
    "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://169.254.169.254",
}
HELD_BEFORE = (30, 50)  # steps, each of an attempt that is interrupted there


@dataclass
class Cloud(Trial):
    """A run of two machines on moto's EC2, each machine of which is a namespace."""

    machines: Any = None  # Ec2Machines
    hold: Any = None
    inner: Any = None  # the record as machines reach it
    interruptions: tuple[str, ...] = ()  # one in each attempt, after its first checkpoint
    interrupted: int = 0
    started: dict[str, int] = field(default_factory=dict)  # machine: its namespace
    over: set[str] = field(default_factory=set)
    lost: int = -1  # namespace of a machine that was lost
    stack: ExitStack = field(default_factory=ExitStack)

    def user_data(self, *_: Any, **named: Any) -> bytes:
        return user_data(self.job, self.inner, **{"request": 1, "max_run_s": 3600, **named})

    def pause(self, seconds: float) -> None:
        time.sleep(0.2)
        for machine in self.made():
            if machine.state == "running" and machine.id not in {*self.started, *self.over}:
                number = next(
                    each for each in (0, 1, 2) if each not in (*self.started.values(), self.lost)
                )
                self.started[machine.id] = number
                content = base64.b64decode(self.ec2.requests[-1]["UserData"])
                self.machines.run_instances(
                    number, machine.id, content, launch_index=machine.ami_launch_index
                )
            number = self.started.get(machine.id)
            if machine.state == "terminated" and number is not None:
                self.machines.machines.kill_all(self.started.pop(machine.id))
                self.over.add(machine.id)
            elif number is not None and self.machines.shutdowns(number)[-1:] == ["-P now"]:
                self.ec2.client().terminate_instances(InstanceIds=[machine.id])
        began = [each for each in self.record.history().attempts if each.is_training]
        saved = newest_checkpoint(self.record.run) or 0
        due = self.interrupted < len(began) <= len(self.interruptions)
        if due and saved > began[-1].begun_at and self.hold.reached(HELD_BEFORE[self.interrupted]):
            self.interrupted = len(began)
            self.interrupt_one(self.interruptions[self.interrupted - 1])

    def interrupt_one(self, kind: str) -> None:
        ident, number = list(self.started.items())[-1]
        if kind == "spot":
            self.machines.services[number].say(
                SPOT, {"action": "terminate", "time": "2026-11-20T08:22:00Z"}
            )
        else:  # it closes no connection
            self.lost = number
            self.stack.enter_context(self.machines.machines.dead(number))
            self.ec2.client().terminate_instances(InstanceIds=[ident])
            self.hold.let_go(50)

    def says(self) -> str:
        events = [str(attempt) for attempt in self.record.history().attempts]
        logs = [
            f"== {name}\n{self.record.folder.read(name).decode()}"
            for name in self.record.folder.names("logs/")
        ]
        return "\n".join([*events, *logs, *map(self.machines.console, range(3))])


@pytest.fixture
def cloud(ec2, bucket, prepared, hold, monkeypatch) -> Iterator[Any]:
    bundle, packed = code.pack()
    keys = {name: os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    with (
        ec2.machines.reaching(bucket.service.server.port) as address,
        fake_ec2(monkeypatch) as fake,
        ExitStack() as stack,
    ):
        set_up()
        for service in ("EC2", "CLOUDFORMATION"):
            monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", fake.endpoint)
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "false")  # the machines read notices
        # these machines see this one's disk
        monkeypatch.setattr("launch.plan.check_reachable", lambda _: None)
        s3 = {"endpoint": f"http://{address}", "region": bucket.config().region}
        of_run = ["lease.ttl_s=2", f"s3.endpoint={s3['endpoint']}", *bucket.overrides()[1:]]
        of_run = settings_of_run(bucket.location("runs/mine"), prepared, *of_run)

        def make(
            *cluster: str, content: bytes = bundle, python: str = sys.executable, **changes: Any
        ) -> Cloud:
            _, job = plan(with_own(*cluster), of_run)
            own = [each for each in job.overrides if not each.startswith("instance")]
            job = replace(job, code=packed, python=python, overrides=own, s3=s3)
            held = {HELD: str(hold.folder), **METADATA}
            job = replace(job, environment=held, processes_per_node=1)
            record = Record(job.run_dir, bucket.config())
            inner = Record(job.run_dir, S3Config(**s3), job.sha256)
            more = {"machines": ec2, "hold": hold, "inner": inner, "stack": stack, **changes}
            made = Cloud(fake, record, job, bundle=content, **more)
            monkeypatch.setattr(request_module, "user_data", made.user_data)
            set_time(monkeypatch, time.time, made.pause)
            made.submit()
            return made

        yield make


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes_on_new_machines_to_the_same_losses(
    cloud, hold, undisturbed_losses
):
    """After a spot notice, and then after the loss of a machine."""
    hold.before(*HELD_BEFORE)
    run = cloud("cluster.gate=false", interruptions=("spot", "lost"))
    assert run.launcher().run() == DONE, run.says()
    lines = b"\n".join(rows(run.record.run))
    assert losses(lines) == pytest.approx(undisturbed_losses, rel=1e-5)
    first, second, third = run.record.history().attempts
    assert 0 == first.begun_at < second.begun_at < third.begun_at, run.says()
    assert len(run.made()) == 6
    assert "spot notice" in first.reason and "has ended" in second.reason
    assert run.ec2.anything() == []
    names = run.record.folder.names("logs/")
    assert f"logs/machines/{run.made()[-1].id}.txt" in names
    assert any(name.startswith("logs/attempt_0003/machine") for name in names)


# ---- one machine -----------------------------------------------------------------------------------------------------


def wait_for_end(ec2: Ec2Machines) -> None:
    eventually(lambda: ec2.shutdowns(0)[-1:] == ["-P now"] and not ec2.machines.running(0))


def start(ec2: Ec2Machines, run: Cloud, **named: Any) -> None:
    """A machine that registers, and then waits for the other one."""
    ec2.run_instances(0, "i-00000000", run.user_data(**named))
    eventually(lambda: run.record.folder.names("ec2/machines/"))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"content": b"damaged"}, "does not match its checksum"),
        ({"changed": True}, "job.json was changed"),
        (
            {"python": "/opt/nowhere/bin/python"},
            "/opt/nowhere/bin/python: No such file or directory",
        ),
    ],
)
def test_a_machine_that_cannot_start_says_so_and_ends(cloud, ec2, changed, line):
    run = cloud(**{key: value for key, value in changed.items() if key != "changed"})
    if "changed" in changed:  # by another machine: it runs as root there what the job names
        run.record.folder.write("job.json", replace(run.job, python="/tmp/evil").to_json())
    ec2.run_instances(0, "i-00000000", run.user_data())
    wait_for_end(ec2)
    assert line in (ec2.folder / "console.0").read_text() and not run.record.folder.names(
        "ec2/machines/"
    )
    if "python" not in changed:  # there is a Python that can write into the record
        assert line in json.loads(run.record.folder.read("ec2/failed/i-00000000.json"))["reason"]


def test_a_machine_whose_node_program_hangs_ends(cloud, ec2):
    start(ec2, cloud(), dead_s=600)
    [program] = (
        pid
        for pid in ec2.machines.running(0)
        if b"launch.ec2.machine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(program, signal.SIGSTOP)
    ec2.path(0, HURRIES).touch()
    wait_for_end(ec2)
    assert "silent for 600 s" in ec2.console(0)


def test_a_machine_has_a_deadline_and_ends_when_it_is_rebooted(cloud, ec2):
    """The script of another machine's disk ends nothing."""
    start(ec2, cloud(), max_run_s=3600)
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
