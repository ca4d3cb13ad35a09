"""This process and the torchrun that started it: it ends with torchrun, and can have torchrun end.

Nothing but the standard library here: it is called before all that takes seconds to import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
FIRST_SPEAKS_S = 5.0  # the time that local rank 0 has to refuse what another rank has refused


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
    """The nearest Python process above this one: torchrun, maybe with a user's script in between."""
    pid = os.getppid()
    while pid > 0 and not is_python(pid):
        pid = parent_of(pid)
    return pid or None


def is_python(pid: int) -> bool:
    """torchrun may be process 1 of a container; any other process 1 adopts orphans."""
    try:
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    except OSError:  # another user's, as is mostly process 1; any other one has the benefit of the doubt
        return pid != 1


def parent_of(pid: int) -> int:
    """0: it has none, or has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def leave_it_to_the_first(local_rank: int) -> None:
    """Under torchrun, wait on any rank but the machine's first: what is wrong is said once, if that one sees it too.
    torchrun then ends this process.
    """
    if is_under_torchrun() and local_rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(FIRST_SPEAKS_S)


def end_launcher() -> None:
    """Have torchrun end for good where it would start this machine's ranks again. To be called once all has been
    said.
    """
    restarts, limit = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if is_under_torchrun() and restarts != limit and (pid := find_launcher()) is not None:
        print("torchrun, which would start the run again, is asked to end; what follows is its report", file=sys.stderr)
        os.kill(pid, signal.SIGTERM)
