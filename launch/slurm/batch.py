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

from launch.node import LIMITS_S, join_flags
from launch.preflight import is_shared, run_preflight, too_few
from launch.record import Job, Record, add_record_flags, attempt_name
from launch.schedulers import cluster_of
from launch.slurm.client import Slurm
from launch.slurm.config import SlurmConfig
from launch.supervise import (
    CODES,
    Decision,
    NeverBegan,
    StopFile,
    prepared,
    recording_failure,
    retry,
    retrying,
    settled,
    supervise,
)
from train.config import Failure, S3Config, check
from train.machine import processes
from train.machine.console import say
from train.run.command import STOPPED, command_parser, printable, run_flags

REQUEUED_S = 600.0  # how long to wait for Slurm to end this process after a requeue; it usually takes much less
PAUSE_S = 0.2
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
    parser.add_argument(
        "--merge", action="store_true", help="write the manifest of all prepared parts"
    )
    add_record_flags(parser)
    return run_flags(parser, arguments, run_job)


def run_job(options: argparse.Namespace, s3: S3Config) -> int:
    check(
        "SLURM_JOB_ID" in os.environ,
        "this is not a Slurm job; submit one with baretrain launch cluster=slurm",
    )
    record = Record(options.run, s3, options.job_sha256)
    with recording_failure(record):
        batch = Batch(record, record.job(), int(os.environ["SLURM_JOB_ID"]))
        return batch.prepare(merge=options.merge) if batch.job.kind == "prepare" else batch.train()


class Interrupted(Exception):
    """An error raised because Slurm has ended the preflight."""


