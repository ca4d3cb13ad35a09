"""Host memory: the peak of a process, and how many processes the kernel killed for lack of it. No torch here."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def own_peak_bytes() -> int:
    """Peak of this process, without its loaders."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux, getrusage(2)


def total_memory_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that programs can still take on this machine without swapping: MemAvailable of proc(5), on Linux alone."""
    line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def limit_allocations(most_bytes: int) -> None:
    """Have this process, and those that it starts from now on, fail to allocate more than this: RLIMIT_DATA counts
    private writable memory since Linux 4.7 (getrlimit(2)).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard == resource.RLIM_INFINITY or most_bytes < hard:
        resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard))


def find_oom_counter(*, cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Path | None:
    """The file that counts processes killed for lack of memory: of this process's cgroup, or of the machine.

    In a container the own cgroup may be mounted as the root, hence the second path.
    """
    paths: list[Path] = []
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for inside in (path.lstrip("/"), ""):
            if controllers == "":  # version 2
                paths.append(cgroups / inside / "memory.events")
            elif "memory" in controllers.split(","):
                paths.append(cgroups / "memory" / inside / "memory.oom_control")
    files = (path for path in (*paths, proc / "vmstat") if path.is_file())
    return next((path for path in files if "oom_kill " in path.read_text()), None)


def count_oom_kills(counter: Path | None) -> int:
    """The value of the counter; 0 if there is none."""
    if counter is None:
        return 0
    return next(int(line.split()[1]) for line in counter.read_text().splitlines() if line.startswith("oom_kill "))
