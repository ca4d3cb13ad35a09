"""The profiler that `profile=true` turns on: a PyTorch trace of some steps of rank 0, and a table of its kernels.

Tracing slows these steps down: compare the shares of time that kernels take, not the times themselves.
"""

from __future__ import annotations

import gzip
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from train.config import TrainConfig
from train.machine.versions import release
from train.run_folder.run_folder import RunFolder, side_channel

if TYPE_CHECKING:
    from train.parallel.backends import Backend

logger = logging.getLogger("train")
FIRST, STEPS = 10, 5  # steps to skip (graphs compile and caches fill), and then steps to trace
GRAPHS_OUTLIVE_CUPTI = (12, 6)  # release of CUDA; torch/profiler/profiler.py has the same limit
NO_PROFILE = "the profile is not written"
MOST_ROWS = 30  # maximum number of rows in the table


def keep_cupti() -> None:
    """Keep CUDA's tracing library loaded after a trace if its CUDA graphs would crash without it, before CUDA 12.6.

    torch does this for the graphs of torch.compile, but does not know of ours.
    """
    if torch.version.cuda and release(torch.version.cuda) < GRAPHS_OUTLIVE_CUPTI:
        os.environ.update({"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"})


class Profiler:
    """The trace of some steps of an attempt, on rank 0 only."""

    def __init__(self, cfg: TrainConfig, folder: RunFolder, backend: Backend) -> None:
        self.cfg = cfg
        self.folder = folder
        self.backend = backend
        self.steps = 0
        self.tracing: Any = None

    def begin_step(self) -> None:
        """Begin the trace if it is due. Call this before a step's batches are drawn."""
        if self.steps == FIRST:
            self.backend.copy_to_host([], [])  # waits for the device
            with side_channel(NO_PROFILE):
                keep_cupti()
                self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                tracing = torch.profiler.profile()
                tracing.start()
                self.tracing = tracing

    def end_step(self) -> None:
        """End the trace if it is complete. Call this after each step."""
        self.steps += 1
        if self.tracing is not None and self.steps == FIRST + STEPS:
            self.backend.copy_to_host([], [])
            with side_channel(NO_PROFILE), self.scratch as scratch:
                self.tracing.stop()
                self.write(Path(scratch))
            self.tracing = None

    def close(self) -> None:
        if self.tracing is not None:
            with side_channel(NO_PROFILE), self.scratch:
                self.tracing.stop()
        if self.steps < FIRST + STEPS:
            last = FIRST + STEPS
            logger.warning(
                "profile=true traces steps %d to %d of an attempt; this attempt had %d",
                FIRST + 1,
                last,
                self.steps,
            )

    def write(self, scratch: Path) -> None:
        """Write the table and the trace to the run folder, by way of `scratch`."""
        backend = self.backend
        folder = self.folder.folder
        rows = self.tracing.key_averages()
        has_device = any(row.self_device_time_total > 0 for row in rows)
        sort_by = "self_device_time_total" if has_device else "self_cpu_time_total"
        table = rows.table(sort_by=sort_by, row_limit=MOST_ROWS, max_name_column_width=60).strip()
        title = (
            f"{backend.name} on {backend.device_name}, {backend.precision}: {STEPS} traced steps"
        )
        self.tracing.export_chrome_trace(str(scratch / "trace.json"))
        folder.write("profile/trace.json.gz", gzip.compress((scratch / "trace.json").read_bytes()))
        folder.write("profile/table.txt", f"{title}\n\n{table}\n{backend.profile_text()}".encode())
        logger.info(
            "profile: %s/profile/table.txt; open trace.json.gz next to it in ui.perfetto.dev",
            self.cfg.run_dir,
        )
