"""The rank's side of the watchdog: heartbeats for a process per machine that ends ranks which no longer come forward.

It is a process (`train.watchdog_process`) because a thread does not run while another one holds the GIL. Ranks and
watchdog share a small file in memory. Linux only; elsewhere nothing is watched.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hashlib
import json
import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import train
from train.config import S3Config, WatchdogConfig, check
from train.launched import launched
from train.machine import read_process

ABSENT, ALIVE, LEFT = 0, 1, 2  # states of a rank
PHASE_BYTES, OWNER_BYTES = 64, 32
MEMORY = Path("/dev/shm")
LEFTOVER_S = 3600.0  # a folder that is younger may be of a run whose first rank has yet to come
CLOSE_S = 1.0  # more than the watchdog takes to see that all ranks have left


class Slot(ctypes.Structure):
    """What a rank says of itself. Each field is written in one go, so that a reader sees it whole."""

    state: int
    pid: int
    started: int  # clock ticks after the machine, as in Process
    rank: int
    step: int  # -1: unknown
    marks: int  # heartbeats since the step began; ranks run the same program: the fewest have come least far
    beat_ns: int  # time.monotonic_ns(), the same clock in all processes of a machine
    is_start: int  # 1: watchdog.start_s is the limit, 0: watchdog.step_s
    phase: bytes
    owner: bytes  # of the lease by which the run folder is its job's; empty: not known yet

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("state", "pid", "started", "rank", "step", "marks", "beat_ns")),
        ("is_start", ctypes.c_int64),
        ("phase", ctypes.c_char * PHASE_BYTES),
        ("owner", ctypes.c_char * OWNER_BYTES),
    ]


@dataclass(frozen=True)
class Orders:
    """What local rank 0 tells the watchdog process, as JSON."""

    folder: str  # with the heartbeats and the stacks that ranks dump; the watchdog removes it
    log: str  # of the run folder
    num_ranks: int  # of this machine
    first_started: int  # clock ticks, of local rank 0: no other rank of this life is older
    has_other_machines: bool
    has_launcher: bool  # torchrun
    run_dir: str
    s3: dict[str, Any]
    previous: str  # kind of the failure that ended the last life
    step_s: float
    start_s: float


class Watchdog:
    """A rank's heartbeats, used as a context. Enter it after `RunFolder.claim`, which takes away older exit files."""

    def __init__(
        self,
        cfg: WatchdogConfig,
        log: Path,
        *,
        rank: int,
        local_rank: int,
        local_world_size: int,
        folder: str = "",  # the run's, as the user writes it
        s3: S3Config | None = None,
        previous: str = "",  # how the last life failed
        owner: str = "",  # of the run folder's lease, on the rank that holds it
    ) -> None:
        self.owner = owner.encode()
        self.folder, self.s3, self.previous = folder or str(log.parent), s3 or S3Config(), previous
        self.cfg, self.log, self.rank = cfg, log.absolute(), rank
        self.local_rank, self.local_world_size = local_rank, local_world_size
        self.slot = Slot()  # nobody's, before and after: heartbeats cost the same and say nothing
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watchdog:
        if self.cfg.enabled and sys.platform == "linux":
            folder = private_folder(self.log, self.local_world_size)
            # The handler is C, so that it works with the GIL held. It stays for good: a signal that comes too late,
            # to a rank that has just left, would end it.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            dumps = os.open(stacks_path(folder, self.local_rank), flags, 0o600)
            faulthandler.register(stacks_signal(), file=dumps, all_threads=True)
            self.join(folder)
            if self.local_rank == 0:
                self.start_process(folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.slot.state = LEFT
        self.slot = Slot()
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):  # other ranks are still at it; it ends with the last of them
                self.process.wait(CLOSE_S)

    def phase(self, name: str, *, step: int | None = None, is_start: bool = False) -> None:
        """Something else begins, which is a heartbeat too. `is_start`: it joins, loads or compiles, and has start_s."""
        number = -1 if step is None else step
        if number != self.slot.step:
            self.slot.marks = 0
        self.beat()  # first, since the next limit may be shorter
        self.slot.is_start, self.slot.step = int(is_start), number
        self.slot.phase = name.encode()[:PHASE_BYTES]

    @property
    def is_dead(self) -> bool:
        """Whether the process that local rank 0 started is gone: nobody looks on any more."""
        return self.process is not None and self.process.poll() is not None

    def beat(self) -> None:
        """It still comes forward: a micro batch, a batch of an evaluation, a file of a checkpoint."""
        self.slot.marks += 1
        self.slot.beat_ns = time.monotonic_ns()

    def join(self, folder: Path) -> None:
        slot = open_slots(folder, self.local_world_size)[self.local_rank]
        slot.state = ABSENT  # an earlier life may have left something
        process = read_process(os.getpid())
        assert process is not None
        slot.pid, slot.started, slot.rank, slot.marks = os.getpid(), process.started, self.rank, 0
        slot.owner = self.owner
        self.slot = slot
        self.phase("start", is_start=True)
        slot.state = ALIVE

    def start_process(self, folder: Path) -> None:
        orders = Orders(
            folder=str(folder),
            log=str(self.log),
            num_ranks=self.local_world_size,
            first_started=self.slot.started,
            run_dir=self.folder,
            s3=asdict(self.s3),
            previous=self.previous,
            has_launcher=launched().is_under_torchrun,
            has_other_machines=launched().world_size > self.local_world_size,
            step_s=self.cfg.step_s,
            start_s=self.cfg.start_s,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "train.watchdog_process", json.dumps(asdict(orders))],
            cwd=Path(train.__file__).parent.parent,  # where -m finds it
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,  # the terminal's Ctrl-C and torchrun's signals are for the ranks
        )


