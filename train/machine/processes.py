"""Liveness checks of processes on this machine, and children that end with their parent. Standard library only."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

ENDED_STATES = "ZX"  # states (proc(5)) of processes that have ended, but that their parents have not yet waited for
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # constants of <sys/prctl.h>
POLL_S, ORPHANS_POLL_S = 1.0, 0.1
ENDING_S = 10.0  # seconds that a process may take to end after SIGTERM
TIMED_OUT = 124  # the exit code of timeout(1)
# variables that make a process one of several ranks
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TORCHRUN = "PET_"  # the start of variables from which torchrun takes options; Kubeflow sets them
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    state: str  # R runs, S sleeps, D waits for a device or a disk, T is stopped, Z has ended; see proc(5)
    # clock ticks from boot to start; together with the id, this identifies the process
    started: int


def read_process(pid: int) -> Process | None:
    """Return a process's state from /proc; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # the process's name, before the last ")", may contain anything
    fields = text.rpartition(")")[2].split()
    return Process(state=fields[0], started=int(fields[19]))


def age_s(pid: int) -> float:
    """Return the seconds since a process on this machine started; 0 if it has ended, or if there is no /proc."""
    process = read_process(pid)
    if process is None:
        return 0.0
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return max(0.0, uptime_s - process.started / os.sysconf("SC_CLK_TCK"))


def is_alive(pid: int, started: int | None) -> bool | None:
    """Return whether the process with this id and start time is running; None if the kernel does not say."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: the id is too large for a process
        return False
    except PermissionError:  # another user's process, which /proc may hide (hidepid)
        pass
    process = read_process(pid)
    if process is None:
        return None
    return process.started == started and process.state not in ENDED_STATES


def owner_name(pid: int) -> str:
    """Return NODE-PID-STARTED, a name that no other process has, even on other machines that share a folder."""
    process = read_process(pid)
    return f"{platform.node()}-{pid}-{process.started if process else 0}"


def is_gone(owner: str) -> bool:
    """Return whether the process with this `owner_name` has ended; False if this machine cannot tell."""
    match = re.fullmatch(r"(.+)-(\d+)-(\d+)", owner)
    return (
        match is not None
        and match[1] == platform.node()
        and is_alive(int(match[2]), int(match[3])) is False
    )


# ---- children ------------------------------------------------------------------------------------------------------


def end_with_parent(parent: int) -> None:
    """Have the kernel send this process SIGTERM when its `parent` ends, however it ends."""
    if LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os.kill(os.getpid(), signal.SIGTERM)


def start(
    command: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | int | None = None
) -> subprocess.Popen[bytes]:
    """Start a command that gets SIGTERM when this process ends, however it ends. Call this from the main thread."""
    stderr = None if output is None else subprocess.STDOUT
    ending = partial(end_with_parent, os.getpid())
    return subprocess.Popen(command, env=env, stdout=output, stderr=stderr, preexec_fn=ending)


def with_this_code(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python processes run this code, whatever the working folder contains."""
    path = str(Path(__file__).parent.parent.parent)
    if environ.get("PYTHONPATH"):
        path += f"{os.pathsep}{environ['PYTHONPATH']}"
    return {"PYTHONSAFEPATH": "1", **outside_ranks(environ), "PYTHONPATH": path}


def outside_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that make a process a rank, or that give options to torchrun."""
    return {
        name: value
        for name, value in environ.items()
        if name not in RANKS and not name.startswith(TORCHRUN)
    }


def exit_code(
    process: subprocess.Popen[bytes],
    *,
    meanwhile: Callable[[], None] = lambda: None,
    limit_s: float = math.inf,
) -> int:
    """Wait for a process, call `meanwhile` every POLL_S, and return its exit code as shells report it.

    After `limit_s`, the process is killed and the code is TIMED_OUT. A process that waits for a driver may survive
    SIGKILL; this function returns nevertheless.
    """
    until_s = time.monotonic() + limit_s
    while True:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            meanwhile()
        else:
            if code < 0:
                return 128 - code
            return code
        if time.monotonic() > until_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            process.kill()
            return TIMED_OUT


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends, such as ranks whose torchrun was killed."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(limit_s: float) -> None:
    """Wait for the adopted processes, which may be saving. Kill processes that take longer than `limit_s`.

    This process must have no running child that it started itself.
    """
    until_s = time.monotonic() + limit_s
    with suppress(ChildProcessError):  # all adopted processes have ended
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                if time.monotonic() > until_s:
                    kill(descendants(os.getpid()))
                time.sleep(ORPHANS_POLL_S)


def descendants(pid: int) -> Iterator[int]:
    """Yield the ids of all descendants of the process `pid`, parents first."""
    import psutil  # imported late: most programs need none of it

    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            yield child.pid


def kill(pids: Iterable[int]) -> None:
    for pid in list(pids):
        with suppress(ProcessLookupError):  # the process ended meanwhile
            os.kill(pid, signal.SIGKILL)
