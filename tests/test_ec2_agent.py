"""Machines of EC2 from their user data to the end of the run. The tests write what launch.ec2.watch would: the crew."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from running import eventually, run, train_overrides
from s3_fixtures import Bucket
from services.ec2_machines import Ec2Machines, ec2_machines
from services.machines import Machines, inside

from launch import code
from launch.ec2 import orders
from launch.ec2.agent import KILLED
from launch.ec2.boot import SCRIPT, user_data
from launch.ec2.crew import CREW, Crew, read_hello, write
from launch.ec2.orders import Number, Order
from launch.job import Code, Job
from launch.record import Event, Record
from launch.supervise import look
from train.cli.command import DONE
from train.config import S3Config
from train.storage.untrusted import FileName

LONG = ["max_steps=160", "checkpoint.every=40", "checkpoint.keep=2", "eval_every=80", "log_every=40", "export=false"]
LONG += ["lease.ttl_s=2", "preempt.poll_s=0.2", "preempt.notices=on", "watchdog.step_s=4"]
BUNDLE = code.pack()
DISK = "EC2 NVMe Instance Storage"


@pytest.fixture
def ec2(machines: Machines, bucket: Bucket, tmp_path: Path) -> Iterator[Ec2Machines]:
    with ec2_machines(machines, tmp_path) as made:
        yield made


def job_of(run_dir: str, *overrides: str, **changes: Any) -> Job:
    settings: dict[str, Any] = {"id": "mine-1", "kind": "train", "overrides": list(overrides), "instance": "local"}
    settings |= {
        "config_sha256": "0" * 64,
        "python": sys.executable,
        "folder": "",
        "scheduler": "ec2",
        "processes_per_node": 1,
    }
    settings |= {"code": Code(BUNDLE.file, BUNDLE.sha256, ""), "cluster": {"kind": "ec2", "gate": False}}
    return Job(run_dir=run_dir, **{**settings, "nodes": 2, "spares": 0, **changes})


@dataclass
class Launched:
    """A run on the machines, and what the watcher does."""

    ec2: Ec2Machines
    record: Record
    user_data: bytes
    generation: int = 0

    def run_instance(self, number: int, instance: str, launch_index: int = 0) -> None:
        self.ec2.run_instances(number, instance, self.user_data, launch_index=launch_index)
        eventually(lambda: read_hello(self.record, instance))

    def name_crew(self, *members: str) -> None:
        self.generation += 1
        write(self.record, CREW, Crew(self.generation, list(members)))

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.record.events() if event.kind == kind]

    def wait_for(self, kind: str, number: int = 1) -> Event:
        def come() -> Event | None:
            ended = self.events("ended")
            assert kind == "ended" or not ended, self.said()
            return (self.events(kind) + [None] * number)[number - 1]

        return eventually(come)

    def wait_for_checkpoint(self, *, after: int = 0) -> int:
        def newest() -> int | None:
            assert not self.events("ended"), self.said()
            step = look(self.record).checkpoint
            return step if step > after else None

        return eventually(newest)

    def said(self) -> str:
        events = [f"{event.kind} {event.details}" for event in self.record.events()]
        logs = [f"== {name}\n{self.record.folder.read(name).decode()}" for name in self.record.folder.names("logs/")]
        return "\n".join([*events, *logs, *map(self.ec2.console, range(3))])


@pytest.fixture
def launch(ec2: Ec2Machines, bucket: Bucket, prepared: Path) -> Iterator[Any]:
    """Write the record of a run of two machines."""
    with ec2.machines.reaching(bucket.service.server.port) as address:
        s3 = {"endpoint": f"http://{address}", "region": bucket.config().region, "path_style": True}

        def make(*overrides: str, bundle: bytes = BUNDLE.content, dead_s: int = 1800, **changes: Any) -> Launched:
            run_dir = bucket.location("runs/mine")
            own = [f"s3.endpoint={s3['endpoint']}", *bucket.overrides()[1:]]
            of_run = [*train_overrides(Path("-"), prepared), *LONG, f"run_dir={run_dir}", *own, *overrides]
            given = {each.partition("=")[0]: each for each in of_run}  # the last one counts
            job = job_of(run_dir, *given.values(), s3=s3, **changes)
            record = Record(run_dir, bucket.config())
            record.write(job, plan={}, config="", bundle=bundle)
            record.note("submitting")
            return Launched(ec2, record, user_data(job, Record(run_dir, S3Config(**s3)), dead_s=dead_s))

        yield make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> list[float]:
    """The losses of LONG on one rank of this machine."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run(train_overrides(folder, prepared, *LONG, "preempt.notices=off"))
    assert done.returncode == DONE, done.stderr
    return losses((folder / "metrics.jsonl").read_bytes())


