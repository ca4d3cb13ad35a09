"""`profile=true`: a window of steps of rank 0 traced, and a page that says where their time went and what to try.

The trace is PyTorch's own, to be opened in Perfetto (https://ui.perfetto.dev) or chrome://tracing. Tracing slows the
steps it sees: shares of the window are to be read, not its seconds.
"""

from __future__ import annotations

import gzip
import logging
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from train.config import TrainConfig
from train.run_folder.folder import RunFolder

if TYPE_CHECKING:
    from train.backend import Backend

logger = logging.getLogger("train")
MOST_ROWS, NAME_CHARACTERS = 15, 60  # of the page's table
HIGH_WAIT, HIGH_IDLE, HIGH_SHARE = 0.05, 0.2, 0.2  # shares from which on the page gives advice
COMMUNICATION = ("c10d::", "gloo:", "nccl:", "ncclDevKernel", "record_param_comms")
UPDATE = ("Optimizer.step", "aten::_foreach", "aten::_fused_adam", "multi_tensor_apply")
PRODUCTS: tuple[str, ...] = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn", "attention")
PRODUCTS += ("gemm", "cutlass", "flash", "fmha", "nvjet")  # kernels of a GPU


@dataclass(frozen=True)
class Operation:
    """One kind of operation in the window."""

    name: str
    calls: int
    self_s: float  # without the operations that it calls; on the device, if the run has one of its own


@dataclass(frozen=True)
class Traced:
    """What a window of steps came to."""

    steps: int
    window_s: float  # wall time
    wait_s: float  # for data, in it
    busy_s: float  # of the device, or of the training's thread on a CPU
    exchange_s: float  # in which ranks exchanged something, or waited for one another, and nothing was computed
    operations: Sequence[Operation]
    is_on_host: bool  # whether the operations are the training thread's own

    def share(self, names: Iterable[str]) -> float:
        """The share of all operations' time that those with such a part in their name took."""
        all_s = sum(each.self_s for each in self.operations)
        some_s = sum(each.self_s for each in self.operations if any(name in each.name for name in names))
        return some_s / all_s if all_s else 0.0

    @property
    def idle(self) -> float:
        return max(0.0, 1 - self.busy_s / self.window_s)


class Profiler:
    """Traces steps `profile_after` to `profile_after + profile_steps` of an attempt. Only rank 0 has one."""

    def __init__(self, cfg: TrainConfig, folder: RunFolder, backend: Backend) -> None:
        self.cfg, self.folder, self.backend = cfg, folder, backend
        self.steps, self.wait_s = 0, 0.0
        self.tracing: Any = None

    def begin_step(self) -> None:
        """Call it before a step's batches are drawn."""
        if self.steps == self.cfg.profile_after:
            self.wait_for_device()
            self.tracing = torch.profiler.profile()
            self.tracing.start()
            self.began_s, self.wait_s = time.perf_counter(), 0.0

    def end_step(self, wait_s: float) -> None:
        """Call it after a step; `wait_s` is what it waited for data."""
        self.steps += 1
        self.wait_s += wait_s
        if self.tracing is not None and self.steps == self.cfg.profile_after + self.cfg.profile_steps:
            self.wait_for_device()
            window_s = time.perf_counter() - self.began_s
            self.tracing.stop()
            self.write(window_s)
            self.tracing = None

    def close(self) -> None:
        if self.tracing is not None:
            self.tracing.stop()
            self.tracing = None
            logger.warning("profile=true: the attempt ended before %d steps were traced", self.cfg.profile_steps)

    def wait_for_device(self) -> None:
        self.backend.copy_to_host([], [])

    def write(self, window_s: float) -> None:
        """Trace and page, into the run folder."""
        traced = summarise(self.tracing, self.cfg.profile_steps, window_s, self.wait_s)
        title = f"{self.backend.name} on {self.backend.device_name}, {self.backend.precision}"
        text = page(traced, title=title, may_compile=self.backend.may_compile)
        text += self.backend.profile_text()
        with tempfile.TemporaryDirectory() as scratch:
            raw = Path(scratch) / "trace.json"
            self.tracing.export_chrome_trace(str(raw))
            with raw.open("rb") as source, gzip.open(f"{raw}.gz", "wb") as target:
                shutil.copyfileobj(source, target)
            self.folder.folder.write("profile/trace.json.gz", Path(f"{raw}.gz").read_bytes())
        self.folder.folder.write("profile/summary.md", text.encode())
        logger.info("profile: %s/profile/summary.md; the trace beside it opens in ui.perfetto.dev", self.cfg.run_dir)


