"""Logs of a job: what its supervisor, the machines and the ranks wrote, now or as it comes.

logs/job.txt                                        the scheduler's script and the supervisor
logs/attempt_0001/HOST.txt                          torchrun on a machine, and its first rank
logs/attempt_0001/HOST/.../attempt_0/3/stderr.log   a rank, by its number on the machine, after each restart by torchrun
log/rank_0003.txt                                   in the run folder: messages of a rank's trainer, of all attempts

Logs of a run in S3 are on their machines until an attempt ends; those of this machine are read here.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launch.history import History, Submission, read_history
from launch.record import Record
from launch.spec import Handle, State
from launch.status import ask
from train.cli.command import printable
from train.config import Unreachable, check
from train.storage.folders import Folder, LocalFolder
from train.storage.schema import is_path

LINES = 100  # last ones of each file that are shown
MOST_BYTES = 2**20  # read at once, from the end of a file at first; and the longest line
POLL_S, POLL_S3_S, ASK_S = 1.0, 5.0, 10.0  # between two looks at the files, and two questions to the scheduler
LOGS = "logs/"
OF_JOB = re.compile(r"[^/]+\.txt")
OF_NODE = re.compile(r"attempt_(\d{4,9})/([^/]+)\.txt")
OF_RANK = re.compile(r"attempt_(\d{4,9})/([^/]+)/(?:.+/)?attempt_\d+/(\d{1,5})/(?:stdout|stderr)\.log")


@dataclass(frozen=True)
class Wanted:
    attempt: int | None = None  # None: the last one, and those that follow
    rank: int | None = None
    node: str | None = None
    lines: int = LINES

    @property
    def is_part(self) -> bool:
        return not self.attempt is self.rank is self.node is None


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass
class Log:
    """A file that grows."""

    title: str
    folder: Folder
    name: str
    content: bytes = b""  # of a file in S3, as it was last read

    def size(self) -> int:
        return self.folder.size(self.name) or 0

    def part(self, begin: int, end: int) -> bytes:
        if isinstance(self.folder, LocalFolder):
            with self.folder.at(self.name).open("rb") as file:
                file.seek(begin)
                return file.read(end - begin)
        if len(self.content) < end:
            self.content = self.folder.read(self.name)
        return self.content[begin:end]

    def begin_of_last(self, lines: int) -> int:
        """Where its last lines begin, of those in its last MOST_BYTES."""
        end = self.size()
        block = self.part(max(0, end - MOST_BYTES), end)
        whole = block.removesuffix(b"\n").split(b"\n") if block else []
        kept = b"\n".join(whole[max(0, len(whole) - lines) :])
        return end - len(kept) - block.endswith(b"\n") if lines and whole else end


class Tail:
    """The lines of a log from some point on."""

    def __init__(self, log: Log, *, lines: int | None) -> None:
        """`lines`: how many of the last ones to begin with; None: all."""
        self.log = log
        self.position = 0 if lines is None else log.begin_of_last(lines)
        self.rest = b""  # of a line that is not complete yet

    def take(self, *, is_last: bool = False) -> Iterator[str]:
        """Yield the lines that are new, safe to print. `is_last`: also one without an end."""
        size = self.log.size()
        if size < self.position:  # another file has its name now
            self.position, self.rest = 0, b""
        while self.position < size:
            block = self.log.part(self.position, min(size, self.position + MOST_BYTES))
            if not block:  # it was cut meanwhile
                break
            self.position += len(block)
            *whole, self.rest = (self.rest + block).split(b"\n")
            yield from map(safe, whole)
            if len(self.rest) > MOST_BYTES:
                yield safe(self.rest)
                self.rest = b""
        if is_last and self.rest:
            yield safe(self.rest)
            self.rest = b""


def safe(line: bytes) -> str:
    """A line as text on which no terminal acts."""
    text = line.removesuffix(b"\r").decode(errors="backslashreplace")
    if text.isprintable():
        return text
    shown = (char if char.isprintable() or char == "\t" else char.encode("unicode_escape").decode() for char in text)
    return "".join(shown)


# ---- which -----------------------------------------------------------------------------------------------------------


class Logs:
    """The logs of a run, wherever they are."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.here = LocalFolder(record.local_folder() / "logs")
        self.ranks_per_node = record.job().processes_per_node

    def all(self) -> dict[str, Log]:
        """All files by their names below logs/: of two copies the longer one, since logs only grow."""
        logs = {name: Log(name, self.here, name) for name in self.here.names() if is_path(name)}
        for name in self.record.folder.names(LOGS) if self.record.is_remote else ():
            log = Log(name.removeprefix(LOGS), self.record.folder, name)
            if log.title not in logs or logs[log.title].size() < log.size():
                logs[log.title] = log
        return logs

    def select(self, wanted: Wanted, history: History) -> list[Log]:
        """The logs to show now. InputError for an attempt, a machine or a rank that the job does not have."""
        logs = self.all()
        there = {int(match[1]) for name in logs if (match := re.match(r"attempt_(\d{4,9})/", name))}
        begun = [each.number for each in history.attempts]
        known = sorted({*there, *begun})
        check(
            wanted.attempt in (None, *known),
            f"there is no attempt {wanted.attempt}; there are: {', '.join(map(str, known)) or 'none yet'}",
        )
        attempt = next(iter([*begun[-1:], *known[-1:]]), 0) if wanted.attempt is None else wanted.attempt
        hosts = next((each.nodes for each in history.attempts if each.number == attempt), [])
        if wanted.rank is not None:
            return self.of_rank(logs, attempt, hosts, wanted)
        nodes = {match[2]: name for name in logs if (match := OF_NODE.fullmatch(name)) and int(match[1]) == attempt}
        if wanted.node is not None:
            check(
                wanted.node in (*nodes, *hosts),
                f"there is no machine {wanted.node} in attempt {attempt}; there are: "
                f"{', '.join(sorted({*nodes, *hosts})) or 'none yet'}",
            )
            return [logs[nodes[wanted.node]]] if wanted.node in nodes else []
        of_job = [log for name, log in logs.items() if OF_JOB.fullmatch(name) and wanted.attempt is None]
        of_nodes = [logs[name] for name in nodes.values()]
        return [*of_job, *(of_nodes or self.of_trainer(0))]

    def of_rank(self, logs: dict[str, Log], attempt: int, hosts: list[str], wanted: Wanted) -> list[Log]:
        """What torchrun kept of a rank, and its trainer's own log, which is of all attempts."""
        rank, per_node = wanted.rank or 0, self.ranks_per_node
        check(bool(hosts), f"the record names no machines of attempt {attempt}: give --node instead of --rank")
        num_ranks = len(hosts) * per_node
        check(rank < num_ranks, f"there is no rank {rank} in attempt {attempt}: it has ranks 0 to {num_ranks - 1}")
        of_torchrun = []
        for name, log in logs.items():
            match = OF_RANK.fullmatch(name)
            owner = (attempt, hosts[rank // per_node], rank % per_node)
            if match and (int(match[1]), match[2], int(match[3])) == owner:
                of_torchrun.append(log)
        return [*of_torchrun, *(self.of_trainer(rank) if wanted.attempt is None else ())]

    def of_trainer(self, rank: int) -> list[Log]:
        name = f"log/rank_{rank:04d}.txt"
        log = Log(f"the run's {name}", self.record.run, name)
        return [log] if log.folder.size(name) is not None else []


# ---- showing ---------------------------------------------------------------------------------------------------------


class Printer:
    """Lines of several logs, each with its title above where it changes."""

    def __init__(self) -> None:
        self.title = ""

    def show(self, title: str, lines: Iterator[str]) -> None:
        for line in lines:
            if title != self.title:
                print(f"==> {printable(title)} <==")
                self.title = title
            print(line)
        sys.stdout.flush()


def show(record: Record, wanted: Wanted) -> None:
    """Print the last lines of the logs."""
    logs = Logs(record).select(wanted, read_history(record.events()))
    printer = Printer()
    for log in logs:
        printer.show(log.title, Tail(log, lines=wanted.lines).take(is_last=True))
    if not logs:
        say(f"there are no logs yet; python -m launch status {record.run_dir} shows what the job waits for")


def follow(
    record: Record,
    wanted: Wanted,
    *,
    asks: Callable[[str, Handle], State] = ask,
    poll_s: float | None = None,
    ask_s: float = ASK_S,
) -> None:
    """Print the logs as they come, over all attempts, until the job has ended."""
    pause_s = poll_s if poll_s is not None else POLL_S3_S if record.is_remote else POLL_S
    follower, is_over, asked_s, trouble = Follower(record, wanted), False, -math.inf, ""
    while True:
        problem = ""
        try:
            history = read_history(record.events())
            if (
                history.has_end or time.monotonic() - asked_s >= ask_s
            ):  # before the files are read: an ended job has written all of them
                asked_s, submission = time.monotonic(), history.submission
                is_over = not (submission and submission.handle) or not asks(*called(submission)).is_active
                history = read_history(record.events()) if is_over else history
            follower.show_new(history, is_over=is_over)
        except Unreachable as error:
            problem, is_over = printable(str(error)), False
        if problem and problem != trouble:
            say(f"{problem}; asked again")
        trouble = problem
        if is_over:
            return
        time.sleep(pause_s)


def called(submission: Submission) -> tuple[str, Handle]:
    return submission.scheduler, submission.handle


class Follower:
    """The logs to show, and how far each has been shown."""

    def __init__(self, record: Record, wanted: Wanted) -> None:
        self.logs, self.wanted, self.printer = Logs(record), wanted, Printer()
        self.tails: dict[str, Tail] = {}
        self.lines: int | None = wanted.lines  # None: files that come later are shown from their beginning

    def show_new(self, history: History, *, is_over: bool) -> None:
        may_come = self.wanted.is_part and not history.attempts and not is_over
        selected = [] if may_come else self.logs.select(self.wanted, history)
        titles = {log.title for log in selected}
        for log in selected:
            if log.title not in self.tails:
                self.tails[log.title] = Tail(log, lines=self.lines)
        for title, tail in self.tails.items():
            self.printer.show(title, tail.take(is_last=is_over or title not in titles))
        self.tails = {title: tail for title, tail in self.tails.items() if title in titles}
        self.lines = None


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