def losses(metrics: bytes) -> list[float]:
    """Of the evaluations, which see all of the model; of a step that was done twice the last."""
    parsed = [json.loads(line) for line in metrics.splitlines()]
    return list({line["step"]: line["loss"] for line in parsed if line["kind"] == "eval"}.values())


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_when_the_machine_that_leads_is_lost(launch, ec2, undisturbed):
    """It closes no connection. Another one leads, and a new one has a part of its own."""
    run = launch()
    for number, instance in ((1, "i-00000001"), (0, "i-00000000")):
        run.run_instance(number, instance, launch_index=1 - number)
    run.name_crew("i-00000001", "i-00000000")
    run.wait_for_checkpoint()
    with ec2.machines.dead(1):
        run.run_instance(2, "i-00000002")
        run.name_crew("i-00000000", "i-00000002")
        assert run.wait_for("ended").details == {"outcome": "done", "reason": "done"}, run.said()
    assert losses(run.record.run.read("metrics.jsonl")) == pytest.approx(undisturbed, rel=1e-5)
    attempts = [(each.details["nodes"], each.details["checkpoint"] > 0) for each in run.events("attempt_began")]
    assert attempts == [(["machine1", "machine0"], False), (["machine0", "machine2"], True)], run.said()
    for number in (0, 2):
        wait_for_end(ec2, number)
    expected = {"lead_0002.txt", "machines/i-00000002.txt", "attempt_0002/machine2.txt"}
    assert {f"logs/{name}" for name in expected} <= set(run.record.folder.names("logs/"))


def test_machines_that_are_not_fit_end_the_run(launch, ec2):
    """Each knows itself by 127.0.1.1, which train.doctor takes for a fault."""
    run = launch(cluster={"kind": "ec2", "gate": True})
    for number in (0, 1):
        run.run_instance(number, f"i-0000000{number}")
    run.name_crew("i-00000000", "i-00000001")
    ended = run.wait_for("ended").details
    assert ended["outcome"] == "failed" and "0 of 2 nodes passed the gate" in ended["reason"], run.said()
    (gate,) = run.events("gate")
    assert gate.details["passed"] == [] and set(gate.details["failed"]) == {"machine0", "machine1"}
    assert all("maps machine" in reason for reason in gate.details["failed"].values())
    for number in (0, 1):
        wait_for_end(ec2, number)


# ---- one machine -----------------------------------------------------------------------------------------------------


def deadlines(ec2: Ec2Machines, number: int) -> list[int]:
    """Minutes after which the machine was to end, by each `shutdown`."""
    return [int(each.removeprefix("-P +")) for each in ec2.shutdowns(number) if "+" in each]


def wait_for_end(ec2: Ec2Machines, number: int) -> None:
    eventually(lambda: ec2.shutdowns(number)[-1:] == ["-P now"] and not ec2.machines.running(number))


def test_a_machine_whose_code_is_damaged_says_so_and_ends(launch, ec2):
    run = launch(bundle=b"damaged")
    ec2.run_instances(0, "i-00000000", run.user_data)
    wait_for_end(ec2, 0)
    failed = json.loads(run.record.folder.read("ec2/failed/i-00000000.json"))["reason"]
    assert failed == f"error: {run.record.location}/{BUNDLE.file} does not match its checksum; launch the run again"
    assert failed in ec2.console(0) and read_hello(run.record, "i-00000000") is None


