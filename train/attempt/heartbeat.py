"""Heartbeats: what each rank of a machine was doing last, in memory that the others read. No torch here."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from train.config import InputError, check
from train.host.launched import Launched

PHASE_BYTES = 64
MEMORY = Path("/dev/shm")  # on a disk, a write to a mapped page can wait until the disk is less busy


class Heartbeat(ctypes.Structure):
    """The last heartbeat of a rank. Each number is written at once, so that no reader sees half of it."""

    state: int
    pid: int
    started: int  # clock ticks after the boot, as in Process
    rank: int
    step: int  # -1: unknown
    marks: int  # heartbeats since the step began; all ranks run the same program, so the fewest are the least progress
    beat_ns: int  # time.monotonic_ns(), the same clock in all processes of a machine
    is_start: int  # 1: watchdog.start_s is the limit, 0: watchdog.step_s
    peak_bytes: int  # of host memory
    phase: bytes

    NUMBERS = ("state", "pid", "started", "rank", "step", "marks", "beat_ns", "is_start", "peak_bytes")
    _fields_ = [*((name, ctypes.c_int64) for name in NUMBERS), ("phase", ctypes.c_char * PHASE_BYTES)]

    @property
    def age_s(self) -> float:
        return (time.monotonic_ns() - self.beat_ns) / 1e9


@dataclass(frozen=True)
class Seen:
    """A local rank as another one sees it."""

    beat: Heartbeat  # a copy
    limit_s: float
    process_state: str  # see Process; empty: the process is gone

    @property
    def age_s(self) -> float:
        return self.beat.age_s

    @property
    def where(self) -> str:
        return f"'{self.beat.phase.decode(errors='replace')}'" + (f" of step {self.beat.step}" * (self.beat.step >= 0))

    @property
    def peak(self) -> str:
        return f"peak host memory {self.beat.peak_bytes / 1e9:.1f} GB"

    def __str__(self) -> str:
        return (
            f"  rank {self.beat.rank} (pid {self.beat.pid}): {self.where} for {self.age_s:.1f} s, limit "
            f"{self.limit_s:g} s; process state {self.process_state}, {self.peak}"
        )


def step_of(rank: Seen) -> int | None:
    return rank.beat.step if rank.beat.step >= 0 else None


def shared_path(log: Path, launch: Launched) -> Path:
    """The shared memory of one attempt on this machine. All its ranks derive this name, ranks of other runs do not."""
    attempt = [str(log.absolute()), launch.local_world_size, *launch.torchrun, launch.restart_count]
    key = hashlib.sha256(json.dumps(attempt).encode()).hexdigest()[:16]
    parent = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return parent / f"baretrain-{os.geteuid()}-{key}"


def open_private(path: Path) -> int:
    """Open a file that only this user may use, and make it if there is none. InputError if it is not private: others
    can guess its name.
    """
    refusal = f"{path} is not a file that only this user may use; remove it, or set watchdog.enabled=false"
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InputError(f"{refusal} ({error})") from error
    status = os.fstat(handle)
    check(stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077, refusal)
    return handle
