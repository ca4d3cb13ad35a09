"""The node program of a run on EC2. boot.sh starts it on each machine, and it ends with the run.

RUN.launch/ec2/machines/0003/0000.json   written by the machine of request 3 with launch index 0, the first machine
              /steps/0003/0001.json      step 1 of all machines of the request, written by the first machine

The first machine makes the attempts of the run (launch.supervise); the others follow its steps until the step "end".
torchrun joins their ranks at the first machine's address.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path

import launch
from launch import code
from launch.ec2.config import Ec2Config
from launch.node import LIMITS_S, PREFLIGHT, join_flags
from launch.program import Program
from launch.record import END as END_JOB
from launch.record import REQUEUE, Job, Record, add_record_flags
from launch.schedulers import cluster_of
from launch.supervise import (
    Decision,
    conclude,
    exhausted,
    recording_failure,
    retry,
)
from train.config import InputError, S3Config, Unreachable
from train.machine import processes
from train.machine.console import say
from train.machine.metadata import Metadata, metadata_endpoint
from train.run.command import DONE, FAILED, command_parser, run_flags
from train.storage.folders import canonical_json
from train.storage.schema import FileName

REGISTERED = "ec2/machines/{:04d}/"
STEPS = "ec2/steps/{:04d}/{:04d}.json"
END = "end"
MAX_RUN = "cluster.max_run_s has passed"
POLL_S = 2.0  # between two looks into the record
SIGN_S = 10.0  # between two signs of life
LOGS_S = 30.0  # between two uploads of logs
# time for all machines to boot and register, and for the first machine to write a step
BOOT_S = 900.0
END_S = 60.0  # time for a process to end: the trainer may be saving
ALIVE = "alive"  # a file in boot.sh's folder, made when S3 has answered
LOG = "machine.txt"  # this program's output, in the same folder


@dataclass(frozen=True)
class Registration:
    instance: FileName  # id such as i-0123456789abcdef0
    host: FileName
    address: FileName  # address at which other machines reach this one
    index: int  # launch index within the request, which decides the order of ranks


@dataclass(frozen=True)
class Step:
    command: str  # a command of launch.node, or END
    name: FileName  # the step's name, for logs and answers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "launch.ec2.machine",
        "Run one machine of a run on EC2. launch/ec2/boot.sh starts this.",
        examples=("s3://bucket/runs/mine --request 3 --max-run-s 86400 --state /run/baretrain",),
    )
    request = "number that the machines made together share"
    limit = "seconds until the run is asked to stop"
    parser.add_argument("run", help="run folder")
    parser.add_argument("--request", type=int, required=True, help=request)
    parser.add_argument("--max-run-s", type=int, required=True, help=limit)
    parser.add_argument("--state", type=Path, required=True, help="folder that boot.sh watches")
    add_record_flags(parser)
    return run_flags(parser, arguments, act)


def settle(record: Record, decision: Decision) -> bool:
    """Return whether to ask for all machines again, after a decision in the record. If not, record the job's end."""
    history = retry(record.history)
    if decision.next != REQUEUE:
        if history.ended is None:
            conclude(record, decision)
        return False
    limit = exhausted(history)
    if history.is_stop_asked:
        conclude(record, Decision(END_JOB, "stopped", "stopped as asked"))
    elif limit:
        conclude(record, Decision(END_JOB, "failed", f"{limit}; {decision.reason}"))
    else:
        return True
    return False


def act(options: argparse.Namespace, s3: S3Config) -> int:
    run = Record(options.run, s3, options.job_sha256)
    job = retry(run.job)
    own = retry(identity)
    machine = Machine(run, job, own, options.request, options.state)
    return machine.run(time.monotonic() + options.max_run_s)


def identity() -> Registration:
    """Return this machine's registration, from EC2's metadata service."""
    metadata = Metadata(metadata_endpoint(os.environ))
    try:
        return Registration(
            instance=FileName(metadata.get("instance-id")),
            host=FileName(platform.node()),
            address=FileName(metadata.get("local-ipv4")),
            index=int(metadata.get("ami-launch-index") or ""),
        )
    except (HTTPException, ValueError) as error:
        raise OSError(
            f"the metadata service {metadata.endpoint} does not answer as EC2's does: {error}"
        ) from error


