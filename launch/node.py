"""The program that a scheduler starts on each machine of a job: `python -m launch.node COMMAND RUN ...`.

train         runs torchrun with the trainer, from the code of the job
preflight     runs baretrain doctor and writes its answer into the record
collectives   runs baretrain doctor --collectives under torchrun, over all machines or over groups of them
prepare       prepares one part of a corpus or, with --merge, writes the manifest of all parts
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
from train.machine.machine import cache_root
from train.machine.torchrun import REJECTION
from train.run.command import DONE, command_parser, printable, run_flags
from train.storage.atomic_io import make_alike, open_alike
from train.storage.folders import canonical_json
from train.storage.schema import FileName

DOCTOR_S = 300.0  # time limit of baretrain doctor, which takes seconds
# time limits: one machine must not delay all others
LIMITS_S = {
    "preflight": DOCTOR_S + 60,
    "collectives": 1800.0,
}
# first port and number of ports, all below those that Linux assigns to clients
FIRST_PORT, PORTS = (
    20_000,
    10_000,
)
JOIN_S = 120  # time for machines, which have all just answered, to join for collectives; torchrun's default is 900 s
PREFLIGHT = "gate/{}/{}.json"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "launch.node",
        "Run one machine's part of a job. Schedulers start this; people use baretrain launch.",
        examples=("train runs/mine --hosts n1,n2 --addresses 10.0.0.1 --port 29500 --attempt 1",),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--hosts", default="", help="machines of the job, in rank order")
    parser.add_argument(
        "--addresses", default="", help="addresses of --hosts; the first is enough without --group"
    )
    parser.add_argument(
        "--group", type=int, default=0, help="number of machines that join as one group; 0: all"
    )
    parser.add_argument("--port", type=int, default=0, help="port at which the machines join")
    parser.add_argument(
        "--attempt", default="", help="name of the attempt or test, for logs and answers"
    )
    parser.add_argument("--part", type=int, help="part to prepare, counted from 1")
    parser.add_argument(
        "--merge", action="store_true", help="write the manifest of all prepared parts"
    )
    add_record_flags(parser)
    return run_flags(parser, arguments, act)


def join_flags(
    hosts: Sequence[str], addresses: Sequence[str], *, job: int, step: int, name: str, group: int
) -> list[str]:
    """Return the flags that make launch.node on each machine join the others."""
    # The port differs between jobs, which may share a machine, and between steps of a job, so that late packets of an
    # earlier attempt do not reach a later one.
    port = FIRST_PORT + (job * 101 + step) % PORTS
    words = [f"--hosts={','.join(hosts)}", f"--addresses={','.join(addresses)}", f"--port={port}"]
    return [*words, f"--attempt={name}", f"--group={group}"]


def act(options: argparse.Namespace, s3: S3Config) -> int:
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        # torchrun inherits this: the signal would end it and orphan its ranks
        signal.signal(number, signal.SIG_IGN)
    record = Record(options.run, s3, options.job_sha256)
    try:
        return COMMANDS[options.command](Node(record, record.job(), options))
    except InputError as error:
        # the exit code 2 alone is ambiguous: srun uses it for a missing program
        if options.command == "train":
            record.append_event(
                "refused", attempt=options.attempt, node=platform.node(), reason=str(error)
            )
        raise


class Node:
    """A machine of a job: its name, its position among the hosts that join, and its logs."""

    def __init__(self, record: Record, job: Job, options: argparse.Namespace) -> None:
        self.record, self.job, self.options = record, job, options
        self.name = FileName(os.environ.get("SLURMD_NODENAME") or platform.node())
        self.hosts = options.hosts.split(",") if options.hosts else [self.name]
        check(
            self.name in self.hosts,
            f"this machine, {self.name}, is not one of the job's: {', '.join(self.hosts)}",
        )
        self.addresses = options.addresses.split(",")
        if options.group:
            first = self.hosts.index(self.name) // options.group * options.group
            group = slice(first, first + options.group)
            self.hosts, self.addresses = self.hosts[group], self.addresses[group]
        self.rank = self.hosts.index(self.name)
        # The user's variables override the job's.
        self.environment = {**job.environment, **processes.outside_ranks(os.environ)}
        self.logs = record.local_folder() / "logs"
        if options.attempt:
            self.logs /= FileName(options.attempt)

    def start_py(self) -> str:
        """Unpack the job's code, and return its entry point."""
        content = self.record.folder.read(self.job.code.file)
        return str(
            code.unpack(content, self.job.code.sha256, cache_root() / "launch" / "code")
            / code.START
        )

    def torchrun(self, module: str, arguments: Sequence[str]) -> list[str]:
        joined = rendezvous(self, is_train=module == "train")
        logs = [f"--log-dir={self.logs / self.name}", "--redirects=3", "--tee=0:3"]
        size = [f"--nnodes={len(self.hosts)}", f"--nproc-per-node={self.job.processes_per_node}"]
        start = self.start_py()
        # Use this program's local_torchrun: the job's code may be from an older version, which has none.
        torchrun = (
            ["-m", "torch.distributed.run"]
            if len(self.hosts) > 1
            else [str(Path(local_torchrun.__file__))]
        )
        head = [self.job.python, *torchrun, *size, *joined, "--max-restarts=0", *logs]
        return [*head, start, module, *arguments]

    def run(self, command: Sequence[str], log: str) -> int:
        """Run a command with its output in a log file; return its exit code. Upload logs if the record is in S3."""
        make_alike(self.logs)
        with open_alike(self.logs / log, "ab") as output:
            process = processes.start(command, env=self.environment, output=output)
            # schedulers signal all processes, but `kill` signals only this one
            for number in processes.FORWARDED:
                signal.signal(number, lambda number, _: process.send_signal(number))
            code = processes.exit_code(process)
        for path in sorted(self.logs.rglob("*")) if self.record.is_remote else ():
            if path.is_file() and self.name in path.relative_to(self.logs).as_posix():
                name = path.relative_to(self.record.local_folder()).as_posix()
                self.record.folder.write(name, path.read_bytes())
        return code

    def answer(self, content: bytes) -> None:
        """Write the machine's answer to the preflight. A missing answer counts as a failure."""
        self.record.folder.write(PREFLIGHT.format(self.options.attempt, self.name), content)


