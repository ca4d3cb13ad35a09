"""Within a Slurm job, on its first node: the gate, then attempts of the run, then a requeue where that helps.

Slurm sends USR1 to this process alone some time before the limit; the run is asked to stop by its file STOP, since
signals end torchrun and orphan its ranks. A requeue is asked for only after srun has ended: it would kill the step.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from launch import processes
from launch.gate import NO_ANSWER, answers
from launch.job import Job
from launch.record import Event, Record
from launch.slurm.commands import Slurm
from launch.slurm.scheduler import settings
from launch.supervise import (
    CODES,
    StopRequest,
    Verdict,
    attempt_name,
    exhausted,
    history_of,
    patiently,
    supervise,
)
from launch.values import texts
from train.cli.command import FAILED, STOPPED, add_s3_flags, command_parser, run_flags
from train.config import Failure, S3Config, check

FIRST_PORT, PORTS = 20_000, 10_000  # below the range from which Linux gives ports to clients
REQUEUED_S = 600.0  # Slurm ends this process much sooner
PAUSE_S = 0.2
SIGNALLED = (128 + signal.SIGTERM, 128 + signal.SIGKILL)  # exit codes of srun


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "launch.slurm.batch",
        "Run a job within Slurm. python -m launch cluster=slurm submits it.",
        examples=("runs/mine",),
    )
    parser.add_argument("run", help="run folder")
    parser.add_argument("--merge", action="store_true", help="of a preparation: write the manifest of all parts")
    add_s3_flags(parser, caches=False)
    return run_flags(parser, arguments, act)


def act(options: argparse.Namespace, s3: S3Config) -> int:
    check("SLURM_JOB_ID" in os.environ, "this is no job of Slurm; submit one with python -m launch cluster=slurm")
    record = Record(options.run, s3)
    job = record.job()
    batch = Batch(record, job, int(os.environ["SLURM_JOB_ID"]))
    return batch.prepare(merge=options.merge) if job.kind == "prepare" else batch.train()


class Batch:
    def __init__(self, record: Record, job: Job, job_id: int) -> None:
        self.record, self.job, self.job_id = record, job, job_id
        self.cluster = settings(job)
        self.slurm = Slurm()
        self.all_nodes = list(self.slurm.hostnames(os.environ["SLURM_JOB_NODELIST"]))
        self.nodes = self.all_nodes[: job.nodes]
        self.stop = StopRequest(record)
        self.is_ending = False  # Slurm ends the job
        self.meetings = 0  # of the nodes' torchruns
        self.excluded: list[str] = []  # nodes that a requeued job shall not get

    def train(self) -> int:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self.ask)
        verdict = self.gate() if self.cluster.gate else None
        if verdict is None:
            verdict = supervise(self.record, self.cluster, self.attempt, nodes=self.nodes, stop=self.stop)
        history = history_of([*patiently(self.record.events), Event("requeued", 0.0, "")])
        if verdict.next == "requeue" and not (self.is_ending or history.is_stop_asked):
            if not (limit := exhausted(history, self.cluster)):
                return self.requeue(verdict)
            verdict = Verdict("end", "failed", f"{limit}; {verdict.reason}")
        if verdict.next == "requeue" and self.is_ending:  # Slurm may start the job again, so that this is no end
            patiently(self.record.note, "interrupted", reason=verdict.reason)
            self.upload()
            return STOPPED
        patiently(self.record.note, "ended", outcome=verdict.outcome, reason=verdict.reason)
        self.upload()
        return CODES[verdict.outcome]

    def ask(self, number: int, _frame: FrameType | None) -> None:
        """Have the run stop with a checkpoint. Slurm sends USR1 before the time limit, after which the job is requeued;
        and TERM when it ends the job: for good (scancel), or to start it again by itself (preemption, a lost node).
        """
        self.is_ending |= number == signal.SIGTERM
        self.stop.ask("the time limit is near" if number == signal.SIGUSR1 else "SIGTERM from Slurm")

    def attempt(self, number: int) -> int:
        return self.on_nodes("train", self.nodes, name=attempt_name(number), ends_together=True)

    def on_nodes(self, verb: str, nodes: Sequence[str], *, name: str, ends_together: bool) -> int:
        """Run a verb of launch.node on nodes, at the same time; srun's exit code."""
        address = self.slurm.address(nodes[0])
        self.meetings += 1
        port = FIRST_PORT + (self.job_id * 101 + self.meetings) % PORTS  # two jobs may share a node
        node = [self.job.python, "-m", "launch.node", verb, self.record.run_dir, f"--hosts={','.join(nodes)}"]
        node += [f"--address={address}", f"--port={port}", f"--attempt={name}", *self.record.s3.flags()]
        size = [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1", "--cpu-bind=none"]
        srun = ["srun", *size, f"--nodelist={','.join(nodes)}", f"--kill-on-bad-exit={int(ends_together)}", "--label"]
        process = processes.start([*srun, *self.container(), *node], env=os.environ)
        return processes.exit_code(process, meanwhile=self.stop.write)

    def container(self) -> list[str]:
        image, mounts = self.cluster.container, self.cluster.container_mounts
        if image is None:
            return []
        if self.cluster.container_runtime == "pyxis":
            bound = ",".join(f"{folder}:{folder}" for folder in mounts)
            return [f"--container-image={image}", *([f"--container-mounts={bound}"] if mounts else [])]
        return ["apptainer", "exec", *(f"--bind={folder}" for folder in mounts), image]

    def gate(self) -> Verdict | None:
        """Examine all nodes and choose those that train; a verdict if there are too few. The others are named."""
        name = f"gate_{self.job_id}_{os.environ.get('SLURM_RESTART_COUNT') or 0}"  # answers of others stay apart
        code = self.on_nodes("gate", self.all_nodes, name=name, ends_together=False)
        if interrupted := self.interrupted(code):
            return interrupted
        failed = patiently(answers, self.record, name, self.all_nodes)
        passed = [node for node in self.all_nodes if node not in failed]
        for node, reason in failed.items():
            print(f"gate: {node} is left out: {reason}", flush=True)
            if self.cluster.drain and not reason.startswith(NO_ANSWER):  # which may be the record's fault
                self.slurm.drain(node, f"baretrain: {reason}")
        patiently(self.record.note, "gate", passed=passed, failed=failed)
        if len(passed) < self.job.nodes:
            counts = f"{len(passed)} of {len(self.all_nodes)} nodes passed the gate, {self.job.nodes} are needed"
            return self.without(failed, counts)
        self.nodes = passed[: self.job.nodes]
        if self.job.nodes * self.job.processes_per_node == 1:
            return None
        code = self.on_nodes("collectives", self.nodes, name=name, ends_together=True)
        if code == 0 or (interrupted := self.interrupted(code)):
            return interrupted
        reason = f"train.doctor --collectives ended with exit code {code}; see logs/{name}"
        patiently(self.record.note, "gate", passed=[], failed=dict.fromkeys(self.nodes, reason))
        return Verdict("end", "failed", reason)

    def interrupted(self, code: int) -> Verdict | None:
        """The verdict if Slurm has interrupted the gate: that says nothing of the nodes."""
        if self.stop.reason is None and code not in SIGNALLED:
            return None
        return Verdict("requeue", "stopped", self.stop.reason or "the gate was interrupted by a signal")

    def without(self, failed: dict[str, str], reason: str) -> Verdict:
        """Try again on other nodes, once for each set of nodes that failed; nodes that fail again end the job."""
        events = patiently(self.record.events)
        first = max((index for index, event in enumerate(events) if event.kind == "submitting"), default=0)
        requeues = [event.details for event in events[first:] if event.kind == "requeued"]
        seen = {name for details in requeues for name in texts(details, "excluded")}
        text = f"{reason}; {'; '.join(f'{node}: {why}' for node, why in failed.items())}"
        if set(failed) <= seen:
            return Verdict("end", "failed", text)
        users = self.slurm.hostnames(self.cluster.exclude) if self.cluster.exclude is not None else ()
        self.excluded = sorted({*failed, *seen, *users})
        return Verdict("requeue", "failed", text)

    def requeue(self, verdict: Verdict) -> int:
        """Ask Slurm to start the job again, which ends this process: at once by SIGTERM, which is ignored here, and
        some time later (KillWait) for good. Meanwhile the job waits, and only then does Slurm take nodes from it.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        patiently(self.slurm.requeue, self.job_id)
        patiently(self.record.note, "requeued", reason=verdict.reason, excluded=self.excluded)
        if self.excluded:
            until = Retrying(
                retry=retry_if_exception_type(Failure),
                stop=stop_after_delay(REQUEUED_S),
                wait=wait_fixed(PAUSE_S),
                reraise=True,
            )
            until(self.slurm.exclude, self.job_id, self.excluded)
        self.upload()
        time.sleep(REQUEUED_S)
        print("Slurm was asked to requeue this job and did not end it", file=sys.stderr)
        return FAILED

    def upload(self) -> None:
        """Put what this job has printed into a record in S3: until then it is on this node."""
        path = Path(f"/proc/{os.getpid()}/fd/1").readlink()
        if self.record.is_remote and path.is_file():
            self.record.folder.write(f"logs/job_{self.job_id}.txt", path.read_bytes())

    def prepare(self, *, merge: bool) -> int:
        part = os.environ.get("SLURM_ARRAY_TASK_ID")
        which = ["--merge"] if merge else [f"--part={part}"] if part else []
        node = [self.job.python, "-m", "launch.node", "prepare", self.record.run_dir, *which, *self.record.s3.flags()]
        code = processes.exit_code(processes.start(["srun", "--ntasks=1", *self.container(), *node], env=os.environ))
        if merge or part is None:
            self.record.note("ended", outcome="failed" if code else "done", reason=f"exit code {code}")
        return code


if __name__ == "__main__":
    sys.exit(main())
