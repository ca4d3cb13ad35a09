"""The memory and processors that this process may use, its peak memory, and the number of OOM kills."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import psutil

CGROUPS, PROC = Path("/sys/fs/cgroup"), Path("/proc")


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
        used = (
            read_number(folder / "memory.current")
            or read_number(folder / "memory.usage_in_bytes")
            or 0
        )
        if (folder / "memory.stat").is_file():
            stat = (folder / "memory.stat").read_text()
        else:
            stat = ""
        dropped = re.search(r"^(?:total_)?inactive_file (\d+)", stat, re.MULTILINE)
        free.append(max(0, limit - max(0, used - int(dropped[1] if dropped else 0))))
    return min(free)


def memory_limits() -> list[tuple[Path, int]]:
    """Return the cgroups that limit this process's memory, with their limits in bytes."""
    found = []
    for folder in cgroup_folders("memory"):
        limit = read_number(folder / "memory.max") or read_number(folder / "memory.limit_in_bytes")
        # cgroup v1: about 2**63 if unlimited
        found += [] if limit is None or limit >= 2**60 else [(folder, limit)]
    return found


def usable_cpus() -> int:
    """Return the number of processors that this process may use, or its container's CPU quota if that is lower."""
    num_cpus = len(os.sched_getaffinity(0))
    for folder in cgroup_folders("cpu"):
        path = folder / "cpu.max"
        quota, period = path.read_text().split() if path.is_file() else ("max", "")
        # -1: no quota
        if not path.is_file() and (least := read_number(folder / "cpu.cfs_quota_us")):
            quota, period = str(least), str(read_number(folder / "cpu.cfs_period_us") or 100_000)
        if quota != "max":
            num_cpus = min(num_cpus, max(1, int(quota) // int(period)))
    return num_cpus


def cgroup_folders(controller: str) -> list[Path]:
    """Return the folders of this process's cgroup and its ancestors, innermost first."""
    # In a container, the process's cgroup may be mounted as the root; its ancestors are then not visible.
    found: list[Path] = []
    file = PROC / "self/cgroup"
    # names may contain any bytes
    if file.is_file():
        lines = os.fsdecode(file.read_bytes()).split("\n")
    else:
        lines = []
    for line in filter(None, lines):
        _, controllers, path = line.split(":", 2)
        # cgroup v2 has one tree for all controllers
        if controllers == "" or controller in controllers.split(","):
            if controllers:
                root = CGROUPS / controller
            else:
                root = CGROUPS
            # "..": the cgroup is above the container's root
            inside = Path("" if ".." in path else path.lstrip("/"))
            found += [root / each for each in (inside, *inside.parents)]
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
    names = ("memory.events", "memory.oom_control")  # cgroup v2, v1
    paths = (folder / name for folder in cgroup_folders("memory") for name in names)
    files = (path for path in (*paths, PROC / "vmstat") if path.is_file())
    return next((path for path in files if "oom_kill " in path.read_text()), None)


def count_oom_kills(counter: Path | None) -> int:
    """Return the number of OOM kills in a file that `find_oom_counter` found; 0 without a file."""
    if counter is None:
        return 0
    return next(
        int(line.split()[1])
        for line in counter.read_text().splitlines()
        if line.startswith("oom_kill ")
    )