class Batch:
    def __init__(self, record: Record, job: Job, job_id: int) -> None:
        self.record, self.job, self.job_id = record, job, job_id
        self.cluster, self.slurm, self.stop = (
            cluster_of(job, SlurmConfig),
            Slurm(),
            StopFile(record),
        )
        self.all_nodes = list(retry(self.slurm.hostnames, os.environ["SLURM_JOB_NODELIST"]))
        self.nodes = self.all_nodes[: job.nodes]
        self.is_ending = False  # whether Slurm is ending the job
        # time.monotonic() at the time limit, which is set once the limit is near
        self.limit_s = math.inf
        self.is_overdue = False  # whether the limit was reached before the run had stopped
        self.steps = 0  # number of srun steps so far, which determines each step's port
        self.never_began = False  # whether Slurm failed to start the preflight or a preparation
        self.excluded: list[str] = []  # nodes on which a requeued job must not run

    def train(self) -> int:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.ask)
        decision = self.preflight() if self.cluster.gate else None
        if decision is None:
            decision = supervise(
                self.record, self.cluster, self.attempt, nodes=self.nodes, stop=self.stop
            )
        # if false, Slurm itself may requeue the job
        is_end = decision.next != "requeue" or not self.is_ending
        if is_end:
            decision = self.requeue(decision)
            self.end(decision)
        self.upload()
        return CODES[decision.outcome] if is_end else STOPPED

    def end(self, decision: Decision) -> None:
        retry(self.record.append_event, "ended", outcome=decision.outcome, reason=decision.reason)

    def ask(self, number: int, _frame: FrameType | None) -> None:
        """Ask the run to stop with a checkpoint.

        Slurm sends USR1 before the time limit, and this program then requeues the job. Slurm sends TERM when it ends
        the job for good (scancel) or restarts it (preemption, a lost node). It also sends TERM at the time limit if the
        run has not stopped by then, and does not restart the job.
        """
        now_s = time.monotonic()
        if number == signal.SIGUSR1:
            # the limit may be a minute later (man sbatch, --signal)
            self.limit_s = now_s + self.cluster.stop_before_s
        elif now_s < self.limit_s:
            self.is_ending = True
        else:
            self.is_overdue = True
        self.stop.ask(
            "the time limit is near" if number == signal.SIGUSR1 else "SIGTERM from Slurm"
        )

    def meanwhile(self) -> None:
        """Do the periodic work while srun runs."""
        if self.is_overdue and not retry(self.record.history).is_stop_asked:
            reason = (
                f"the run did not stop in {self.cluster.stop_before_s} s (cluster.stop_before_s)"
            )
            self.end(self.requeue(Decision("requeue", "failed", reason)))
            self.is_overdue = False
        self.stop.write()

    def attempt(self, number: int) -> int:
        return self.on_nodes("train", self.nodes, name=attempt_name(number))

    def srun(
        self, command: Sequence[str], *, limit_s: float = math.inf, needs_all: bool = True
    ) -> int:
        """Run srun; return its exit code. Raises NeverBegan if no task starts or, with `needs_all`, if not all do."""
        log = self.log()
        before = log.stat().st_size if log is not None else 0
        process = processes.start(["srun", *command, *self.record.flags()], env=os.environ)
        code = processes.exit_code(process, meanwhile=self.meanwhile, limit_s=limit_s)
        said = log.read_bytes()[before:] if code and log is not None else b""
        found = NO_STEP.search(said) or (NO_LAUNCH.search(said) if needs_all else None)
        if found and self.stop.reason is None:
            raise NeverBegan(
                f"Slurm did not start the step: {printable(found[1].decode(errors='replace'))}"
            )
        return code

    def on_nodes(self, command: str, nodes: Sequence[str], *, name: str, group: int = 0) -> int:
        """Run a command of launch.node on all `nodes` at the same time; return srun's exit code."""
        addresses = [retry(self.slurm.address, node) for node in (nodes if group else nodes[:1])]
        self.steps += 1
        node = [self.job.python, "-m", "launch.node", command, self.record.run_dir]
        node += join_flags(
            nodes, addresses, job=self.job_id, step=self.steps, name=name, group=group
        )
        ends_together = command != "preflight" and not group
        srun = [
            f"--immediate={STEP_S}",
            f"--nodes={len(nodes)}",
            f"--ntasks={len(nodes)}",
            "--ntasks-per-node=1",
        ]
        srun += [
            "--cpu-bind=none",
            f"--nodelist={','.join(nodes)}",
            f"--kill-on-bad-exit={int(ends_together)}",
        ]
        limit_s = LIMITS_S.get(command, math.inf)
        return self.srun(
            [*srun, "--label", *self.container(), *node],
            limit_s=limit_s,
            needs_all=command == "train",
        )

    def container(self) -> list[str]:
        image, mounts = self.cluster.container, self.cluster.container_mounts
        if image is None:
            return []
        if image.endswith(".sif") or "://" in image:
            return ["apptainer", "exec", *(f"--bind={folder}" for folder in mounts), image]
        bound = ",".join(f"{folder}:{folder}" for folder in mounts)
        return [f"--container-image={image}", *([f"--container-mounts={bound}"] if mounts else [])]

    def preflight(self) -> Decision | None:
        """Examine all nodes and choose those to train on. Returns a decision if too few pass.

        The decision is a requeue on other nodes, unless all nodes failed, or every failed node was already excluded.
        """
        name = f"gate_{self.job_id}_{os.environ.get('SLURM_RESTART_COUNT') or 0}"  # differs for each job and restart
        try:
            chosen, failed = run_preflight(
                self.record, self.job, self.all_nodes, self.examine, name=name
            )
        except Interrupted:  # no node is at fault
            return Decision(
                "requeue",
                "stopped",
                self.stop.reason or "the preflight was interrupted by a signal",
            )
        except NeverBegan as error:  # no node is at fault
            self.never_began = True
            return Decision("requeue", "failed", str(error))
        for node, reason in failed.items():
            say(f"preflight: {node} is left out: {reason}")
        if len(chosen) == self.job.nodes:
            self.nodes = chosen
            return None
        seen, reason = (
            set(retry(self.record.history).excluded),
            too_few(self.all_nodes, failed, self.job),
        )
        if set(failed) <= seen or is_shared(failed, self.all_nodes):
            return Decision("end", "failed", reason)
        self.excluded = sorted({*failed, *seen, *retry(self.slurm.excluded, self.job_id)})
        return Decision("requeue", "failed", reason)

    def examine(self, command: str, nodes: Sequence[str], *, name: str, group: int = 0) -> int:
        """Run a part of the preflight on nodes. Raises Interrupted if Slurm has ended it."""
        code = self.on_nodes(command, nodes, name=name, group=group)
        if self.stop.reason is not None or code in SIGNALLED:
            raise Interrupted
        return code

    def requeue(self, decision: Decision) -> Decision:
        """Ask Slurm to start the job again. Returns a decision if it must not start, or if Slurm ignores the request.

        Slurm sends this process SIGTERM, which is ignored here, and kills it some time later (KillWait). Until then,
        this process tries to exclude nodes, which Slurm accepts only while the requeued job is pending.
        """
        decision = settled(decision, self.record, self.cluster, never_began=self.never_began)
        if decision.next != "requeue":
            return decision
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Record the event first: after the requeue, there may be no time.
        details = {"excluded": self.excluded, "never_began": self.never_began}
        retry(self.record.append_event, "requeued", reason=decision.reason, **details)
        retry(self.slurm.requeue, self.job_id)
        if self.excluded:
            retrying(Failure, REQUEUED_S, PAUSE_S)(self.slurm.exclude, self.job_id, self.excluded)
        self.upload()
        time.sleep(REQUEUED_S)
        return Decision("end", "failed", "Slurm was asked to requeue this job, but did not end it")

    def upload(self) -> None:
        """Upload the output of this job if the record is in S3. Before this, the output is only on this node."""
        path = self.log()
        if self.record.is_remote and path is not None:
            self.record.folder.write(f"logs/job_{self.job_id}.txt", path.read_bytes())

    def log(self) -> Path | None:
        """Return the file with the output of this process and srun; None if the output is not a file."""
        path = Path(f"/proc/{os.getpid()}/fd/1").readlink()
        return path if path.is_file() else None

    def prepare(self, *, merge: bool) -> int:
        part = os.environ.get("SLURM_ARRAY_TASK_ID")
        which = ["--merge"] if merge else [f"--part={part}"] if part else []
        node = [self.job.python, "-m", "launch.node", "prepare", self.record.run_dir, *which]
        try:
            code = self.srun(["--ntasks=1", *self.container(), *node])
        except NeverBegan as error:
            self.never_began = True
            decision = self.requeue(Decision("requeue", "failed", str(error)))
            self.end(decision)
            return CODES[decision.outcome]
        if code or merge or part is None:  # if one part fails, Slurm does not start the merge
            self.end(
                prepared(
                    code, f"part {part}" if part else "the merge" if merge else "the preparation"
                )
            )
        self.upload()
        return code


if __name__ == "__main__":
    sys.exit(main())
