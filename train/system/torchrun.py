"""The link of this process to the torchrun that started it: it ends with torchrun, and can end torchrun.

It imports the standard library only, since it is called before everything that takes seconds to import.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from train.system.processes import end_with_parent, read_process

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
REJECTION = "rejected.txt"  # in torchrun's folder of a start of its ranks: the errors that rejected it


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_torchrun() -> None:
    """Get SIGTERM when torchrun ends: no orphan holds the device or the run folder, and it can still save.

    The kernel sends it when the thread that started this process ends: torchrun's main thread, its last one. Raises
    SystemExit if torchrun ended before this call: the rank would wait for torchrun's store until a timeout.
    """
    if is_under_torchrun():
        end_with_parent(os.getppid())
        if find_torchrun() is None:
            sys.exit("error: torchrun, which started this rank, has ended: no Python process is above it")


def find_torchrun() -> int | None:
    """Return the nearest Python process above this one: torchrun, perhaps with a user's script in between.

    Returns None if it has ended. It may be process 1 of a container; any other process 1 adopts those whose parent has
    ended.
    """
    pid = os.getppid()
    while pid > 0:
        try:
            is_python = "python" in Path(f"/proc/{pid}/exe").readlink().name
        except OSError:  # another user's, as process 1 usually is
            is_python = pid != 1
        if is_python:
            return pid
        process = read_process(pid)
        pid = process.parent if process else 0
    return None


def file_of_start(name: str) -> Path:
    """Return the path of a file that the ranks of this machine share in this start.

    It is two folders above the error file that torchrun names for each rank. Without torchrun it is a path at which no
    file can be made.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[1] / name if error_file else Path("/dev/null", name)


def is_first(action: str) -> bool:
    """Return whether this rank is the first one of its machine, in this start, that asks to do something."""
    try:
        file_of_start(action).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # torchrun keeps no such files: doing it twice is better than not at all
        pass
    return True


def is_reported() -> bool:
    """Return whether another rank of this machine has reported an error, so that this one need not."""
    return not is_first("reported")


def leave_rejection(rejection: str) -> None:
    """Write a rejection to a file for the program that started torchrun, whose exit code is 1 for every failure."""
    with suppress(OSError), file_of_start(REJECTION).open("a") as file:  # or torchrun keeps no such files
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)  # other ranks, one of which ends torchrun, wait until the line is synced
        if os.fstat(file.fileno()).st_size == 0:
            file.write(rejection)
            file.flush()


def has_rejected() -> bool:
    """Return whether a rank of this machine was rejected in this start: torchrun ends the others by a signal."""
    return file_of_start(REJECTION).exists()


def end_torchrun() -> None:
    """End torchrun where it would restart this machine's ranks, by the first rank that asks, once all is reported."""
    restarts, limit = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    pid = find_torchrun() if is_under_torchrun() and restarts != limit else None
    if pid is not None and is_first("ended"):
        print("torchrun, which would start the run again, is asked to end; what follows is its report", file=sys.stderr)
        os.kill(pid, signal.SIGTERM)


def leave_signals_to_the_parent(_worker: int) -> None:
    """Ignore signals in a loader worker.

    Schedulers and terminals signal every process of a job, and a worker that died of that would fail the rank before it
    has saved. Workers end when their rank does.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
