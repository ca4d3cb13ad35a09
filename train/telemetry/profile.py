"""`profile=true`: PyTorch's trace of some steps of rank 0, and a page that says where their time went and what to try.
Tracing slows the steps it sees: shares of the window are to be read, not its seconds.
"""

from __future__ import annotations

import gzip
import logging
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from train.config import TrainConfig
from train.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from train.backend import Backend

logger = logging.getLogger("train")
MOST_ROWS = 15  # of the page's table
HIGH_WAIT, HIGH_IDLE, HIGH_EXCHANGE = 0.05, 0.2, 0.2  # shares from which on the page has advice
COMMUNICATION = ("c10d::", "gloo:", "nccl:", "ncclDevKernel", "record_param_comms")


class Profiler:
    """Traces steps `profile_after` to `profile_after + profile_steps` of an attempt. Only rank 0 has one."""

    def __init__(self, cfg: TrainConfig, folder: RunFolder, backend: Backend) -> None:
        self.cfg, self.folder, self.backend = cfg, folder, backend
        self.steps, self.wait_s = 0, 0.0
        self.tracing: Any = None

    def begin_step(self) -> None:
        """Call it before a step's batches are drawn."""
        if self.steps == self.cfg.profile_after:
            self.backend.copy_to_host([], [])  # waits for the device
            self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
            self.tracing = self.backend.tracer(Path(self.scratch.name) / "device")
            self.tracing.start()
            self.began_s, self.wait_s = time.perf_counter(), 0.0

    def end_step(self, wait_s: float) -> str:
        """Call it after a step; `wait_s` is what it waited for data. Returns what a fault line should tell: nothing."""
        self.steps += 1
        self.wait_s += wait_s
        if self.tracing is not None and self.steps == self.cfg.profile_after + self.cfg.profile_steps:
            self.backend.copy_to_host([], [])
            window_s = time.perf_counter() - self.began_s
            self.tracing.stop()
            with self.scratch as scratch:
                self.write(window_s, Path(scratch))
            self.tracing = None
        return ""

    def close(self) -> None:
        if self.tracing is not None:
            self.tracing.stop()
            self.scratch.cleanup()
            logger.warning("profile=true: the attempt ended before %d steps were traced", self.cfg.profile_steps)

    def write(self, window_s: float, scratch: Path) -> None:
        """Write page, trace and what the device's tools left in `scratch` into the run folder."""
        backend, folder = self.backend, self.folder.folder
        title = f"{backend.name} on {backend.device_name}, {backend.precision}: {self.cfg.profile_steps} steps"
        title += f" in {window_s:.3f} s, traced"
        text = page(
            self.tracing,
            title=title,
            window_s=window_s,
            wait_s=self.wait_s,
            may_compile=backend.may_compile,
            lacking=backend.lacking,
        )
        for file in (scratch / "device").rglob("*"):
            if file.is_file():
                folder.write(f"profile/{file.relative_to(scratch)}", file.read_bytes())
        self.tracing.export_chrome_trace(str(scratch / "trace.json"))
        folder.write("profile/trace.json.gz", gzip.compress((scratch / "trace.json").read_bytes()))
        folder.write("profile/summary.md", (text + backend.profile_text()).encode())
        logger.info("profile: %s/profile/summary.md; the trace beside it opens in ui.perfetto.dev", self.cfg.run_dir)


class HostTimer:
    """Times the operators that the device lacks, in the first step after they were seen. Rank 0 of a run without
    `profile=true` has one.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.timed = backend, backend.lacking
        self.tracing: Any = None

    def begin_step(self) -> None:
        if self.backend.lacking != self.timed:
            self.timed = self.backend.lacking
            self.tracing = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.tracing.start()

    def end_step(self, _wait_s: float) -> str:
        """What they took, if the step was traced and had any, in words for a fault line."""
        if self.tracing is None:
            return ""
        self.close()
        taken_s = on_host_s(self.tracing.events(), self.timed)
        self.tracing = None
        if not taken_s:  # they are those of an evaluation
            return ""
        names = ", ".join(sorted(self.timed))
        return f"in this step {taken_s:.3g} s went into {names} on the CPU, with the copies and waits for the device"

    def close(self) -> None:
        if self.tracing is not None:
            self.tracing.stop()


def page(
    tracing: Any,
    *,
    title: str,
    window_s: float,
    wait_s: float,
    may_compile: bool,
    lacking: Collection[str] = (),
) -> str:
    """The page, in Markdown, on what a torch.profiler.profile that has stopped saw: of a device of its own if there is
    one, else of the training's thread. `may_compile`: backend.compile is an option, and not used.
    `lacking`: operators that run on the host instead, as aten::sort.
    """
    events = tracing.events()
    kernels = [each for each in events if each.device_type.name != "CPU" and not each.is_user_annotation]
    has_device = bool(kernels)
    # Exchanges on the host are asynchronous: they last until the slowest rank has come, and the thread may work beside.
    own = [each for each in kernels or events if not each.is_async]
    computing = [each for each in own if not any(name in each.key for name in COMMUNICATION)]
    all_s, busy_s, computing_s = (covered_s(each) for each in (kernels or events, own, computing))
    idle, wait, exchange = max(0.0, 1 - busy_s / window_s), wait_s / window_s, (all_s - computing_s) / window_s
    lost = on_host_s(events, lacking) / window_s
    sort_by = "self_device_time_total" if has_device else "self_cpu_time_total"
    where = "the device" if has_device else "the training's thread"
    lines = [
        f"# Profile: {title}",
        "",
        "| share of the window | |",
        "|---|---|",
        f"| {where} idle | {idle:.1%} |",
        f"| waiting for data | {wait:.1%} |",
        f"| exchange between ranks, or waiting for one, with nothing beside it | {exchange:.1%} |",
        *([f"| operators that the device lacks, on the host | {lost:.1%} |"] if lacking else []),
        "",
        "```",
        tracing.key_averages().table(sort_by=sort_by, row_limit=MOST_ROWS, max_name_column_width=60).strip(),
        "```",
        "",
        "## What to try",
        "",
    ]
    if wait > HIGH_WAIT:
        lines.append("- Steps wait for data: raise data.num_workers, or prepare the data closer to the machine.")
    if has_device and idle > HIGH_IDLE:
        lines.append("- The device waits for the host: raise micro_batch_size (python -m train.bench --sweep).")
    if exchange > HIGH_EXCHANGE:
        lines.append(
            "- Ranks exchange gradients for long, or wait for a slow one (see the report's stragglers): raise the "
            "accumulation (a smaller micro_batch_size of a larger global_batch_size), or see docs/slow-links.md."
        )
    if may_compile:
        lines.append("- backend.compile=layers fuses what is neither a product nor an exchange.")
    lines.append("- A lower backend.precision and less padding (data.lengths) make every step shorter.")
    return "\n".join([*lines, ""])


def on_host_s(events: Iterable[Any], lacking: Collection[str]) -> float:
    """The seconds of those events that are operators which the device lacks."""
    names = {name.partition(".")[0] for name in lacking}  # without the overload, as a trace has them
    return covered_s(each for each in events if each.key in names)


def covered_s(events: Iterable[Any]) -> float:
    """The seconds in which at least one of the events ran."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((each.time_range.start, each.time_range.end) for each in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e6
