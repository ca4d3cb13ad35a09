"""The logs of a job's supervisor, machines and ranks, shown once or followed as they grow.

logs/job.txt                                        the scheduler's script and the supervisor
logs/attempt_0001/HOST.txt                          torchrun on a machine, and its first rank
logs/attempt_0001/HOST/.../attempt_0/3/stderr.log   a rank, numbered within its machine
log/rank_0003.txt                                   in the run folder: messages of a rank's trainer during all attempts

If the run is in S3, logs of other machines may be missing until an attempt ends. Logs of this machine are read locally.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass

from launch.record import History, Record, attempt_name
from launch.status import ask
from train.config import Unreachable, check
from train.machine.console import say
from train.storage.folders import Folder, LocalFolder
from train.storage.schema import is_path

LINES = 100  # number of lines shown from the end of each file
MAX_BYTES = 2**20  # bytes read from the end of a new file
POLL_S = 1.0  # pause between reads of local files
POLL_S3_S = 5.0  # pause between reads of S3
ASKS = 10  # number of reads for each question to the scheduler about the job's state
OF_RANK = r"(?:.+/)?attempt_\d+/{}/(?:stdout|stderr)\.log"  # below HOST/


@dataclass(frozen=True)
class Wanted:
    """The logs to show: those of the job and of all machines of its last attempt, or only of a rank or a machine."""

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


def select(record: Record, wanted: Wanted, history: History) -> list[Log]:
    """Return the logs to show now. Raises InputError if the last attempt has no such machine or rank."""
    logs = all_logs(record)
    trained = [attempt for attempt in history.attempts if attempt.is_training]
    hosts, folder = list[str](), ""
    if trained:
        hosts, folder = trained[-1].nodes, attempt_name(trained[-1].number)
    if wanted.rank is not None:
        return of_rank(record, logs, folder, hosts, wanted.rank)
    of_nodes = {
        name.removeprefix(f"{folder}/").removesuffix(".txt"): log
        for name, log in logs.items()
        if re.fullmatch(rf"{folder}/[^/]+\.txt", name)
    }
    if wanted.node is not None:
        known = sorted({*of_nodes, *hosts})
        check(
            wanted.node in known,
            f"there is no machine {wanted.node} in the last attempt; available: {', '.join(known) or 'none yet'}",
        )
        return [log for node, log in of_nodes.items() if node == wanted.node]
    of_job = [log for name, log in logs.items() if re.fullmatch(r"[^/]+\.txt", name)]
    return [*of_job, *(of_nodes.values() or of_trainer(record, 0))]


def of_rank(
    record: Record, logs: dict[str, Log], folder: str, hosts: list[str], rank: int
) -> list[Log]:
    """Return a rank's logs from torchrun in the last attempt, and from its trainer in all attempts."""
    per_node = record.job().processes_per_node
    ranks = len(hosts) * per_node
    check(
        0 <= rank < ranks,
        f"there is no rank {rank} in the last attempt, which has {ranks} ranks",
    )
    below = re.escape(f"{folder}/{hosts[rank // per_node]}/")
    pattern = re.compile(below + OF_RANK.format(rank % per_node))
    of_torchrun = [log for name, log in logs.items() if pattern.fullmatch(name)]
    return [*of_torchrun, *of_trainer(record, rank)]


def of_trainer(record: Record, rank: int) -> list[Log]:
    name = f"log/rank_{rank:04d}.txt"
    if record.run.size(name) is None:
        return []
    return [Log(f"the run's {name}", record.run, name)]


# ---- showing ---------------------------------------------------------------------------------------------------------


class Printer:
    """A printer that remembers how much of each log it has shown, and prints a title before lines of another log."""

    def __init__(self, record: Record, wanted: Wanted) -> None:
        self.record = record
        self.wanted = wanted
        self.title = ""  # of the log that was printed last
        self.logs: dict[str, Log] = {}
        self.is_first = True

    def show_new(self, history: History, *, is_over: bool) -> None:
        """Print new lines. A log that is no longer selected is printed to its end."""
        selected = {log.title: log for log in select(self.record, self.wanted, history)}
        for title, log in self.logs.items():
            if title in selected:
                selected[title] = log
            else:
                self.print(log, log.take(is_last=True))
        for log in selected.values():
            # Files that appear later are shown in full.
            lines = self.wanted.lines if self.is_first else None
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


def show(record: Record, wanted: Wanted) -> None:
    printer = Printer(record, wanted)
    printer.show_new(record.history(), is_over=True)
    if not printer.logs:
        no_logs = f"there are no logs yet; baretrain launch status {record.run_dir} shows what the job is waiting for"
        say(no_logs, file=sys.stderr)


def follow(record: Record, wanted: Wanted) -> None:
    """Print the logs of all attempts as they grow, until the job has ended."""
    printer = Printer(record, wanted)
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
