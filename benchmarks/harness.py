"""What the benchmarks share: figures of several rounds, tables in Markdown, processes of their own, and the machine."""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Result = dict[str, Any]


def hide_torch_xla() -> None:
    """Keep torch_xla from this process: accelerate imports it where it is installed, and the Trainer then trains on it,
    use_cpu=True or not.
    """
    sys.modules["torch_xla"] = None  # type: ignore[assignment]


def three(values: Sequence[float]) -> tuple[float, float, float]:
    """The least, the median and the greatest."""
    return min(values), statistics.median(values), max(values)


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Least / **median** / greatest to so many digits, once if they are the same; nothing of nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    least, middle, greatest = (shown(value, digits) for value in three(known))
    return middle if least == greatest else f"{least} / **{middle}** / {greatest}"


def shown(value: float, digits: int = 3) -> str:
    """A number to so many digits, without exponents; whole numbers as they are."""
    if value == int(value):
        return f"{int(value):,}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def run(*command: str, **environment: str) -> str:
    """Run a command in the repository. Returns what it prints; RuntimeError with the end of its errors if it fails."""
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(*packages: str) -> str:
    """The processor, the system, and the versions of Python and of packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = f"{num_cpus()} virtual cores of {names[0] if names else platform.machine()}"
    versions = [f"{name} {metadata.version(name)}" for name in packages]
    return ", ".join((cores, platform.platform(terse=True), f"Python {platform.python_version()}", *versions))


def memory_mib(field: str) -> float | None:
    """A figure of this process from /proc/self/status: RssAnon, or VmHWM, the peak since it began its program. None
    where the kernel does not say.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:")), None)
