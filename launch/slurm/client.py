"""Slurm's commands, run without a shell, and the parsing of their output. None needs Slurm's accounting.

The methods raise InputError if the user has to fix something, Unreachable if slurmctld does not answer, and Failure if
Slurm rejects a request for another reason. Jobs are listed in columns, which are the same in all releases, unlike the
schema of `squeue --json`. Names and comments of jobs are not listed, since they may contain a column separator.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from train.config import Failure, InputError, Unreachable, check
from train.run.command import printable
from train.storage.schema import BadContent, shown

# The variables in KEPT name the cluster. All others of Slurm are hidden from its commands: they are about a surrounding
# job or set options that the plan does not show (SBATCH_WAIT waits for the job's end, SBATCH_ARRAY_INX makes an array).
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
OWN = ("SLURM_", "SBATCH_", "SCANCEL_", "SQUEUE_", "SACCT_", "SINFO_")
# 0 shows full lists; not set for sbatch: its job would inherit both
READING = {
    "LC_ALL": "C",
    "SLURM_BITSTR_LEN": "0",
}

SILENT = re.compile(
    "Unable to contact|Socket timed out|Connection (refused|timed out|reset)|No route to host|standby mode"
    "|Zero Bytes were transmitted|temporarily unable|communication (failure|connection)",
    re.IGNORECASE,
)
UNCONFIGURED = re.compile("configuration (source|file)|cannot stat file")
CURE = (
    "`sinfo --summarize` shows the partitions, `sinfo --Node --long` the nodes, and `sacctmgr show associations "
    "user=$USER` your accounts"
)
COMMAND_S = 60.0  # time limit of a command, which may wait for minutes if slurmctld is down
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"
OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"),
)
UNKNOWN = ("", "(null)", "N/A", "NONE", "None", "None assigned", "Unknown")
SQUEUE = "%i|%T|%r|%N"  # the columns, for squeue --format
JOB_LINE = re.compile(
    r"(?P<job_id>\d{1,10})\|(?P<state>[A-Z_]+)[^|]*\|(?P<reason>[^|]*)\|(?P<nodes>[^|]*)\n",
    re.ASCII,
)


class NoSlurm(InputError):
    """An error raised because this machine belongs to no Slurm cluster."""


@dataclass(frozen=True)
class SlurmJob:
    state: str  # Slurm's name: PENDING, RUNNING, COMPLETED, ...
    reason: str  # why the job waits, or why it failed; may be empty
    nodes: tuple[str, ...]  # names of the nodes on which it runs, or ran last

    @property
    def is_over(self) -> bool:
        """True if the job has ended and does not restart by itself."""
        return self.state in OVER


def read_job(text: str, job_id: int, expand: Callable[[str], tuple[str, ...]]) -> SlurmJob:
    """Return the job from squeue's line with the columns SQUEUE.

    `expand` returns the names in a host list. Raises BadContent if the line is damaged or about another job.
    """
    match = JOB_LINE.fullmatch(text)
    if match is None or job_id != int(match["job_id"]):
        raise BadContent(f"Slurm's line about job {job_id} cannot be read: {shown(text)}")
    reason = match["reason"]
    if reason in UNKNOWN:
        reason = ""
    nodes: tuple[str, ...] = ()
    if match["nodes"] not in UNKNOWN:
        nodes = expand(match["nodes"])
    return SlurmJob(match["state"], reason, nodes)


class Slurm:
    """The cluster that SLURM_CONF or this machine's configuration names."""

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, words: Sequence[str]) -> int:
        """Submit a job with arguments of sbatch; return its id."""
        out, _ = self.sbatch("--parsable", *words)
        # Some sites print extra lines before the id; the cluster's name may follow it.
        last = out.strip().rpartition("\n")[2]
        job_id = last.strip().partition(";")[0]
        if not re.fullmatch(r"[1-9]\d{0,9}", job_id, re.ASCII):
            raise Failure(
                f"sbatch printed {shown(out)}, which does not end in a job id; `squeue --me` shows your jobs"
            )
        return int(job_id)

    def estimate(self, words: Sequence[str]) -> str:
        """Return when and where Slurm expects the job to start. Nothing is submitted.

        Slurm may accept a job here that it rejects in `submit`.
        """
        out, said = self.sbatch("--test-only", *words)
        return re.sub(r"^Job \d+ ", "", one_line(said or out))

    def sbatch(self, *words: str) -> tuple[str, str]:
        try:
            code, out, said = self.run("sbatch", *words)
        except Unreachable as error:
            raise Unreachable(
                f"{error}; `squeue --me` shows whether the job was submitted anyway"
            ) from error
        check(code == 0, f"Slurm rejects the job: {one_line(said or out)}; {CURE}")
        return out, said

    def job(self, job_id: int, name: str) -> SlurmJob | None:
        """Return a job; None if it has another name, or if Slurm has forgotten it some minutes after its end."""
        queued = (
            "--noheader",
            "--states=all",
            f"--jobs={job_id}",
            f"--name={name}",
            f"--format={SQUEUE}",
        )
        code, out, said = self.run("squeue", *queued)
        if "Invalid job id specified" in said + out:
            return None
        if code:
            raise Failure(f"squeue does not show job {job_id}: {one_line(said or out)}")
        if not out:
            return None
        return read_job(out, job_id, self.hostnames)

    def job_ids(self, name: str) -> list[int]:
        """Return the ids of the user's waiting and running jobs with this name."""
        out = self.answer("squeue", "--noheader", "--me", f"--name={name}", "--format=%i")
        return sorted({int(word) for word in out.split() if word.isdecimal()})

    def cancel(self, job_id: int) -> None:
        """End a job. Nothing happens if it has already ended, or if Slurm has forgotten it."""
        self.answer("scancel", str(job_id))

    def requeue(self, job_id: int) -> None:
        """Put a job back into the queue. A running job is killed, so its srun must have ended first."""
        # A job that has ended starts again after about two minutes (cred_expire).
        self.answer("scontrol", "requeue", str(job_id))

    # ---- nodes and partitions --------------------------------------------------------------------------------------

    def hostnames(self, hosts: str) -> tuple[str, ...]:
        """Return the names that a list such as "n[1-2],x7" stands for."""
        if re.fullmatch(HOST, hosts):
            return (hosts,)
        check(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*", hosts)),
            f"{shown(hosts)} is not a host list",
        )
        names = self.answer("scontrol", "show", "hostnames", hosts).split()
        for name in names:
            if not re.fullmatch(HOST, name):
                raise BadContent(f"{shown(name)} is not a host name")
        return tuple(names)

    def address(self, node: str) -> str:
        """Return the address at which other nodes reach a node. The site configures it in Slurm (NodeAddr)."""
        said = self.answer(
            "sinfo", "--all", "--noheader", "--Node", f"--nodes={node}", "--format=%o"
        ).split()
        # one line for each partition
        if len(set(said)) != 1 or not re.fullmatch(rf"{HOST}|[0-9a-fA-F:.]+", said[0]):
            raise Failure(f"sinfo shows no address of node {node}: {shown(said)}")
        return said[0]

    # ---- commands --------------------------------------------------------------------------------------------------

    def answer(self, *command: str) -> str:
        """Return the output of a command. Raises Failure with Slurm's message if it fails."""
        code, out, said = self.run(*command)
        if code:
            raise Failure(f"{' '.join(command[:2])} failed: {one_line(said or out)}")
        return out

    def run(self, *command: str) -> tuple[int, str, str]:
        """Run a command; return its exit code, standard output and standard error."""
        code: int | None = None  # if it hangs
        out = ""
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                env=environment(command[0]),
                check=False,
                timeout=COMMAND_S,
            )
            code = done.returncode
            out = done.stdout.decode(errors="replace")
            said = done.stderr.decode(errors="replace")
        except FileNotFoundError as error:
            raise NoSlurm(
                f"{command[0]} is not on the PATH; start this on a login node of the cluster (it may need `module load "
                "slurm`), or choose another cluster=..."
            ) from error
        except subprocess.TimeoutExpired as error:
            said = (error.stderr or b"").decode(errors="replace")
        if code != 0 and UNCONFIGURED.search(said):
            raise NoSlurm(
                f"this machine has no Slurm configuration: {one_line(said)}; start this on a login node of the cluster"
            )
        if code is None or (code and SILENT.search(said + out)):
            if said or out:
                heard = f"it said: {one_line(said or out)}; "
            else:
                heard = ""
            raise Unreachable(
                f"slurmctld does not answer {command[0]}; {heard}`scontrol ping` shows whether it is up"
            )
        return code, out, said


def environment(command: str) -> dict[str, str]:
    """Return the environment in which a command of Slurm runs."""
    environ = {}
    for name, value in os.environ.items():
        if name in KEPT or not name.startswith(OWN):
            environ[name] = value
    if command != "sbatch":
        environ |= READING
    return environ


def one_line(said: str) -> str:
    """Return a Slurm command's message as one line, without the prefixes of its lines and without repetitions."""
    lines = []
    for line in said.splitlines():
        text = re.sub(r"^\w+: (?:(?:error|fatal): )?", "", line.strip())
        text = re.sub(r"^(Batch job submission failed|allocation failure): ", "", text)
        if text and text not in lines:
            lines.append(text)
    return printable("; ".join(lines))[:400] or "nothing"
