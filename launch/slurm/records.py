"""What Slurm says of jobs and partitions, read from the output of its commands.

Jobs are asked for in columns, and never with their name or comment, to which their owner could give any form. The JSON
of `squeue --json` has a schema for each release (data_parser in Slurm's documentation); columns need one parser.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from train.storage.schema import BadContent, shown

OVER = frozenset(  # states from which a job does not come back by itself
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    )
)
HOST = r"[A-Za-z0-9][A-Za-z0-9._-]*"
UNKNOWN = ("", "(null)", "N/A", "NONE", "None", "None assigned", "Unknown")

Expand = Callable[[str], tuple[str, ...]]  # "n[1-2]" -> ("n1", "n2")


@dataclass(frozen=True)
class Job:
    """A job, or one task of a job array."""

    job_id: int
    state: str  # as Slurm names it: PENDING, RUNNING, COMPLETED, ...
    reason: str  # why it waits, or why it failed; "" none
    nodes: tuple[str, ...]  # that it has or had last, by name
    array_task: str | None = None  # number of the task; "4-9" for those that have not begun

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True)
class Partition:
    name: str
    num_nodes: int
    max_nodes: int | None  # of one job; None: no limit
    max_time_s: float | None  # of one job; None: no limit
    is_default: bool


# ---- jobs ------------------------------------------------------------------------------------------------------------

SQUEUE = "%A|%i|%T|%r|%N"  # of squeue --format
SACCT = "JobIDRaw,JobID,State,Reason,NodeList"  # of sacct --format: the same columns
JOB_LINE = re.compile(
    r"(?P<job_id>\d{1,10})\|(?P<array_id>\d{1,10})(?:_\[?(?P<task>[\d,:%.-]+)\]?)?\|(?P<state>[A-Z_]+)[^|]*\|"
    r"(?P<reason>[^|]*)\|(?P<nodes>[^|]*)",
    re.ASCII,
)


def read_jobs(text: str, job_id: int, expand: Expand) -> list[Job]:
    """The job, or all tasks of the job array, from lines in these columns. sacct has a line for each time that a job
    was started: the last counts. BadContent for anything else.
    """
    jobs: dict[int, Job] = {}
    for line in text.splitlines():
        match = JOB_LINE.fullmatch(line)
        if match is None or job_id not in (int(match["job_id"]), int(match["array_id"])):
            raise BadContent(f"what Slurm shows of job {job_id} cannot be read: {shown(line)}")
        reason = "" if match["reason"] in UNKNOWN else match["reason"]
        nodes = () if match["nodes"] in UNKNOWN else expand(match["nodes"])
        task = (match["task"] or "").partition("%")[0] or None
        jobs[int(match["job_id"])] = Job(int(match["job_id"]), match["state"], reason, nodes, task)
    return list(jobs.values())


# ---- partitions ------------------------------------------------------------------------------------------------------


def read_partitions(text: str) -> list[Partition]:
    """The partitions of which `scontrol --oneliner show partition` prints this."""
    return [read_partition(line) for line in text.splitlines() if line.strip()]


def read_partition(line: str) -> Partition:
    said = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
    try:
        return Partition(
            name=said["PartitionName"],
            num_nodes=int(said["TotalNodes"]),
            max_nodes=None if said["MaxNodes"] == "UNLIMITED" else int(said["MaxNodes"]),
            max_time_s=duration_s(said["MaxTime"]),
            is_default=said["Default"] == "YES",
        )
    except (KeyError, ValueError) as error:
        raise BadContent(f"what scontrol shows of a partition cannot be read: {shown(line)}") from error


def duration_s(text: str) -> float | None:
    """Seconds of [days-]hours:minutes:seconds or minutes:seconds; None for no limit of its own."""
    if text in ("UNLIMITED", "INFINITE", "Partition_Limit", ""):
        return None
    match = re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,4}):)?(\d{1,4}):(\d{1,4})", text, re.ASCII)
    if match is None:
        raise BadContent(f"{shown(text)} is not a duration of Slurm, such as 1-00:00:00")
    days, hours, minutes, seconds = (int(number or 0) for number in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def check_hosts(names: list[str]) -> tuple[str, ...]:
    """The names, each of which is a host's. BadContent for another one."""
    for name in names:
        if not re.fullmatch(HOST, name):
            raise BadContent(f"{shown(name)} is not the name of a host")
    return tuple(names)