def rendezvous(node: Node, *, is_train: bool) -> list[str]:
    """Return the options with which this machine's torchrun joins the others. Rank 0 is on the first machine."""
    # The id is new for every attempt, so that agents of an earlier attempt cannot join.
    ident = f"--rdzv-id={node.job.id}.{node.options.attempt}"
    if len(node.hosts) == 1:
        return [ident]
    first = [
        f"--node-rank={node.rank}",
        f"--master-addr={node.addresses[0]}",
        f"--master-port={node.options.port}",
    ]
    return [ident, *first, *([] if is_train else [f"--rdzv-conf=timeout={JOIN_S}"])]


def train(node: Node) -> int:
    code = node.run(node.torchrun("train", node.job.overrides), f"{node.name}.txt")
    # torchrun's exit code is 1 for any failure
    for path in sorted((node.logs / node.name).rglob(REJECTION))[-1:]:
        reason = printable(path.read_text(errors="replace"))
        node.record.append_event(
            "refused", attempt=node.options.attempt, node=node.name, reason=reason
        )
    return code


def preflight(node: Node) -> int:
    job, instance = node.job, node.job.instance
    command = [
        job.python,
        node.start_py(),
        "doctor",
        "--json",
        f"--ranks-per-machine={job.processes_per_node}",
    ]
    command += [
        f"--machines={job.nodes}",
        *([f"--instance={instance}"] if instance != "local" else []),
    ]
    with tempfile.TemporaryFile() as output:
        code = processes.exit_code(
            subprocess.Popen(command, env=node.environment, stdout=output), limit_s=DOCTOR_S
        )
        output.seek(0)
        answer = output.read()
    # baretrain doctor may have hung on a driver or a file system
    if code == processes.TIMED_OUT or not answer:
        answer = canonical_json(
            {
                "ok": False,
                "fault": f"baretrain doctor ended with exit code {code}; its time limit is {DOCTOR_S:g} s",
            }
        )
    node.answer(answer)
    return DONE


def collectives(node: Node) -> int:
    """Test the connections among the ranks of this machine's group."""
    settings = [
        each
        for each in node.job.overrides
        if each.partition("=")[0].split(".")[0] in ("backend", "instance")
    ]
    code = node.run(
        node.torchrun("doctor", ["--collectives", *settings]), f"{node.name}.collectives.txt"
    )
    fault = f"baretrain doctor --collectives ended with exit code {code}, see its log"
    node.answer(canonical_json({"ok": code == 0, "fault": fault}))
    return code


def prepare(node: Node) -> int:
    job, which, log = node.job, list[str](), "prepare"
    if node.options.merge:
        which, log = ["merge=true"], "merge"
    elif job.parts > 1:
        which, log = [f"part={node.options.part}/{job.parts}"], f"part_{node.options.part:05d}"
    return node.run(
        [job.python, node.start_py(), job.module, *job.overrides, *which], f"{log}.{node.name}.txt"
    )


COMMANDS = {"train": train, "preflight": preflight, "collectives": collectives, "prepare": prepare}

if __name__ == "__main__":
    sys.exit(main())
