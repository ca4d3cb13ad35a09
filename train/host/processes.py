"""Processes of this machine: what the kernel says of one, and whether it still runs. Only the standard library here."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

ENDED_STATES = "ZX"  # of proc(5): it has ended, and its parent has not waited for it yet


@dataclass(frozen=True)
class Process:
    state: str  # R runs, S sleeps, D waits for a device or a disk, T is stopped, Z has ended; see proc(5)
    parent: int
    started: int  # clock ticks after the boot; with the pid, it identifies one process


def read_process(pid: int) -> Process | None:
    """A process as /proc shows it; None if it shows none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return Process(state=fields[0], parent=int(fields[1]), started=int(fields[19]))


def is_alive(pid: int, started: int | None) -> bool | None:
    """Whether the process with this number and start still runs; None if the kernel does not say."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter for a number that no process has
        return False
    except PermissionError:  # another user's, which /proc may hide (hidepid)
        pass
    process = read_process(pid)
    if process is None:
        return None
    return process.started == started and process.state not in ENDED_STATES


def owner_name(pid: int) -> str:
    """NODE-PID-STARTED: no other process has this name, also on machines with a common folder."""
    process = read_process(pid)
    return f"{platform.node()}-{pid}-{process.started if process else 0}"


def is_gone(owner: str) -> bool:
    """Whether the process with this owner_name has ended. False where this machine cannot know it."""
    node, pid, started = owner.rsplit("-", 2)
    return node == platform.node() and is_alive(int(pid), int(started)) is False
