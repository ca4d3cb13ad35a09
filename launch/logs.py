"""The logs of a job's supervisor, machines and ranks, shown once or followed as they grow.

logs/job.txt                                        the scheduler's script and the supervisor
logs/attempt_0001/HOST.txt                          torchrun on a machine, and its first rank
logs/attempt_0001/HOST/.../attempt_0/3/stderr.log   a rank, numbered within its machine
log/rank_0003.txt                                   in the run folder: messages of a rank's trainer during all attempts

If the run is in S3, logs of other machines may be missing until an attempt ends. Logs of this machine are read locally.
"""

from __future__ import annotations

import math
import re
import sys
import time
from dataclasses import dataclass

from launch.record import History, Record
from launch.status import ask
from train.config import Unreachable, check
from train.machine.console import say
from train.storage.folders import Folder, LocalFolder
from train.storage.schema import is_path

LINES = 100  # number of lines shown from the end of each file
MAX_BYTES = 2**20  # bytes read from the end of a new file
# seconds between reads of local files, of S3, and of the job's state
POLL_S, POLL_S3_S, ASK_S = (
    1.0,
    5.0,
    10.0,
)
LOGS = "logs/"
OF_NODE = re.compile(r"attempt_(\d{4,9})/([^/]+)\.txt")
OF_RANK = re.compile(
    r"attempt_(\d{4,9})/([^/]+)/(?:.+/)?attempt_\d+/(\d{1,5})/(?:stdout|stderr)\.log"
)


@dataclass(frozen=True)
class Wanted:
    attempt: int | None = None  # None: the newest attempt, and any that start later
    rank: int | None = None
    node: str | None = None
    lines: int = LINES


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """A growing file, and the position up to which its lines have been read."""

    title: str
    folder: Folder
    name: str
    position: int = 0

    def take(self, *, is_last: bool = False, lines: int | None = None) -> list[str]:
        """Return the new lines, or the last `lines` of them. `is_last` adds an unfinished line."""
        size = self.folder.size(self.name) or 0
        # a shorter file has replaced this one
        self.position = 0 if size < self.position else self.position
        begin = self.position if lines is None else max(self.position, size - MAX_BYTES)
        if begin == size:
            return []
        with self.folder.open(self.name) as file:
            file.seek(begin)
            content = file.read(size - begin)
        end = len(content) if is_last else content.rfind(b"\n") + 1
        self.position = begin + end
        taken = content[:end].removesuffix(b"\n").split(b"\n") if end else []
        return list(map(as_text, taken if lines is None else taken[max(0, len(taken) - lines) :]))


def as_text(line: bytes) -> str:
    return line.removesuffix(b"\r").decode(errors="backslashreplace")


# ---- selection -------------------------------------------------------------------------------------------------------


def all_logs(record: Record) -> dict[str, Log]:
    """Return the logs on this machine and in S3, by name. A local log replaces its copy in S3, which is older."""
    here, there = (
        LocalFolder(record.local_folder() / "logs"),
        record.folder.names(LOGS) if record.is_remote else [],
    )
    logs = [Log(name.removeprefix(LOGS), record.folder, name) for name in there]
    logs += [Log(name, here, name) for name in here.names() if is_path(name)]
    return {log.title: log for log in logs}


def select(record: Record, wanted: Wanted, history: History) -> list[Log]:
    """Return the logs to show now. Raises InputError if the job has no such attempt, machine or rank."""
    logs, begun = all_logs(record), {each.number: each.nodes for each in history.attempts}
    known = sorted(
        {*begun, *(int(match[1]) for name in logs if (match := OF_NODE.fullmatch(name)))}
    )
    check(
        wanted.attempt in (None, *known),
        f"there is no attempt {wanted.attempt}; available: {', '.join(map(str, known)) or 'none yet'}",
    )
    attempt = (
        wanted.attempt if wanted.attempt is not None else [0, *known[-1:], *[*begun][-1:]][-1]
    )
    hosts = begun.get(attempt, [])
    if wanted.rank is not None:
        return of_rank(record, logs, attempt, hosts, wanted.rank, is_last=wanted.attempt is None)
    nodes = {
        match[2]: name
        for name in logs
        if (match := OF_NODE.fullmatch(name)) and int(match[1]) == attempt
    }
    if wanted.node is not None:
        there = sorted({*nodes, *hosts})
        given = f"there is no machine {wanted.node} in attempt {attempt}; available: {', '.join(there) or 'none yet'}"
        check(wanted.node in there, given)
        return [logs[nodes[wanted.node]]] if wanted.node in nodes else []
    of_job = [
        log
        for name, log in logs.items()
        if "/" not in name and name.endswith(".txt") and wanted.attempt is None
    ]
    return [*of_job, *([logs[name] for name in nodes.values()] or of_trainer(record, 0))]