def private_folder(log: Path, local_world_size: int) -> Path:
    """A folder of this user on this machine, for which all its ranks work out the same name; other runs do not.

    In memory: on a disk, a write to a mapped page can wait for what the disk is busy with.
    """
    launch = launched()
    attempt = [*launch.torchrun, launch.restart_count] if launch.is_under_torchrun else [os.getpid()]
    key = hashlib.sha256(json.dumps([str(log), local_world_size, *attempt]).encode()).hexdigest()[:16]
    parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder = parent / f"baretrain-{os.geteuid()}-{key}"
    with suppress(FileExistsError):  # of another rank, or of somebody who guessed the name
        folder.mkdir(mode=0o700)
    check(
        is_private(folder),
        f"{folder} is not a folder that only this user may use; remove it, or set watchdog.enabled=false",
    )
    return folder


def is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def open_slots(folder: Path, num_ranks: int) -> list[Slot]:
    """One per local rank, in memory that all who open them share; made as ABSENT if they are not there yet."""
    size = num_ranks * ctypes.sizeof(Slot)
    handle = os.open(folder / "heartbeats", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(handle, size)
        shared = mmap.mmap(handle, size)  # lives as long as one of its slots
    finally:
        os.close(handle)
    return [Slot.from_buffer(shared, number * ctypes.sizeof(Slot)) for number in range(num_ranks)]


def remove_leftovers(parent: Path) -> None:
    """Remove folders whose ranks have all gone: their watchdog was killed, or their first rank never came to start it.

    Of several that remove the same one, all succeed.
    """
    for folder in parent.glob(f"baretrain-{os.geteuid()}-*"):
        with suppress(FileNotFoundError):
            if not is_private(folder) or time.time() - folder.stat().st_mtime < LEFTOVER_S:
                continue
            num_ranks = (folder / "heartbeats").stat().st_size // ctypes.sizeof(Slot)
            slots = open_slots(folder, num_ranks) if num_ranks else []
            if not any(slot.pid and read_process(slot.pid) for slot in slots):
                shutil.rmtree(folder, ignore_errors=True)


def stacks_path(folder: Path, local_rank: int) -> Path:
    return folder / f"stacks_{local_rank}"


def stacks_signal() -> int:
    """Nobody's, unlike those of `train.preempt`. Real-time signals are Linux's."""
    return signal.SIGRTMIN + 2
