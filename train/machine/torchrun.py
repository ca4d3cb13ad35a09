"""The link between this process and the torchrun that started it: the process ends with torchrun, and can end torchrun.

The module imports only the standard library, since it runs before the imports that take seconds.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from train.machine.console import say
from train.machine.processes import end_with_parent, is_alive, read_process

STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
    signal.SIGXCPU,
)
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # a variable, whose value differs for each rank and each start of the ranks
REJECTION = "rejected.txt"  # a file in torchrun's folder for one start of the ranks: the error that rejected this start


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_torchrun() -> None:
    """Have the kernel send SIGTERM to this rank when torchrun ends: an orphan would keep the device and the run folder.

    The kernel sends it when the thread that started this process ends: torchrun's main thread, which ends last. After
    SIGTERM the rank can still save. Raises SystemExit if torchrun, whose store the ranks need, has already ended.
    """
    if is_under_torchrun():
        end_with_parent(os.getppid())
        if find_torchrun() is None:
            sys.exit(
                "error: torchrun, which started this rank, has ended: process 1 has adopted the rank"
            )


@cache
def find_torchrun() -> tuple[int, int] | None:
    """Return the process id and the start time of torchrun, the parent; None if it had ended at the first call.

    Process 1 adopts the ranks of a torchrun that ended. In a container, it may be torchrun itself.
    """
    pid = os.getppid()
    process = read_process(pid)
    if process and (pid > 1 or runs_python(pid)):
        return (pid, process.started)
    return None


def runs_python(pid: int) -> bool:
    """Return whether a process is Python, perhaps in an emulator (Rosetta, QEMU), whose first argument it then is."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:2]
    except OSError:
        return False
    return any(Path(os.fsdecode(word)).name.startswith(("python", "torchrun")) for word in words)


def file_of_start(name: str) -> Path:
    """Return the path of a file that the ranks of this machine share during this start.

    It is in the folder two levels above the error file that torchrun names for each rank. Without torchrun, the path is
    one at which no file can be created.
    """
    error_file = os.environ.get(ERROR_FILE)
    if error_file:
        return Path(error_file).parents[1] / name
    return Path("/dev/null", name)


@contextmanager
def first_to(action: str, *, note: str = "done") -> Iterator[bool]:
    """Yield whether this rank is the first on its machine to do `action` during this start.

    Another rank waits until the first has done it, because torchrun ends all ranks as soon as one of them exits. The
    first then leaves `note`, which must not be empty, in a file of this name in torchrun's folder.
    """
    file = None
    with suppress(OSError):
        file = file_of_start(action).open("a")
    if file is None:  # without torchrun's folder, two ranks may act, which is better than none
        yield True
        return
    with file:
        with suppress(OSError):  # the file system may not support locks
            fcntl.flock(file, fcntl.LOCK_EX)
        is_first = os.fstat(file.fileno()).st_size == 0
        yield is_first
        if is_first:
            file.write(note)


def leave_rejection(rejection: str) -> None:
    """Write a rejection to a file for the program that started torchrun: torchrun exits with 1 after any failure."""
    with suppress(OSError), first_to(REJECTION, note=rejection):  # the disk may be full
        pass


def has_rejected() -> bool:
    """Return whether a rank of this machine was rejected during this start. torchrun then signals the other ranks."""
    return file_of_start(REJECTION).exists()


def end_torchrun() -> None:
    """End torchrun if it would restart this machine's ranks. Call it after all reports. Only the first rank acts."""
    restarts, limit = (
        os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    if is_under_torchrun() and restarts != limit:
        found = find_torchrun()
    else:
        found = None
    if found is not None and is_alive(*found) and runs_python(found[0]):
        with first_to("end") as is_first:
            if is_first:
                say(
                    "torchrun would restart the run, so it is asked to end; its report follows",
                    file=sys.stderr,
                )
                os.kill(found[0], signal.SIGTERM)


def leave_signals_to_the_parent(_worker: int) -> None:
    """Ignore signals in a loader worker.

    Schedulers and terminals signal every process of a job. A worker that died from such a signal would fail its rank
    before the rank has saved. Workers end when their rank ends.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
