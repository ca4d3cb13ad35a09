"""Jobs on this machine, each run by a background supervisor that survives the terminal and ends with the run."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from launch import spec
from launch.config import LaunchConfig
from launch.launched import launched_as
from launch.program import Program
from launch.record import END, Job, Record, add_record_flags
from launch.schedulers import cluster_of
from launch.spec import Handle, State
from launch.supervise import CODES, Decision, conclude, recording_failure
from launch.values import count
from train.config import Unreachable, check
from train.machine import processes
from train.machine.console import say
from train.machine.memory import usable_cpus
from train.machine.processes import is_alive, read_process
from train.run.command import DONE, FAILED, command_parser, run_flags

ORPHANS_S = 600.0  # time for ranks to save and end after their torchrun is killed


class Scheduler(spec.Scheduler):
    def request(self, job: Job, record: Record) -> list[str]:
        return command_of(job, record)

    def preview(self, job: Job, record: Record, cfg: LaunchConfig, hours: float | None) -> str:
        return f"this machine, {platform.node()}: {usable_cpus()} CPUs"

    def submit(self, job: Job, record: Record) -> Handle:
        logs = record.local_folder() / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "job.txt").open("ab") as output:
            process = subprocess.Popen(
                command_of(job, record),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=job.folder,
                start_new_session=True,  # Ctrl-C in the terminal must not reach the supervisor
            )
        seen = read_process(process.pid)
        started = seen.started if seen else 0
        return {"host": platform.node(), "pid": process.pid, "started": started}

    def attend(self, job: Job, record: Record, handle: Handle, *, detach: bool) -> int:
        """Show the logs until the job ends. Ctrl-C asks the run to save and stop; a second Ctrl-C cancels the job."""
        from launch import commands, logs  # imported here, since the supervisor needs neither

        if detach:
            return DONE
        for command in (["stop"], ["cancel", "--yes"]):
            try:
                logs.follow(record, 0)
                break
            except KeyboardInterrupt:
                commands.main([*command, record.run_dir, *record.s3.flags()])
        ended = record.history().ended
        said = "the job ended and recorded no reason"
        code = FAILED
        if ended is not None:
            said = f"{ended.outcome}, {ended.reason}"
            code = CODES.get(ended.outcome, FAILED)
        say(f"{record.run_dir}: {said}; baretrain launch status {record.run_dir} shows more")
        return code

    def state(self, record: Record, handle: Handle) -> State:
        host = handle.get("host")
        pid = count(handle, "pid") or 0
        check(pid > 1, f"the record names no process: {handle.get('pid')!r}")
        if host != platform.node():
            raise Unreachable(
                f"the job runs on {host}, but this is {platform.node()}: run the command there; if that machine is "
                "gone, remove the record (the folder RUN.launch) and launch the run again"
            )
        if is_alive(pid, count(handle, "started")) and is_supervisor(pid, record):
            return State(True, f"process {pid} on {host}", [str(host)])
        return State(False, "the supervisor has ended")

    def cancel(self, record: Record, handle: Handle) -> None:
        if self.state(record, handle).is_active:
            pid = int(handle["pid"])
            # torchrun puts ranks into separate sessions.
            processes.kill([pid, *processes.descendants(pid)])


def is_supervisor(pid: int, record: Record) -> bool:
    """Return whether a process is this user's supervisor of the run: others may have written the handle."""
    process = Path("/proc", str(pid))
    try:
        is_own = process.stat().st_uid == os.geteuid()
        words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")]
    except OSError:
        return False
    return is_own and words[1:4] == ["-m", "launch.local", launched_as(record)]


def command_of(job: Job, record: Record) -> list[str]:
    """Return the command of the process that runs a job."""
    return [job.python, "-m", "launch.local", job.run_dir, *record.flags()]


# ---- the supervisor --------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    purpose = (
        "Supervise a job on this machine. baretrain launch cluster=local starts this program."
    )
    parser = command_parser("launch.local", purpose, examples=("runs/mine",))
    parser.add_argument("run", help="run folder")
    add_record_flags(parser)
    return run_flags(
        parser, arguments, lambda options, s3: run_job(Record(options.run, s3, options.job_sha256))
    )


def run_job(record: Record) -> int:
    job = record.job()
    with recording_failure(record):
        supervisor = Supervisor(record, job)
        decision = supervisor.supervise(cluster_of(job), name=f"gate_{os.getpid()}")
        if decision.next != END:  # nobody requeues a job on this machine
            conclude(record, Decision(END, decision.outcome, decision.reason))
    return CODES[decision.outcome]


class Supervisor(Program):
    def __init__(self, record: Record, job: Job) -> None:
        super().__init__(record, job)
        self.nodes = [platform.node()]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.ask)

    def ask(self, number: int, _: FrameType | None) -> None:
        self.stop.ask(f"{signal.Signals(number).name} to the supervisor")

    def on_nodes(self, command: str, name: str) -> int:
        processes.adopt_orphans()
        words = [self.job.python, "-m", "launch.node", command, self.record.run_dir]
        words += [f"--attempt={name}", *self.record.flags()]
        process = processes.start(words, env=os.environ)
        code = processes.exit_code(process, meanwhile=self.stop.write)
        processes.end_orphans(ORPHANS_S)
        return code


if __name__ == "__main__":
    sys.exit(main())