def of_rank(
    record: Record,
    logs: dict[str, Log],
    attempt: int,
    hosts: list[str],
    rank: int,
    *,
    is_last: bool,
) -> list[Log]:
    """Return a rank's logs from torchrun and, for the last attempt, its trainer's log of all attempts."""
    per_node = record.job().processes_per_node
    ranks = len(hosts) * per_node
    check(
        0 <= rank < ranks, f"there is no rank {rank} in attempt {attempt}, which has {ranks} ranks"
    )
    place = (attempt, hosts[rank // per_node], rank % per_node)
    matches = {name: OF_RANK.fullmatch(name) for name in logs}
    of_torchrun = [
        logs[name]
        for name, at in matches.items()
        if at and (int(at[1]), at[2], int(at[3])) == place
    ]
    return [*of_torchrun, *(of_trainer(record, rank) if is_last else [])]


def of_trainer(record: Record, rank: int) -> list[Log]:
    name = f"log/rank_{rank:04d}.txt"
    return (
        [Log(f"the run's {name}", record.run, name)] if record.run.size(name) is not None else []
    )


# ---- showing ---------------------------------------------------------------------------------------------------------


class Printer:
    """A printer that remembers how much of each log it has shown, and prints a title before lines of another log."""

    def __init__(self, record: Record, wanted: Wanted) -> None:
        self.record, self.wanted, self.title = record, wanted, ""
        self.logs: dict[str, Log] = {}
        # None after the first call: later files are shown in full
        self.lines: int | None = wanted.lines

    def show_new(self, history: History, *, is_over: bool) -> None:
        """Print new lines. A log that is no longer selected is printed to its end."""
        selected = {log.title: log for log in select(self.record, self.wanted, history)}
        for title, log in {**selected, **self.logs}.items():
            is_last, lines = (
                is_over or title not in selected,
                None if title in self.logs else self.lines,
            )
            for line in log.take(is_last=is_last, lines=lines):
                if title != self.title:
                    say(f"==> {title} <==")
                    self.title = title
                say(line, keep="\t")
        sys.stdout.flush()
        self.logs = {title: self.logs.get(title, log) for title, log in selected.items()}
        self.lines = None


def show(record: Record, wanted: Wanted) -> None:
    printer = Printer(record, wanted)
    printer.show_new(record.history(), is_over=True)
    if not printer.logs:
        no_logs = f"there are no logs yet; baretrain launch status {record.run_dir} shows what the job is waiting for"
        say(no_logs, file=sys.stderr)


def follow(record: Record, wanted: Wanted) -> None:
    """Print the logs of all attempts as they grow, until the job has ended."""
    printer, is_over, asked_s, problem = Printer(record, wanted), False, -math.inf, ""
    while not is_over:
        before = problem
        try:
            history = record.history()
            # Ask the scheduler before reading the files: once it says that the job has ended, the files are complete.
            if history.has_end or time.monotonic() - asked_s >= ASK_S:
                answer, asked_s = ask(record, history.submission), time.monotonic()
                is_unanswered = history.submission is not None and not history.submission.handle
                is_over, problem = answer.is_active is False or is_unanswered, answer.failure
                history = record.history()
            printer.show_new(history, is_over=is_over)
        except Unreachable as error:
            is_over, problem = False, str(error)
        if problem and problem != before:
            say(f"{problem}{'' if is_over else '; asking again'}", file=sys.stderr)
        if not is_over:
            time.sleep(POLL_S3_S if record.is_remote else POLL_S)
