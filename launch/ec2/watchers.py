"""Which process watches a run's machines: one at a time, also over several computers.

RUN.launch/ec2/watchers/0001.json   each that has ever begun, by its number: the one with the highest number goes on
              /watcher.json         what it does, and when it last said so
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass

from launch.record import Record
from train.config import InputError
from train.host.processes import is_alive, read_process
from train.storage.folders import canonical_json
from train.storage.untrusted import BadContent, read_object, record

WATCHERS, WATCHER = "ec2/watchers/", "ec2/watcher.json"
BEAT_S = 30.0  # between two signs, at the most
SILENT_S = 180.0  # after which a watcher on another computer counts as gone


@dataclass(frozen=True)
class Watcher:
    number: int
    host: str
    pid: int
    started: int  # of the process, see train.host.processes
    time_unix_s: float
    doing: str

    def is_there(self, *, now_unix_s: float) -> bool:
        if self.host == platform.node():
            return is_alive(self.pid, self.started) is not False
        return now_unix_s - self.time_unix_s < SILENT_S


def read_watcher(run: Record) -> Watcher | None:
    """The last watcher of a run; None if it never had one."""
    try:
        return record(Watcher, read_object(run.folder.read(WATCHER)))
    except FileNotFoundError:
        return None
    except BadContent as error:
        raise InputError(f"{run.location}/{WATCHER} cannot be read: {error}") from error


def begin(run: Record, *, now_unix_s: float) -> Watcher:
    """Become the watcher of a run. InputError if it has one."""
    other = read_watcher(run)
    if other is not None and other.is_there(now_unix_s=now_unix_s) and other.pid != os.getpid():
        raise InputError(f"{run.run_dir} is watched already, by process {other.pid} on {other.host}: {other.doing}")
    number = 1 + len(run.folder.names(WATCHERS))
    process = read_process(os.getpid())
    mine = Watcher(number, platform.node(), os.getpid(), process.started if process else 0, now_unix_s, "starting")
    while not run.folder.create(f"{WATCHERS}{number:04d}.json", canonical_json(asdict(mine))):
        number += 1
        mine = Watcher(number, mine.host, mine.pid, mine.started, now_unix_s, mine.doing)
    beat(run, mine)
    return mine


def beat(run: Record, mine: Watcher) -> None:
    run.folder.write(WATCHER, canonical_json(asdict(mine)))


def is_last(run: Record, mine: Watcher) -> bool:
    """Whether no other watcher has begun since."""
    return run.folder.size(f"{WATCHERS}{mine.number + 1:04d}.json") is None
