"""The program that a scheduler starts on each machine of a job: `python -m launch.node COMMAND RUN ...`.

train         runs torchrun with the trainer, from the code of the job
preflight     runs baretrain doctor and writes its answer into the record
collectives   runs baretrain doctor --collectives under torchrun, over all machines
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launch import code
from launch.record import Job, Record, add_record_flags
from train.config import InputError, S3Config, check
from train.machine import local_torchrun, processes
from train.machine.host import cache_root
from train.machine.torchrun import REJECTION
from train.run.command import DONE, command_parser, run_flags
from train.storage.folders import canonical_json
from train.storage.schema import FileName

DOCTOR_S = 300.0  # time limit of baretrain doctor, which takes seconds
# Time limits of commands: one machine must not delay all others.
LIMITS_S = {"preflight": DOCTOR_S + 60, "collectives": 1800.0}
# Ports at which machines join, all below those that Linux assigns to clients.
FIRST_PORT = 20_000
PORTS = 10_000
JOIN_S = 120  # time for machines, which have all just answered, to join for collectives; torchrun's default is 900 s
PREFLIGHT = "gate/{}/{}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "launch.node",
        "Run one machine's part of a job. Schedulers start this; people use baretrain launch.",
        examples=("train runs/mine --hosts n1,n2 --address 10.0.0.1 --port 29500 --attempt 1",),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--hosts", default="", help="machines of the job, in rank order")
    parser.add_argument("--address", default="", help="address of the first of --hosts")
    parser.add_argument("--port", type=int, default=0, help="port at which the machines join")
    parser.add_argument(
        "--attempt", default="", help="name of the attempt or test, for logs and answers"
    )
    add_record_flags(parser)
    return run_flags(parser, arguments, act)


def join_flags(hosts: Sequence[str], address: str, *, job: int, step: int, name: str) -> list[str]:
    """Return the flags that make launch.node on each machine join the others at the first machine's address."""
    # The port differs between jobs, which may share a machine, and between steps of a job, so that late packets of an
    # earlier attempt do not reach a later one.
    port = FIRST_PORT + (job * 101 + step) % PORTS
    return [
        f"--hosts={','.join(hosts)}",
        f"--address={address}",
        f"--port={port}",
        f"--attempt={name}",
    ]


def act(options: argparse.Namespace, s3: S3Config) -> int:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # torchrun inherits this: the signal would end it and orphan its ranks.
        signal.signal(number, signal.SIG_IGN)
    record = Record(options.run, s3, options.job_sha256)
    try:
        return COMMANDS[options.command](Node(record, record.job(), options))
    except InputError as error:
        if options.command == "train":
            # The exit code 2 alone is ambiguous: srun uses it for a missing program.
            record.reject(options.attempt, str(error))
        raise


