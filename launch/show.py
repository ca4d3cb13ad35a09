"""The plan as text."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from launch.job import Job
from train.config import PrepareConfig, TrainConfig

INDENT, WIDTH = 13, 110  # columns


def plan_lines(job: Job, run: TrainConfig | PrepareConfig, request: Sequence[str], bundle_bytes: int) -> list[str]:
    """What would be started, where, and with which command."""
    ranks = job.nodes * job.processes_per_node
    spares = f" and {job.spares} spare{'s' if job.spares > 1 else ''}" if job.spares else ""
    machines = f"{job.nodes} x {job.instance}{spares}, {job.processes_per_node} ranks each, {ranks} in all"
    if isinstance(run, PrepareConfig):
        machines = f"{job.parts} part{'s' if job.parts > 1 else ''} of the corpus, each on one {job.instance}"
    chosen = {key: value for key, value in job.cluster.items() if value not in (None, [], "")}
    return [
        line("run", f"{job.run_dir} ({job.module})"),
        line("settings", f"sha256 {job.config_sha256[:16]}: {shlex.join(job.overrides)}"),
        line("machines", machines),
        line("cluster", ", ".join(f"{key}={shown(value)}" for key, value in chosen.items())),
        line("code", f"{job.code.file}, {bundle_bytes / 1e3:.0f} kB, git {job.code.revision or 'none'}"),
        *paragraph("variables", "\n".join(f"{name}={value}" for name, value in sorted(job.environment.items()))),
        *([line("command", shlex.join(request))] if request else []),
    ]


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def line(head: str, text: str) -> str:
    return f"{head:{INDENT}}{text}"


def paragraph(head: str, text: str) -> list[str]:
    """Lines of text, the head before the first."""
    return [line("" if index else head, each) for index, each in enumerate(text.splitlines())]


def columns(rows: Sequence[Sequence[str]], align: Callable[[str, int], str] = str.rjust) -> list[str]:
    """Return rows as lines with aligned columns. A row with fewer cells ends in a remark of any length."""
    whole = [row for row in rows if len(row) == len(rows[0])]
    widths = [max(len(row[index]) for row in whole) for index in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [align(cell, width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join(cells if len(row) == len(widths) else [*cells[: len(row) - 1], row[-1]]).rstrip())
    return lines


def notes(texts: Sequence[str]) -> list[str]:
    """A list of remarks, wrapped."""
    return [line for text in texts for line in textwrap.wrap(text, WIDTH, initial_indent="- ", subsequent_indent="  ")]
