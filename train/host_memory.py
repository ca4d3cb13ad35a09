"""Host memory: what processes have held, and whom the kernel has killed for the want of it. No torch here."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def own_peak_bytes() -> int:
    """Of this process, without its loaders."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux, getrusage(2)


def total_memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory(pid: int) -> int | None:
    """Bytes of host memory that a process has held at most; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else None


def find_oom_counter(*, cgroups: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Path | None:
    """The file that counts what the kernel killed for want of memory: of this process's cgroup, or of the machine.

    A container may show its cgroup as the root of all, hence the second try.
    """
    places: list[Path] = []
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for inside in (path.lstrip("/"), ""):
            if controllers == "":  # version 2
                places.append(cgroups / inside / "memory.events")
            elif "memory" in controllers.split(","):
                places.append(cgroups / "memory" / inside / "memory.oom_control")
    files = (path for path in (*places, proc / "vmstat") if path.is_file())
    return next((path for path in files if "oom_kill " in path.read_text()), None)


def count_oom_kills(counter: Path | None) -> int:
    if counter is None:
        return 0
    return next(int(line.split()[1]) for line in counter.read_text().splitlines() if line.startswith("oom_kill "))