class Machine(Program):
    def __init__(
        self, run: Record, job: Job, own: Registration, request: int, state: Path
    ) -> None:
        super().__init__(run, job)
        self.own = own
        self.request = request
        self.state = state
        self.cluster = cluster_of(job, Ec2Config)
        self.all: list[Registration] = []  # all machines of the request, ordered by launch index
        self.number = 0  # number of the last step
        self.logs = run.local_folder() / "logs"
        self.sent: dict[Path, tuple[int, int]] = {}  # uploaded logs: bytes, time of change
        # time.monotonic() of the last sign of life and upload of logs
        self.sign_s = -math.inf
        self.logs_s = -math.inf
        self.stops_s = math.inf

    def run(self, stops_s: float) -> int:
        """Take part in the run. At time.monotonic() `stops_s`, the first machine asks the run to stop."""
        say(f"{self.own.instance}, {self.own.host} at {self.own.address}, number {self.own.index}")
        try:
            if not self.join():
                return FAILED
            if self.own.index == 0:
                self.stops_s = stops_s
                with recording_failure(self.record):
                    self.lead()
            else:
                self.follow()
        finally:
            retry(self.upload)
        return DONE

    def join(self) -> bool:
        """Register, and wait for the other machines; return whether all have registered within BOOT_S."""
        folder = REGISTERED.format(self.request)
        own = f"{folder}{self.own.index:04d}.json"
        retry(self.record.folder.write, own, canonical_json(asdict(self.own)))

        def came() -> list[str]:
            return retry(self.record.folder.names, folder)

        if self.wait(lambda: len(came()) >= self.job.nodes, BOOT_S):
            self.all = [retry(self.record.read, Registration, name) for name in came()]
            return True
        names = came()
        reason = f"{len(names)} of {self.job.nodes} machines registered in {BOOT_S:.0f} s"
        say(reason)
        if names[0] == own:  # only one machine records the failure
            conclude(self.record, Decision(END_JOB, "failed", reason))
        return False

    def has(self, name: str) -> bool:
        return retry(self.record.folder.size, name) is not None

    def wait(self, is_over: Callable[[], bool], limit_s: float) -> bool:
        """Do periodic work until `is_over()` is true. Returns False if that takes longer than `limit_s`."""
        until_s = time.monotonic() + limit_s
        while not is_over():
            if time.monotonic() > until_s:
                return False
            self.meanwhile()
            time.sleep(POLL_S)
        return True

    # ---- the first machine -------------------------------------------------------------------------------------------

    def lead(self) -> None:
        """Examine all machines, train on them, and record the decision about what to do next."""
        self.nodes = [str(each.host) for each in self.all]
        decision = self.supervise(self.cluster, name=f"gate_{self.request:04d}")
        if decision.next == REQUEUE and self.stop.reason == MAX_RUN:
            decision = Decision(END_JOB, "stopped", MAX_RUN)
        settle(self.record, decision)
        self.step(Step(END, FileName(END)))

    def on_nodes(self, command: str, name: str) -> int:
        # This machine's exit code, once all have answered a preflight.
        result = self.step(Step(command, FileName(name)))
        if command == "preflight":
            answers = [PREFLIGHT.format(name, host) for host in self.nodes]
            self.wait(lambda: all(map(self.has, answers)), LIMITS_S[command])
        return result

    def step(self, step: Step) -> int:
        """Let all machines run a command of launch.node at the same time; return this machine's exit code."""
        retry(self.record.folder.write, self.next_step, canonical_json(asdict(step)))
        self.number += 1
        if step.command == END:
            return DONE
        return self.do(step)

    # ---- the other machines ------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Do each step of the first machine. Return when it writes END, or writes no step for BOOT_S."""
        while self.wait(lambda: self.has(self.next_step), BOOT_S):
            step = retry(self.record.read, Step, self.next_step)
            self.number += 1
            if step.command == END:
                return
            self.do(step)
        say(f"no step from the first machine for {BOOT_S:.0f} s")

    # ---- all machines ------------------------------------------------------------------------------------------------

    @property
    def next_step(self) -> str:
        return STEPS.format(self.request, self.number + 1)

    def do(self, step: Step) -> int:
        """Run a step's command, and end it at its time limit or once the first machine has written the next step."""
        hosts = [each.host for each in self.all]
        start = str(Path(launch.__file__).parents[1] / code.START)  # start.py of the running code
        command = [self.job.python, start, "launch.node", step.command, self.record.run_dir]
        command += join_flags(
            hosts, self.all[0].address, job=self.request, step=self.number, name=step.name
        )
        processes.adopt_orphans()
        process = processes.start([*command, *self.record.flags()], env=os.environ)
        ends_s = math.inf

        def meanwhile() -> None:
            nonlocal ends_s
            if time.monotonic() > ends_s:
                processes.kill([process.pid, *processes.descendants(process.pid)])
            elif ends_s == math.inf and self.meanwhile() and self.is_behind():
                process.terminate()
                ends_s = time.monotonic() + END_S

        limit_s = LIMITS_S.get(step.command, math.inf)
        result = processes.exit_code(process, meanwhile=meanwhile, limit_s=limit_s)
        processes.end_orphans(END_S)  # ranks whose torchrun was killed
        return result

    def is_behind(self) -> bool:
        """Return whether the first machine has written the next step."""
        return self.own.index > 0 and self.has(self.next_step)

    def meanwhile(self) -> bool:
        """Do periodic work if it is due (a sign of life, stop requests, logs). Returns whether S3 has answered."""
        now_s = time.monotonic()
        if now_s - self.sign_s < SIGN_S:
            return False
        self.sign_s = now_s
        try:
            if now_s > self.stops_s:
                self.stops_s = math.inf
                self.stop.ask(MAX_RUN)
            self.stop.write()
            self.record.exists()
            (self.state / ALIVE).touch()
            if now_s - self.logs_s >= LOGS_S:
                self.logs_s = now_s
                self.upload()
        except (InputError, Unreachable, OSError) as error:
            say(f"trying again: {error}")
            return False
        return True

    def upload(self) -> None:
        """Upload changed logs to the record, since the disk is deleted when the machine ends."""
        files = {
            path.relative_to(self.logs).as_posix(): path for path in sorted(self.logs.rglob("*"))
        }
        files[f"machines/{self.own.instance}.txt"] = self.state / LOG
        for name, path in files.items():
            if not path.is_file():
                continue
            seen = path.stat()
            if self.sent.get(path) != (seen.st_size, seen.st_mtime_ns):
                self.record.folder.write(f"logs/{name}", path.read_bytes())
                self.sent[path] = seen.st_size, seen.st_mtime_ns


if __name__ == "__main__":
    sys.exit(main())
