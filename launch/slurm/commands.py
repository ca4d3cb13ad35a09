"""Slurm's commands. They are run without a shell, and none needs an accounting database.

All raise InputError for what the user has to fix, Unreachable where slurmctld does not answer, and Failure where Slurm
refuses for another reason.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.slurm.records import HOST, SACCT, SQUEUE, Job, Partition, check_hosts, read_jobs, read_partitions
from train.cli.command import printable
from train.config import Failure, InputError, Unreachable, check
from train.storage.schema import shown

NAME = r"[A-Za-z0-9._-]{1,64}"
NO_JOB = "Invalid job id specified"
# Variables that lead to the cluster. The others of Slurm are those of the job in which we may run, or options that no
# plan has shown: SBATCH_WAIT waits for the end of the job, SBATCH_ARRAY_INX submits many.
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
READING = {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}  # lists in full

SILENT = re.compile(
    "Unable to contact|Socket timed out|Connection (refused|timed out|reset)|No route to host|standby mode"
    "|Zero Bytes were transmitted|temporarily unable|communication (failure|connection)",
    re.IGNORECASE,
)
UNCONFIGURED = re.compile("configuration (source|file)|cannot stat file")
CURES = (  # what sbatch says -> what to do; the first that fits
    ("partition", "`sinfo --summarize` shows the partitions"),
    ("account", "`sacctmgr show associations user=$USER` shows your accounts"),
    ("qos", "`sacctmgr show associations user=$USER format=account,qos` shows what you may use"),
    ("reservation", "`scontrol show reservations` shows those there are"),
    ("feature", "`sinfo --format='%N %f'` shows the nodes' features"),
    ("gres", "`sinfo --format='%N %G'` shows what the nodes have"),
    ("node (configuration|name|count)", "`sinfo --Node --long` shows the nodes; ask for fewer, or for less of each"),
    ("job array", "`scontrol show config | grep MaxArraySize` shows how many; ask for fewer parts"),
    ("time limit", "`sinfo --format='%P %l'` shows the limits"),
    ("dependency", "the job to wait for must be known to Slurm"),
)


class NoSlurm(InputError):
    """This machine belongs to no Slurm cluster."""


@dataclass(frozen=True)
class Slurm:
    """The cluster that SLURM_CONF, or this machine's configuration, leads to."""

    timeout_s: float = 60.0  # for one command: they may wait for minutes for a slurmctld that is away

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def submit(self, options: Sequence[str], script: Path, arguments: Sequence[str] = ()) -> int:
        """Submit a job and return its id. The options are sbatch's; --export is none of them, since it splits values
        at commas.
        """
        out, _ = self.sbatch(["--parsable", *options], script, arguments)
        job_id = out.strip().partition(";")[0]  # the cluster's name may follow
        if not re.fullmatch(r"[1-9]\d{0,9}", job_id, re.ASCII):
            raise Failure(
                f"sbatch printed {shown(out)}, which is no job id; `squeue --me` shows whether there is a job"
            )
        return int(job_id)

    def estimate(self, options: Sequence[str], script: Path, arguments: Sequence[str] = ()) -> str:
        """When and where Slurm expects the job to start: "to start at 2026-11-22T17:50:11 using 2 processors on nodes
        n[1-2] in partition main". Nothing is submitted. Refused is what `submit` refuses, but not all of it.
        """
        out, said = self.sbatch(["--test-only", *options], script, arguments)
        return re.sub(r"^Job \d+ ", "", one_line(said or out))

    def sbatch(self, options: Sequence[str], script: Path, arguments: Sequence[str]) -> tuple[str, str]:
        check(not any(option.startswith("--export") for option in options), "sbatch --export splits values at commas")
        command = ["sbatch", *options, "--", str(script.absolute()), *arguments]
        check(not any("\0" in part for part in command), f"{shown(command)} has a zero byte, which no command takes")
        try:
            code, out, said = self.ask(*command)
        except Unreachable as error:
            raise Unreachable(f"{error}; `squeue --me` shows whether the job was submitted all the same") from error
        if code:
            raise InputError(refusal(said or out))
        return out, said

    def tasks(self, job_id: int) -> list[Job]:
        """The tasks of a job array, where those that wait are one; or the job. [] if Slurm has forgotten it, as some
        minutes after its end (MinJobAge) without accounting.
        """
        queued = ("--noheader", "--states=all", f"--jobs={job_id}", f"--format={SQUEUE}")
        code, out, said = self.ask("squeue", *queued, reads=True)
        if code == 0 and out.strip():
            return read_jobs(out, job_id, self.hostnames)
        if code and NO_JOB not in said + out:
            raise Failure(f"squeue does not show job {job_id}: {one_line(said or out)}")
        ended = ("--allocations", "--duplicates", "--noheader", "--parsable2", f"--format={SACCT}")
        code, out, said = self.ask("sacct", f"--jobs={job_id}", *ended, reads=True)
        if "accounting storage is disabled" in said:
            return []
        if code:
            raise Unreachable(f"Slurm has no job {job_id} now, and its accounting does not answer: {one_line(said)}")
        return read_jobs(out, job_id, self.hostnames)

    def job_ids(self, name: str) -> list[int]:
        """The user's jobs of this name that wait or run. An array counts once."""
        check_name(name)
        out = self.answer("squeue", "--noheader", "--me", f"--name={name}", "--format=%F", reads=True)
        return sorted({int(word) for word in out.split() if word.isdecimal()})

    def cancel(self, job_id: int) -> None:
        """End a job. Nothing happens if it is over, or if Slurm has forgotten it."""
        self.answer("scancel", str(job_id))

    def requeue(self, job_id: int) -> None:
        """Put a job back into the queue. One that runs is ended at once, so srun has to have ended before. One that is
        over starts again. It waits for some two minutes (cred_expire).
        """
        self.answer("scontrol", "requeue", str(job_id))

    def exclude(self, job_id: int, nodes: Sequence[str]) -> None:
        """Keep a job that waits from these nodes, and from no others. Slurm refuses it while the job runs, so a job
        is requeued first.
        """
        self.answer("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(check_hosts(list(nodes)))}")

    # ---- nodes and partitions --------------------------------------------------------------------------------------

    def drain(self, node: str, reason: str) -> None:
        """Keep all new jobs from a node until an administrator resumes it. Only Slurm's operators may."""
        check_hosts([node])
        self.answer("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={printable(reason)[:200]}")

    def hostnames(self, hosts: str) -> tuple[str, ...]:
        """The names that a list such as "n[1-2],x7" stands for."""
        if re.fullmatch(HOST, hosts):
            return (hosts,)
        check(bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._,\[\]-]*", hosts)), f"{shown(hosts)} is not a list of hosts")
        return check_hosts(self.answer("scontrol", "show", "hostnames", hosts, reads=True).split())

    def address(self, node: str) -> str:
        """The address at which the other nodes reach this one: what the site has given Slurm (NodeAddr)."""
        check_hosts([node])
        text = self.answer("scontrol", "--oneliner", "show", "node", node, reads=True)
        matches = re.findall(r" NodeAddr=(\S+)", text)
        if len(matches) != 1 or not re.fullmatch(rf"{HOST}|[0-9a-fA-F:.]+", matches[0]):
            raise Failure(f"scontrol shows no address of node {node}: {one_line(text)[:80]}")
        return str(matches[0])

    def partitions(self) -> list[Partition]:
        return read_partitions(self.answer("scontrol", "--oneliner", "show", "partition", reads=True))

    def partition(self, name: str | None = None) -> Partition:
        """The partition of this name; None: the one of jobs that name none."""
        partitions = self.partitions()
        known = ", ".join(partition.name for partition in partitions) or "none"
        for partition in partitions:
            if partition.name == name or (name is None and partition.is_default):
                return partition
        if name is None:
            raise InputError(f"this cluster has no default partition; name one of: {known}")
        raise InputError(f"there is no partition {shown(name)}; choose one of: {known}")

    # ---- commands --------------------------------------------------------------------------------------------------

    def answer(self, *command: str, reads: bool = False) -> str:
        """What a command prints. Failure with what Slurm says if it fails."""
        code, out, said = self.ask(*command, reads=reads)
        if code:
            cure = "; only Slurm's operators may do this" if "permission" in said else ""
            raise Failure(f"{' '.join(command[:2])} failed: {one_line(said or out)}{cure}")
        return out

    def ask(self, *command: str, reads: bool = False) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of a command; `reads`: its output is to be read here."""
        environ = {name: value for name, value in os.environ.items() if is_kept(name)} | (READING if reads else {})
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                env=environ,
                check=False,
                timeout=self.timeout_s,
            )
        except FileNotFoundError as error:
            raise NoSlurm(
                f"{command[0]} is not on the PATH; start this on a login node of the cluster (`module load slurm`, "
                "perhaps), or choose another way to launch"
            ) from error
        except subprocess.TimeoutExpired as error:
            said = (error.stderr or b"").decode(errors="replace")
            check_configured(said)
            raise Unreachable(f"{command[0]} gave no answer in {self.timeout_s:g} s; {asked(said)}") from error
        if done.returncode:
            check_configured(done.stderr)
            if SILENT.search(done.stderr + done.stdout):
                raise Unreachable(f"slurmctld does not answer {command[0]}; {asked(done.stderr or done.stdout)}")
        return done.returncode, done.stdout, done.stderr


def check_request(
    partition: Partition, *, nodes: int, time_limit_s: float | None, others: Sequence[Partition] = ()
) -> None:
    """Raise InputError for more nodes or a longer time than the partition has, naming those of `others` that have it.
    Slurm accepts such jobs, and they wait for ever.
    """
    most = most_nodes(partition)
    if nodes > most:
        fits = [other.name for other in others if most_nodes(other) >= nodes]
        raise InputError(
            f"nodes={nodes} is more than a job in partition {partition.name} can have; ask for at most {most}"
            f"{instead(fits)}"
        )
    if not fits_time(partition, time_limit_s):
        fits = [other.name for other in others if fits_time(other, time_limit_s)]
        wanted = "no time limit" if time_limit_s is None else f"a time limit of {clock(time_limit_s)}"
        raise InputError(
            f"{wanted} is more than the {clock(partition.max_time_s or 0)} of partition {partition.name}; ask for "
            f"at most that, and go on in further jobs{instead(fits)}"
        )


def most_nodes(partition: Partition) -> int:
    return min(partition.num_nodes, partition.num_nodes if partition.max_nodes is None else partition.max_nodes)


def fits_time(partition: Partition, time_limit_s: float | None) -> bool:
    return partition.max_time_s is None or (time_limit_s is not None and time_limit_s <= partition.max_time_s)


def instead(partitions: Sequence[str]) -> str:
    return f", or choose partition {' or '.join(partitions)}" if partitions else ""


def clock(seconds: float) -> str:
    """A duration as Slurm writes it: 1-00:00:00."""
    minutes, second = divmod(round(seconds), 60)
    days, hours = divmod(minutes // 60, 24)
    return f"{days}-{hours:02}:{minutes % 60:02}:{second:02}"


def check_name(name: str) -> None:
    """Raise InputError unless a job can have this name."""
    check(
        bool(re.fullmatch(NAME, name)),
        f"{shown(name)} is not a job name; letters, digits and . _ - make one, at most 64",
    )


def job_name(run_dir: str) -> str:
    """A name for the job of a run, which no run in another folder has, so that jobs of one name can exclude each other:
    the last part of the folder's path with other characters as "_", and eight digits that stand for the whole path.
    """
    path = run_dir.rstrip("/")
    last = re.sub(r"[^A-Za-z0-9._-]", "_", path.rpartition("/")[2])[:55] or "run"
    return f"{last}-{hashlib.sha256(path.encode(errors='surrogatepass')).hexdigest()[:8]}"


def is_kept(variable: str) -> bool:
    return variable in KEPT or not variable.startswith(("SLURM_", "SBATCH_", "SCANCEL_", "SQUEUE_", "SACCT_"))


def refusal(said: str) -> str:
    line = one_line(said)
    cure = next((cure for pattern, cure in CURES if re.search(pattern, line, re.IGNORECASE)), None)
    return f"Slurm refuses the job: {line}{f'; {cure}' if cure else ''}"


def check_configured(said: str) -> None:
    """Raise NoSlurm if a command says that it has no slurm.conf."""
    if UNCONFIGURED.search(said):
        source = f"SLURM_CONF={os.environ['SLURM_CONF']}" if "SLURM_CONF" in os.environ else "no SLURM_CONF is set"
        raise NoSlurm(
            f"this machine has no configuration of Slurm ({printable(source)}); start this on a login node of the "
            "cluster"
        )


def asked(said: str) -> str:
    quoted = f"it said: {one_line(said)}; " if said.strip() else ""
    return f"{quoted}`scontrol ping` shows whether it is up"


def one_line(said: str) -> str:
    """What a command of Slurm said, without the names it puts before, each sentence once."""
    lines = [re.sub(r"^\w+: (?:(?:error|fatal): )?", "", line.strip()) for line in said.splitlines()]
    lines = [re.sub(r"^(Batch job submission failed|allocation failure): ", "", line) for line in lines]
    return printable("; ".join(dict.fromkeys(line for line in lines if line)))[:400] or "nothing"
