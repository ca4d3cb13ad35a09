"""The program on the first node of a Slurm job: it runs the preflight and the attempts, and may requeue the job.

Before the time limit, Slurm sends USR1 to this process only. The program then writes the file STOP, so that the run
saves and stops: a signal would end torchrun and orphan its ranks. The program requeues the job only after srun has
ended, since a requeue would kill srun's step.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from launch.node import LIMITS_S, join_flags
from launch.program import Program
from launch.record import REQUEUE, Job, Record, add_record_flags
from launch.schedulers import cluster_of
from launch.slurm.client import Slurm
from launch.slurm.config import SlurmConfig
from launch.supervise import CODES, NeverBegan, recording_failure, retry
from train.config import Failure, S3Config, check
from train.machine import processes
from train.run.command import STOPPED, command_parser, printable, run_flags

REQUEUED_S = 600.0  # how long to wait for Slurm to end this process after a requeue; it usually takes much less
# srun prints NO_STEP if slurmctld creates no step, for example on a node that was lost and returned before its job was
# restarted. It prints NO_LAUNCH if a node does not answer. Lines of tasks do not match, since they begin with a label.
NO_STEP = re.compile(rb"^srun: error: (Unable to create step for job .*)", re.MULTILINE)
NO_LAUNCH = re.compile(rb"^srun: error: (Task launch for .* failed on node .*)", re.MULTILINE)
STEP_S = 60  # how long srun waits for an earlier step to leave the nodes; after this, a requeue ends that step
SIGNALLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)  # srun's exit codes after a signal


def main(arguments: Sequence[str] | None = None) -> int:
    purpose = "Run a job inside Slurm. baretrain launch cluster=slurm submits it."
    parser = command_parser("launch.slurm.batch", purpose, examples=("runs/mine",))
    parser.add_argument("run", help="run folder")
    add_record_flags(parser)
    return run_flags(parser, arguments, run_job)


def run_job(options: argparse.Namespace, s3: S3Config) -> int:
    check(
        "SLURM_JOB_ID" in os.environ,
        "this is not a Slurm job; submit one with baretrain launch cluster=slurm",
    )
    record = Record(options.run, s3, options.job_sha256)
    with recording_failure(record):
        return Batch(record, record.job(), int(os.environ["SLURM_JOB_ID"])).train()


class Batch(Program):
    def __init__(self, record: Record, job: Job, job_id: int) -> None:
        super().__init__(record, job)
        self.job_id = job_id
        self.cluster = cluster_of(job, SlurmConfig)
        self.slurm = Slurm()
        self.nodes = list(retry(self.slurm.hostnames, os.environ["SLURM_JOB_NODELIST"]))
        self.steps = 0  # number of srun steps so far, which determines each step's port
        # Whether Slurm is ending the job; it may then start the job again by itself.
        self.is_ending = False

    # ---- training ----

    def train(self) -> int:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.ask)
        name = f"gate_{self.job_id}_{os.environ.get('SLURM_RESTART_COUNT') or 0}"
        decision = self.supervise(self.cluster, name=name)
        if decision.next == REQUEUE and not self.is_ending:
            self.requeue()
        self.upload()
        if decision.next == REQUEUE:  # Slurm itself may start the job again
            return STOPPED
        return CODES[decision.outcome]

    def ask(self, number: int, _frame: FrameType | None) -> None:
        """Ask the run to stop with a checkpoint.

        Slurm sends USR1 before the time limit, and this program then requeues the job. Slurm sends TERM when it ends
        the job for good (scancel) or restarts it (preemption, a lost node). It also sends TERM at the time limit if the
        run has not stopped by then, and does not restart the job.
        """
        if number == signal.SIGUSR1:
            self.stop.ask("the time limit is near")
        else:
            self.is_ending = True
            self.stop.ask("SIGTERM from Slurm")

    def on_nodes(self, command: str, name: str) -> int:
        self.steps += 1
        address = retry(self.slurm.address, self.nodes[0])
        joined = join_flags(self.nodes, address, job=self.job_id, step=self.steps, name=name)
        ends_together = command != "preflight"
        words = [
            f"--immediate={STEP_S}",
            f"--nodes={len(self.nodes)}",
            f"--ntasks={len(self.nodes)}",
            "--ntasks-per-node=1",
            "--cpu-bind=none",
            f"--nodelist={','.join(self.nodes)}",
            f"--kill-on-bad-exit={int(ends_together)}",
            "--label",
            *self.cluster.container,
            *[self.job.python, "-m", "launch.node", command, self.record.run_dir],
            *joined,
            *self.record.flags(),
        ]
        limit_s = LIMITS_S.get(command, math.inf)
        trains = command == "train"
        code = self.srun(words, limit_s=limit_s, needs_all=trains)
        if code in SIGNALLED and self.stop.reason is None and not trains:
            raise NeverBegan("the preflight was interrupted by a signal")  # no node is at fault
        return code

    def srun(self, words: Sequence[str], *, limit_s: float, needs_all: bool) -> int:
        """Run srun; return its exit code. Raises NeverBegan if no task starts or, with `needs_all`, if not all do."""
        log = self.log()
        if log is not None:
            before = log.stat().st_size
        else:
            before = 0
        process = processes.start(["srun", *words], env=os.environ)
        code = processes.exit_code(process, meanwhile=self.stop.write, limit_s=limit_s)
        if code == 0 or log is None or self.stop.reason is not None:
            return code
        said = log.read_bytes()[before:]
        found = NO_STEP.search(said)
        if found is None and needs_all:
            found = NO_LAUNCH.search(said)
        if found is not None:
            line = printable(found[1].decode(errors="replace"))
            raise NeverBegan(f"Slurm did not start the step: {line}")
        return code

    def requeue(self) -> NoReturn:
        """Ask Slurm to start the job again, and wait until Slurm ends this process. Raises Failure if it does not."""
        # Slurm sends SIGTERM now, and kills this process some time later (KillWait).
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        retry(self.slurm.requeue, self.job_id)
        self.upload()
        time.sleep(REQUEUED_S)
        raise Failure("Slurm was asked to requeue this job, but did not end it")

    # ---- logs ----

    def upload(self) -> None:
        """Upload the output of this job if the record is in S3. Before this, the output is only on this node."""
        path = self.log()
        if self.record.is_remote and path is not None:
            self.record.folder.write(f"logs/job_{self.job_id}.txt", path.read_bytes())

    def log(self) -> Path | None:
        """Return the file with the output of this process and srun; None if the output is not a file."""
        path = Path(f"/proc/{os.getpid()}/fd/1").readlink()
        return path if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
