"""The logs of a job's supervisor and machines, shown once or followed as they grow.

logs/job.txt                                        the scheduler's script and the supervisor
logs/attempt_0001/HOST.txt                          torchrun on a machine, and its first rank
logs/attempt_0001/HOST/.../attempt_0/3/stderr.log   a rank, numbered within its machine; not shown

If the run is in S3, logs of other machines may be missing until an attempt ends. Logs of this machine are read locally.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass

from launch.record import History, Record, attempt_name
from launch.status import ask
from train.config import Unreachable
from train.machine.console import say
from train.storage.folders import Folder, LocalFolder
from train.storage.schema import is_path

LINES = 100  # number of lines shown from the end of each file
MAX_BYTES = 2**20  # bytes read from the end of a new file
POLL_S = 1.0  # pause between reads of local files
POLL_S3_S = 5.0  # pause between reads of S3
OF_TRAINER = "log/rank_0000.txt"  # in the run folder
ASKS = 10  # number of reads for each question to the scheduler about the job's state


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
        if size < self.position:
            self.position = 0  # another file has replaced this one
        begin = self.position
        if lines is not None:
            begin = max(begin, size - MAX_BYTES)
        if begin == size:
            return []
        with self.folder.open(self.name) as file:
            file.seek(begin)
            content = file.read(size - begin)
        if not is_last:
            content = content[: content.rfind(b"\n") + 1]
        self.position = begin + len(content)
        taken = content.splitlines()
        if lines is not None:
            taken = taken[max(0, len(taken) - lines) :]
        return [line.decode(errors="backslashreplace") for line in taken]


def all_logs(record: Record) -> dict[str, Log]:
    """Return the logs on this machine and in S3, by name. A local log replaces its copy in S3, which is older."""
    logs = {}
    if record.is_remote:
        for name in record.folder.names("logs/"):
            title = name.removeprefix("logs/")
            logs[title] = Log(title, record.folder, name)
    here = LocalFolder(record.local_folder() / "logs")
    for name in here.names():
        if is_path(name):
            logs[name] = Log(name, here, name)
    return logs


# ---- selection -------------------------------------------------------------------------------------------------------


def select(record: Record, history: History, number: int | None) -> list[Log]:
    """Return the logs of the job and of all machines of an attempt: attempt `number`, or the last one that trained."""
    if number is None:
        trained = [each.number for each in history.attempts if each.is_training]
        number = max(trained, default=0)
    below = attempt_name(number)
    of_job = []
    of_nodes = []
    for name, log in all_logs(record).items():
        if re.fullmatch(r"[^/]+\.txt", name):
            of_job.append(log)
        elif re.fullmatch(rf"{below}/[^/]+\.txt", name):
            of_nodes.append(log)
    if not of_nodes and record.run.size(OF_TRAINER) is not None:
        of_nodes = [Log(f"the run's {OF_TRAINER}", record.run, OF_TRAINER)]
    return [*of_job, *of_nodes]


# ---- showing ---------------------------------------------------------------------------------------------------------


class Printer:
    """A printer that remembers how much of each log it has shown, and prints a title before lines of another log."""

    def __init__(self, record: Record, number: int | None, num_lines: int) -> None:
        self.record = record
        self.number = number  # of the attempt; None for the last one
        self.num_lines = num_lines
        self.title = ""  # of the log that was printed last
        self.logs: dict[str, Log] = {}
        self.is_first = True

    def show_new(self, history: History, *, is_over: bool) -> None:
        """Print new lines. A log that is no longer selected is printed to its end."""
        selected = {log.title: log for log in select(self.record, history, self.number)}
        for title, log in self.logs.items():
            if title in selected:
                selected[title] = log
            else:
                self.print(log, log.take(is_last=True))
        for log in selected.values():
            # Files that appear later are shown in full.
            lines = self.num_lines if self.is_first else None
            self.print(log, log.take(is_last=is_over, lines=lines))
        self.logs = selected
        self.is_first = False
        sys.stdout.flush()

    def print(self, log: Log, lines: list[str]) -> None:
        if lines and log.title != self.title:
            say(f"==> {log.title} <==")
            self.title = log.title
        for line in lines:
            say(line, keep="\t")


def show(record: Record, number: int | None, num_lines: int) -> None:
    printer = Printer(record, number, num_lines)
    printer.show_new(record.history(), is_over=True)
    if not printer.logs:
        no_logs = f"there are no logs yet; baretrain launch status {record.run_dir} shows what the job is waiting for"
        say(no_logs, file=sys.stderr)


def follow(record: Record, num_lines: int) -> None:
    """Print the logs of all attempts as they grow, until the job has ended."""
    printer = Printer(record, None, num_lines)
    problem = ""
    reads = 0
    is_over = False
    while not is_over:
        before = problem
        try:
            # Ask the scheduler before reading the files: once it says that the job has ended, the files are complete.
            history = record.history()
            if history.has_end or reads % ASKS == 0:
                answer = ask(record, history.submission)
                problem = answer.failure
                is_over = answer.is_active is False
                history = record.history()
            printer.show_new(history, is_over=is_over)
        except Unreachable as error:
            problem = str(error)
            is_over = False
        if problem and problem != before:
            ending = "" if is_over else "; asking again"
            say(f"{problem}{ending}", file=sys.stderr)
        reads += 1
        if not is_over:
            time.sleep(POLL_S3_S if record.is_remote else POLL_S)
