"""The memory and processors that this process may use, its peak memory, and the number of OOM kills."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")


def own_peak_bytes() -> int:
    """Return the peak memory of this process in bytes, not counting its loader workers."""
    # ru_maxrss is in KiB on Linux, see getrusage(2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def total_memory_bytes() -> int:
    """Return the bytes of memory that this process can use: the machine's memory, or the container's limit if lower."""
    limits = [limit for _, limit in memory_limits()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def available_bytes() -> int:
    """Return the bytes of memory that programs can still allocate without swapping.

    In a container this is at most the limit minus the used memory; page cache that the kernel can drop counts as free.
    """
    free = [psutil.virtual_memory().available]
    for folder, limit in memory_limits():
        used = read_number(folder / "memory.current") or 0
        file = folder / "memory.stat"
        stat = file.read_text() if file.is_file() else ""
        dropped = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
        if dropped:
            used = max(0, used - int(dropped[1]))
        free.append(max(0, limit - used))
    return min(free)


def memory_limits() -> list[tuple[Path, int]]:
    """Return the cgroups that limit this process's memory, with their limits in bytes."""
    limits = []
    for folder in cgroup_folders():
        limit = read_number(folder / "memory.max")
        if limit is not None:
            limits.append((folder, limit))
    return limits


def usable_cpus() -> int:
    """Return the number of processors that this process may use, or its container's CPU quota if that is lower."""
    num_cpus = len(os.sched_getaffinity(0))
    for folder in cgroup_folders():
        path = folder / "cpu.max"
        if not path.is_file():
            continue
        quota, period = path.read_text().split()
        if quota != "max":
            num_cpus = min(num_cpus, max(1, int(quota) // int(period)))
    return num_cpus


def cgroup_folders() -> list[Path]:
    """Return the folders of this process's cgroup (version 2) and its ancestors, innermost first."""
    # In a container, the process's cgroup may be mounted as the root; its ancestors are then not visible.
    file = PROC / "self/cgroup"
    if not file.is_file():
        return []
    found: list[Path] = []
    # names may contain any bytes
    for line in os.fsdecode(file.read_bytes()).split("\n"):
        if line.startswith("0::"):
            path = line.removeprefix("0::")
            # "..": the cgroup is above the container's root
            inside = Path("" if ".." in path else path.lstrip("/"))
            found += [CGROUPS / each for each in (inside, *inside.parents)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def read_number(path: Path) -> int | None:
    """Return the number in a kernel file; None without a limit: the file is missing, or contains "max" or -1."""
    if path.is_file():
        text = path.read_text().strip()
    else:
        text = ""
    if text.isdigit():
        return int(text)
    return None


def find_oom_counter() -> Path | None:
    """Return the file that counts OOM kills in this process's cgroup, or on the machine; None without such a file."""
    of_groups = [folder / "memory.events" for folder in cgroup_folders()]
    for path in (*of_groups, PROC / "vmstat"):
        if path.is_file() and "oom_kill " in path.read_text():
            return path
    return None


def count_oom_kills(counter: Path | None) -> int:
    """Return the number of OOM kills in a file that `find_oom_counter` found; 0 without a file."""
    if counter is None:
        return 0
    return next(
        int(line.split()[1])
        for line in counter.read_text().splitlines()
        if line.startswith("oom_kill ")
    )
