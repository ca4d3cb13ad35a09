"""What Slurm says of jobs and partitions, read from the output of its commands.

A job's name and comment are printed as their owner gave them, with line breaks and all, so that they can imitate any
other line. What is there more often than it can be is therefore refused: the true line is among them.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from train.storage.untrusted import BadContent, shown

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
    """A job, or one task of a job array. Times are seconds since 1970; None: Slurm does not know yet."""

    job_id: int
    state: str  # as Slurm names it: PENDING, RUNNING, COMPLETED, ...
    restarts: int  # how often it was started again, by Slurm or by a request
    exit_code: int
    exit_signal: int  # that ended it; 0: none
    nodes: tuple[str, ...]  # that it has or had last, by name
    partition: str
    submitted_s: float | None  # a job that was requeued counts as submitted then
    started_s: float | None  # of a job that waits: when Slurm expects to start it
    ended_s: float | None  # of a job that runs: when its time is over
    time_limit_s: float | None  # None: none of its own
    reason: str = ""  # why it waits, or why it failed; "" none
    name: str | None = None  # None: accounting, which is asked for jobs that are long over, was not asked for it
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


# ---- scontrol ------------------------------------------------------------------------------------------------------

NEW_JOB = re.compile(r"^(?=JobId=)", re.MULTILINE)
JOB_LINES = [
    re.compile(pattern, re.MULTILINE | re.ASCII)
    for pattern in (
        (
            r"^JobId=(?P<job_id>\d{1,10}) "
            r"(?:ArrayJobId=(?P<array_id>\d{1,10}) ArrayTaskId=(?P<array_task>[\d,:%.-]+) )?"
            r"(?:\w+=\S* )*?JobName=(?P<name>.*)$"
        ),
        r"^   JobState=(?P<state>[A-Z_]+) Reason=(?P<reason>\S*)",
        r"^   Requeue=\d+ Restarts=(?P<restarts>\d{1,9}) .*?\bExitCode=(?P<exit_code>\d{1,3}):(?P<exit_signal>\d{1,3})",
        r"^   RunTime=\S+ TimeLimit=(?P<time_limit>\S+)",
        r"^   SubmitTime=(?P<submitted>\S+)",
        r"^   StartTime=(?P<started>\S+) EndTime=(?P<ended>\S+)",
        r"^   Partition=(?P<partition>\S+)",
        r"^   NodeList=(?P<nodes>\S*)",
    )
]


def read_jobs(text: str, job_id: int, expand: Expand) -> list[Job]:
    """The job, or all tasks of the job array, of which `scontrol show job` prints this."""
    jobs = [read_job(record, job_id, expand) for record in NEW_JOB.split(text) if record.strip()]
    are_tasks = all(job.array_task is not None for job in jobs) and len({job.job_id for job in jobs}) == len(jobs)
    if len(jobs) != 1 and not (jobs and are_tasks):
        raise BadContent(f"what scontrol shows of job {job_id} are {len(jobs)} jobs, not 1")
    return jobs


def read_job(text: str, job_id: int, expand: Expand) -> Job:
    said: dict[str, str] = {}
    for line in JOB_LINES:
        matches = list(line.finditer(text))
        if len(matches) != 1:
            raise BadContent(
                f"what scontrol shows of job {job_id} cannot be read: {len(matches)} of its lines are as "
                f"{line.pattern[:20]}, not 1; no job of this program has several lines in its name or comment"
            )
        said |= {name: value or "" for name, value in matches[0].groupdict().items()}
    if job_id not in (int(said["job_id"]), int(said["array_id"] or 0)):
        raise BadContent(f"scontrol shows job {said['job_id']} when asked for job {job_id}")
    return Job(name=said["name"], array_task=said["array_task"].partition("%")[0] or None, **common(said, expand))


def common(said: Mapping[str, str], expand: Expand) -> dict[str, Any]:
    """The fields that scontrol and sacct have both."""
    return {
        "job_id": int(said["job_id"]),
        "state": said["state"],
        "reason": "" if said["reason"] in UNKNOWN else said["reason"],
        "restarts": int(said["restarts"]),
        "exit_code": int(said["exit_code"]),
        "exit_signal": int(said["exit_signal"]),
        "nodes": () if said["nodes"] in UNKNOWN else expand(said["nodes"]),
        "partition": said["partition"],
        "submitted_s": unix_time(said["submitted"]),
        "started_s": unix_time(said["started"]),
        "ended_s": unix_time(said["ended"]),
        "time_limit_s": duration_s(said["time_limit"]),
    }


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


# ---- sacct ---------------------------------------------------------------------------------------------------------

ACCOUNTED = "JobIDRaw,JobID,State,Reason,ExitCode,NodeList,Partition,Submit,Start,End,Timelimit"  # none is the user's
ACCOUNTED_LINE = re.compile(
    r"(?P<job_id>\d{1,10})\|(?P<array_id>\d{1,10})(?:_\[?(?P<array_task>[\d,:%.-]+)\]?)?\|(?P<state>[A-Z_]+)[^|]*\|"
    r"(?P<reason>[^|]*)\|(?P<exit_code>\d{1,3}):(?P<exit_signal>\d{1,3})\|(?P<nodes>[^|]*)\|(?P<partition>[^|]*)\|"
    r"(?P<submitted>[^|]*)\|(?P<started>[^|]*)\|(?P<ended>[^|]*)\|(?P<time_limit>[^|]*)",
    re.ASCII,
)


def read_accounted(text: str, job_id: int, expand: Expand) -> list[Job]:
    """The job, or all tasks of the job array, of which `sacct --duplicates --format=ACCOUNTED` prints this.

    There is a line for each time that a job was started. The last is the one that counts.
    """
    starts: dict[int, list[dict[str, str]]] = {}
    for line in text.splitlines():
        match = ACCOUNTED_LINE.fullmatch(line)
        if match is None or job_id not in (int(match["job_id"]), int(match["array_id"])):
            raise BadContent(f"what sacct shows of job {job_id} cannot be read: {shown(line)}")
        starts.setdefault(int(match["job_id"]), []).append({k: v or "" for k, v in match.groupdict().items()})
    return [
        Job(
            array_task=lines[-1]["array_task"].partition("%")[0] or None,
            **common({**lines[-1], "restarts": str(len(lines) - 1)}, expand),
        )
        for lines in starts.values()
    ]


# ---- values --------------------------------------------------------------------------------------------------------


def unix_time(text: str) -> float | None:
    """Seconds since 1970 of a time in UTC; None for one that Slurm does not know."""
    if text in UNKNOWN:
        return None
    try:
        return float(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except ValueError as error:
        raise BadContent(f"{shown(text)} is not a time of Slurm, such as 2026-11-22T17:50:11") from error


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
