"""Child processes that end with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from train.host.launcher import PR_SET_PDEATHSIG

POLL_S = 1.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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


def exit_code(process: subprocess.Popen[bytes], *, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Wait for a process, and call `meanwhile` every POLL_S; its exit code as shells report it."""
    while True:
        try:
            code = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            meanwhile()
        else:
            return 128 - code if code < 0 else code