class Node:
    """A machine of a job: its name, its position among the hosts that join, and its logs."""

    def __init__(self, record: Record, job: Job, options: argparse.Namespace) -> None:
        self.record = record
        self.job = job
        self.options = options
        self.name = FileName(os.environ.get("SLURMD_NODENAME") or platform.node())
        if options.hosts:
            self.hosts = options.hosts.split(",")
        else:
            self.hosts = [self.name]
        check(
            self.name in self.hosts,
            f"this machine, {self.name}, is not one of the job's: {', '.join(self.hosts)}",
        )
        self.rank = self.hosts.index(self.name)
        # The user's variables override the job's.
        self.environment = {**job.environment, **processes.outside_ranks(os.environ)}
        self.logs = record.local_folder() / "logs"
        if options.attempt:
            self.logs /= FileName(options.attempt)

    def start_py(self) -> str:
        """Unpack the job's code, and return its entry point."""
        bundle = self.job.code
        content = self.record.folder.read(bundle.file)
        folder = code.unpack(content, bundle.sha256, cache_root() / "launch" / "code")
        return str(folder / code.START)

    def torchrun(self, module: str, arguments: Sequence[str]) -> list[str]:
        torchrun = ["-m", "torch.distributed.run"]
        if len(self.hosts) == 1:
            # Use this program's local_torchrun: the job's code may be from an older version, which has none.
            torchrun = [str(Path(local_torchrun.__file__))]
        return [
            self.job.python,
            *torchrun,
            f"--nnodes={len(self.hosts)}",
            f"--nproc-per-node={self.job.processes_per_node}",
            *rendezvous(self, is_train=module == "train"),
            "--max-restarts=0",
            f"--log-dir={self.logs / self.name}",
            "--redirects=3",
            "--tee=0:3",
            self.start_py(),
            module,
            *arguments,
        ]

    def run(self, command: Sequence[str], log: str) -> int:
        """Run a command with its output in a log file; return its exit code. Upload logs if the record is in S3."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / log).open("ab") as output:
            process = processes.start(command, env=self.environment, output=output)
            for number in processes.FORWARDED:
                # Schedulers signal all processes, but `kill` signals only this one.
                signal.signal(number, lambda number, _: process.send_signal(number))
            exit_code = processes.exit_code(process)
        if self.record.is_remote:
            self.upload()
        return exit_code

    def upload(self) -> None:
        """Upload this machine's logs of the attempt to the record."""
        top = self.record.local_folder()
        for path in sorted(self.logs.rglob("*")):
            below = path.relative_to(self.logs).as_posix()
            if path.is_file() and self.name in below:
                name = path.relative_to(top).as_posix()
                self.record.folder.write(name, path.read_bytes())

    def answer(self, content: bytes) -> None:
        """Write the machine's answer to the preflight. A missing answer counts as a failure."""
        self.record.folder.write(PREFLIGHT.format(self.options.attempt, self.name), content)


def rendezvous(node: Node, *, is_train: bool) -> list[str]:
    """Return the options with which this machine's torchrun joins the others. Rank 0 is on the first machine."""
    # The id is new for every attempt, so that agents of an earlier attempt cannot join.
    options = [f"--rdzv-id={node.job.id}.{node.options.attempt}"]
    if len(node.hosts) == 1:
        return options
    options += [
        f"--node-rank={node.rank}",
        f"--master-addr={node.options.address}",
        f"--master-port={node.options.port}",
    ]
    if not is_train:
        options.append(f"--rdzv-conf=timeout={JOIN_S}")
    return options


def train(node: Node) -> int:
    exit_code = node.run(node.torchrun("train", node.job.overrides), f"{node.name}.txt")
    rejections = sorted((node.logs / node.name).rglob(REJECTION))
    if rejections:  # torchrun's exit code is 1 for any failure
        node.record.reject(node.options.attempt, rejections[-1].read_text(errors="replace"))
    return exit_code


def preflight(node: Node) -> int:
    job = node.job
    command = [job.python, node.start_py(), "doctor", "--json"]
    if job.instance != "local":
        command.append(f"--instance={job.instance}")
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=node.environment, stdout=output)
        exit_code = processes.exit_code(process, limit_s=DOCTOR_S)
        output.seek(0)
        answer = output.read()
    if exit_code == processes.TIMED_OUT or not answer:
        # baretrain doctor may have hung on a driver or a file system.
        fault = (
            f"baretrain doctor ended with exit code {exit_code}; its time limit is {DOCTOR_S:g} s"
        )
        answer = canonical_json({"ok": False, "fault": fault})
    node.answer(answer)
    return DONE


def collectives(node: Node) -> int:
    """Test the connections among the ranks of all machines."""
    settings = []
    for override in node.job.overrides:
        if override.partition("=")[0].split(".")[0] in ("backend", "instance"):
            settings.append(override)
    command = node.torchrun("doctor", ["--collectives", *settings])
    return node.run(command, f"{node.name}.collectives.txt")


COMMANDS = {"train": train, "preflight": preflight, "collectives": collectives}

if __name__ == "__main__":
    sys.exit(main())