def test_a_machine_whose_python_is_missing_says_so_and_ends(launch, ec2):
    run = launch(python="/opt/nowhere/bin/python")
    ec2.run_instances(0, "i-00000000", run.user_data)
    wait_for_end(ec2, 0)
    assert "/opt/nowhere/bin/python: No such file or directory" in (ec2.folder / "console.0").read_text()


def test_a_machine_whose_agent_hangs_ends(launch, ec2):
    run = launch(dead_s=11)  # a beat comes every ten seconds
    run.run_instance(0, "i-00000000")
    (agent,) = (
        pid for pid in ec2.machines.running(0) if b"launch.ec2.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(agent, signal.SIGSTOP)
    wait_for_end(ec2, 0)
    assert "the agent has been silent for 11 s" in ec2.console(0)


def test_a_machine_that_was_rebooted_goes_on(launch, ec2):
    """It keeps its deadline, and the order that it has lost has ended. What another machine's disk holds is not run."""
    run = launch(cluster={"kind": "ec2", "gate": False, "max_run_s": 3600})
    run.run_instance(0, "i-00000000")
    own = ec2.path(0, "/var/lib/cloud/scripts/per-boot/baretrain-i-00000000.sh")
    assert own.read_bytes() == run.user_data and deadlines(ec2, 0) == [90]
    ec2.machines.kill_all(0)
    own.with_name("baretrain-i-0.sh").write_bytes(SCRIPT.read_bytes() + b"main not-for-this-machine\n")  # comes first
    deadline = ec2.path(0, "/var/lib/baretrain/i-00000000")
    deadline.write_text(str(int(deadline.read_text()) - 1200))  # the reboot comes 20 minutes later
    run.name_crew("i-00000001", "i-00000000")
    order = Order("gate", FileName("gate_1"), ["i-00000000"], ["machine0"], ["10.77.0.1"], 20001)
    orders.give(run.record, Number(1, 1), order)
    ec2.boot_again(0)
    eventually(lambda: orders.answered(run.record, Number(1, 1)))
    assert orders.exit_code(run.record, Number(1, 1), "i-00000000") == KILLED
    run.record.note("ended", outcome="stopped", reason="stopped as asked")
    wait_for_end(ec2, 0)
    assert deadlines(ec2, 0) in ([90, 70], [90, 69])


RECORD = """#!/bin/bash
echo "${0##*/} $*" >>/var/lib/called.txt
"""
NVME = {
    "mdadm": RECORD,
    "mkfs.ext4": RECORD,
    "lsblk": RECORD,
    "mount": RECORD + 'if [[ $1 == -L ]]; then exit 1; fi\nexec /bin/mount -t tmpfs tmpfs "$2"\n',
}


def test_the_disks_of_a_machine_are_joined_once(launch, ec2):
    pid, run = ec2.machines.pids[0], launch(python="/bin/false")
    for name, model in {"nvme0n1": "Elastic Block Store", "nvme1n1": DISK, "nvme2n1": DISK}.items():
        (ec2.folder / "block" / name / "device").mkdir(parents=True)
        (ec2.folder / "block" / name / "device/model").write_text(f"Amazon {model}\n")
    inside(pid, "mount", "--bind", str(ec2.folder / "block"), "/sys/block")
    try:
        with ec2.with_programs(NVME):
            ec2.run_instances(0, "i-00000000", run.user_data)
            wait_for_end(ec2, 0)
            ec2.boot_again(0)  # its file system is still mounted here
            eventually(lambda: ec2.shutdowns(0).count("-P now") == 2)
    finally:
        inside(pid, "umount", "/sys/block")
    assert ec2.path(0, "/var/lib/called.txt").read_text().splitlines() == [
        "mdadm --assemble --scan",
        "mount -L baretrain /mnt/local",
        "lsblk --noheadings --output=MOUNTPOINT /dev/nvme1n1 /dev/nvme2n1",
        "mdadm --create /dev/md0 --run --level=0 --raid-devices=2 /dev/nvme1n1 /dev/nvme2n1",
        "mkfs.ext4 -q -L baretrain /dev/md0",
        "mount /dev/md0 /mnt/local",
    ]
