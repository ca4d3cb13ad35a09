"""This process and the torchrun that started it: the process ends with torchrun, and can end torchrun.

It imports the standard library only, since it is called before everything that takes seconds to import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from train.host.processes import read_process

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
REFUSAL = "refused.txt"  # in torchrun's folder of a start of its ranks: what they refused
FIRST_REPORTS_S = 5.0  # for local rank 0 to refuse what another rank has refused


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def die_with_launcher() -> None:
    """Under torchrun, ask the kernel for SIGTERM when torchrun ends: no orphan holds the device or the run folder, and
    it can still save.

    The kernel means the end of the thread that started this process: torchrun's main thread, which is its last one.
    """
    if not is_under_torchrun() or sys.platform != "linux":
        return
    before = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # torchrun may have ended meanwhile, or before this call. The latter cannot be seen where a Python process adopts
    # orphans; but then torchrun's store is gone as well, and joining the other ranks fails.
    if os.getppid() != before or find_launcher() is None:
        os.kill(os.getpid(), signal.SIGTERM)


def find_launcher() -> int | None:
    """The process id of the nearest Python process above this one: torchrun, maybe with a user's script in between."""
    pid = os.getppid()
    while pid > 0 and not is_python(pid):
        process = read_process(pid)
        pid = process.parent if process else 0
    return pid or None


def is_python(pid: int) -> bool:
    """Whether a process is Python. torchrun may be process 1 of a container; any other process 1 adopts orphans."""
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # another user's, as process 1 mostly is; any other one may be Python
        return pid != 1


def leave_it_to_the_first(local_rank: int) -> bool:
    """Whether another rank of this machine has reported an error, so that this one need not. Under torchrun every rank
    but the machine's first waits before it answers: an error that the first rank sees too ends this process meanwhile.
    """
    if not is_under_torchrun():
        return False
    if local_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(FIRST_REPORTS_S)
    # A slow machine may take longer than that, and only one rank is to speak: a file says so. torchrun names a file in
    # a folder of each rank, side by side in one of this attempt.
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    try:
        (error_file.parents[1] / "reported").touch(exist_ok=False)
    except FileExistsError:
        return True
    except (IndexError, OSError):  # torchrun keeps no such files; an error that is printed twice is better than none
        pass
    return False


def leave_refusal(refusal: str) -> None:
    """Leave what was rejected in a file for what started torchrun, whose exit code is 1 for every failure. The first
    rank of a machine that does so also has it printed below torchrun's report.
    """
    error_file = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    with suppress(IndexError, OSError):  # torchrun keeps no such files, or another rank was here first
        with (error_file.parents[1] / REFUSAL).open("x") as file:
            file.write(refusal)
        print_after_launcher(f"rejected: {refusal}")


def print_after_launcher(line: str) -> None:
    """Print a line when torchrun has ended: its own traceback of 25 lines would hide the reason. Linux only."""
    pid = find_launcher()
    if pid is None or sys.platform != "linux":
        return
    ended = os.pidfd_open(pid)
    wait = "import select, sys; select.select([int(sys.argv[1])], [], []); print(sys.argv[2], file=sys.stderr)"
    # A session of its own, since torchrun signals the rank's.
    subprocess.Popen([sys.executable, "-ISc", wait, str(ended), line], pass_fds=[ended], start_new_session=True)


def end_launcher() -> None:
    """End torchrun where it would start this machine's ranks again. Call it after everything has been reported."""
    restarts, limit = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if is_under_torchrun() and restarts != limit and (pid := find_launcher()) is not None:
        print("torchrun, which would start the run again, is asked to end; what follows is its report", file=sys.stderr)
        os.kill(pid, signal.SIGTERM)


def leave_signals_to_the_parent(_worker: int) -> None:
    """Ignore signals in a loader worker: schedulers and terminals signal every process of a job, but the rank decides
    what that means.

    A worker that died of the signal would fail the rank before it has saved. Workers end when their rank does.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