def summarise(tracing: Any, steps: int, window_s: float, wait_s: float) -> Traced:
    """What a torch.profiler.profile that has stopped saw: of a device of its own if there is one, else of the host."""
    events, averages = tracing.events(), tracing.key_averages()
    on_device = any(map(is_work_of_device, events))
    if on_device:  # the host's operations carry the times of their kernels once more
        events, averages = (list(filter(is_work_of_device, each)) for each in (events, averages))
    # Exchanges on the host are asynchronous: they last until the slowest rank has come, and the thread may work beside.
    own = [each for each in events if not each.is_async]
    computing = [each for each in own if not any(name in each.key for name in COMMUNICATION)]
    operations = [
        Operation(each.key, each.count, (each.self_device_time_total if on_device else each.self_cpu_time_total) / 1e6)
        for each in averages
    ]
    operations.sort(key=lambda each: -each.self_s)
    all_s, busy_s, computing_s = (covered(spans(each)) / 1e6 for each in (events, own, computing))
    return Traced(steps, window_s, wait_s, busy_s, all_s - computing_s, operations, is_on_host=not on_device)


def is_work_of_device(event: Any) -> bool:
    """Whether an event, or an average of some, is a kernel or a copy. Annotations only span such."""
    return event.device_type.name != "CPU" and not event.is_user_annotation


def spans(events: Iterable[Any]) -> list[tuple[float, float]]:
    return [(each.time_range.start, each.time_range.end) for each in events]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def page(traced: Traced, *, title: str, may_compile: bool) -> str:
    """The page, in Markdown."""
    window_s, operations = traced.window_s, traced.operations
    all_s = sum(each.self_s for each in operations) or 1.0
    where = "the training's thread" if traced.is_on_host else "the device"
    lines = [
        f"# Profile: {title}",
        "",
        f"{traced.steps} steps in {window_s:.3f} s, traced ({window_s / traced.steps:.4f} s a step).",
        "",
        "| share of the window | |",
        "|---|---|",
        f"| {where} idle | {traced.idle:.1%} |",
        f"| waiting for data | {traced.wait_s / window_s:.1%} |",
        f"| exchange between ranks, or waiting for one, with nothing beside it | {traced.exchange_s / window_s:.1%} |",
        "",
        "| share of the operations | |",
        "|---|---|",
        f"| products and attention | {traced.share(PRODUCTS):.1%} |",
        f"| update of the weights | {traced.share(UPDATE):.1%} |",
        "",
        "| operation | calls a step | s a step | share |",
        "|---|---|---|---|",
        *(
            f"| `{each.name[:NAME_CHARACTERS].replace('|', ' ')}` | {each.calls / traced.steps:,.1f} "
            f"| {each.self_s / traced.steps:.5f} | {each.self_s / all_s:.1%} |"
            for each in operations[:MOST_ROWS]
        ),
        "",
        "## What to try",
        "",
        *(f"- {each}" for each in advice(traced, may_compile=may_compile)),
        "",
    ]
    return "\n".join(lines)


def advice(traced: Traced, *, may_compile: bool) -> list[str]:
    """What the shares suggest, the largest gain first. `may_compile`: backend.compile is an option, and not used."""
    ideas = []
    if traced.wait_s / traced.window_s > HIGH_WAIT:
        ideas.append("Steps wait for data: raise data.num_workers, or prepare the data closer to the machine.")
    if not traced.is_on_host and traced.idle > HIGH_IDLE:
        compiling = ", or try backend.compile=layers, with backend.cuda_graphs=true for small batches"
        ideas.append(
            "The device waits for the host: raise micro_batch_size (python -m train.bench --sweep)"
            f"{compiling if may_compile else ''}."
        )
    if traced.exchange_s / traced.window_s > HIGH_SHARE:
        ideas.append(
            "Ranks exchange gradients for long, or wait for a slow one (see the report's stragglers): raise the "
            "accumulation (a smaller micro_batch_size of a larger global_batch_size), or see docs/slow-links.md."
        )
    if traced.share(UPDATE) > HIGH_SHARE:
        ideas.append("The update takes long for so little work between: raise global_batch_size.")
    rest = 1 - traced.share((*PRODUCTS, *COMMUNICATION, *UPDATE))
    if may_compile and rest > 2 * HIGH_SHARE:
        ideas.append(
            f"{rest:.0%} of the operations' time is neither products nor exchange: backend.compile=layers fuses it."
        )
    if not ideas:
        ideas.append(
            "Nothing stands out: a lower backend.precision, less padding (data.lengths) or faster devices are left."
        )
    return ideas
