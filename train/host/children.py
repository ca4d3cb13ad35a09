"""Child processes that end with their parent, and those that outlive theirs."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from train.host.launcher import PR_SET_PDEATHSIG
from train.host.processes import read_process

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PR_SET_CHILD_SUBREAPER = 36  # of <sys/prctl.h>
POLL_S, ORPHANS_POLL_S = 1.0, 0.1
ENDING_S = 10.0  # for a process to end after SIGTERM
TIMED_OUT = 124  # as timeout(1) exits


def start(
    command: Sequence[str], *, env: Mapping[str, str], output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command, which gets SIGTERM when this process ends, however it ends. Call it from the main thread."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def end_with_parent() -> None:
        if sys.platform == "linux":
            libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:  # it ended meanwhile
                os.kill(os.getpid(), signal.SIGTERM)

    stderr = None if output is None else subprocess.STDOUT
    return subprocess.Popen(command, env=env, stdout=output, stderr=stderr, preexec_fn=end_with_parent)


def exit_code(
    process: subprocess.Popen[bytes], *, meanwhile: Callable[[], None] = lambda: None, limit_s: float = math.inf
) -> int:
    """Wait for a process, and call `meanwhile` every POLL_S; its exit code as shells report it. After `limit_s` it is
    ended, and left to itself if that does not help, as in a driver that never answers: TIMED_OUT.
    """
    until_s = time.monotonic() + limit_s
    while True:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            meanwhile()
        else:
            return 128 - code if code < 0 else code
        if time.monotonic() > until_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING_S)
            process.kill()
            return TIMED_OUT


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends: of ranks whose torchrun was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_orphans(limit_s: float) -> None:
    """Wait for the processes that this one adopted, which may be saving, and kill those that take longer. Call it while
    no child of its own runs.
    """
    until_s = time.monotonic() + limit_s
    with suppress(ChildProcessError):  # all have ended
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                if time.monotonic() > until_s:
                    kill(descendants(os.getpid()))
                time.sleep(ORPHANS_POLL_S)


def descendants(pid: int) -> Iterator[int]:
    """All processes below one, parents first."""
    running = {int(path.name): read_process(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    parents = [pid]
    for parent in parents:
        children = [child for child, process in running.items() if process is not None and process.parent == parent]
        parents += children
        yield from children


def kill(pids: Iterable[int]) -> None:
    for pid in list(pids):
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(pid, signal.SIGKILL)
