"""The output of a run: lines in metrics.jsonl, curves in TensorBoard, and the console."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from train.observe import trackers
from train.observe.lines import read_back
from train.run_folder.outcome import ENDS
from train.run_folder.run_folder import RunFolder, side_channel

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from train.observe.trackers import Tracker

logger = logging.getLogger("train")
MOST_WAITING = 100  # if more lines are waiting to be written, training waits for the disk


class Journal:
    """The writer of a run's metrics lines, on rank 0.

    A thread writes the train lines, so that training does not wait for the disk, the console or TensorBoard. None of
    them can end the run: lines that the disk does not take are kept and written later, and `RunFolder.mirror` commits
    no checkpoint without them. Once another job owns the run folder, nothing more is written.
    """

    def __init__(
        self, folder: RunFolder, *, first_step: int, tensorboard: bool, to: Sequence[Tracker] = ()
    ) -> None:
        folder.cut_half_written_line()
        self.folder, self.first_step, self.tensorboard = folder, first_step, tensorboard
        self.trackers, self.reason = to, ""
        newest = next(read_back(folder.local), None)
        self.attempt = 1 + (newest["attempt"] if newest else 0)
        # the previous attempt was killed
        self.owes_summary = newest is not None and newest["kind"] != "summary"
        folder.metrics.touch()
        self.writer: SummaryWriter | None = None
        self.waiting: deque[tuple[dict[str, Any], Callable[[], None]]] = deque()
        self.has_lines, self.writing, self.is_closed = threading.Event(), threading.Lock(), False
        self.thread = threading.Thread(target=self._write_beside, name="journal", daemon=True)

    @cached_property
    def cost_before_usd(self) -> float:
        """The cost of all earlier attempts, as their last lines report it; 0 if it is unknown."""
        costs = (
            line.get("cost_usd")
            for line in read_back(self.folder.local)
            if line["attempt"] < self.attempt
        )
        return next((cost for cost in costs if cost is not None), 0.0)

    def write(
        self, kind: str, values: dict[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Write a line, then call `then`. Lines are written in the order of the calls.

        Train lines may be written a little later; any other line is written immediately, after all waiting lines.
        """
        line = {
            "kind": kind,
            "attempt": self.attempt,
            "time_unix_s": round(time.time(), 3),
            **values,
        }
        self.waiting.append((line, then))
        if kind != "train" or len(self.waiting) > MOST_WAITING:
            self.write_waiting()
            return
        if self.thread.ident is None:
            self.thread.start()
        self.has_lines.set()

    def _write_beside(self) -> None:
        while self.has_lines.wait() and not self.is_closed:
            self.has_lines.clear()
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write the waiting lines."""
        with self.writing:
            lines = [self.waiting.popleft() for _ in range(len(self.waiting))]
            if lines and not self.is_closed and self.folder.ownership.may_append():
                self._append([line for line, _ in lines])
            for _, then in lines:
                with side_channel("the console"):
                    then()

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        with side_channel(
            f"lines are kept in memory until they can be written to {self.folder.metrics}"
        ):
            self.folder.lines.append(b"".join(map(encoded, lines)))
        for line in lines:
            if line["kind"] in ("train", "eval"):
                if self.tensorboard:
                    self.add_curves(line)
                with side_channel("trackers"):
                    trackers.track(self.trackers, line)
            elif line["kind"] == "summary":
                self.reason = line["reason"]

    def add_curves(self, line: dict[str, Any]) -> None:
        self.tensorboard = False  # unless it succeeds, or the disk fails, which may pass
        with side_channel("TensorBoard's files are not written"):
            try:
                if self.writer is None:
                    # slow: the first step must not wait
                    from torch.utils.tensorboard import (
                        SummaryWriter,
                    )

                    self.folder.tensorboard.mkdir(parents=True, exist_ok=True)
                    self.writer = SummaryWriter(
                        str(self.folder.tensorboard), purge_step=self.first_step
                    )
                for name, value in line.items():
                    if name not in trackers.NO_CURVES:
                        self.writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
                self.tensorboard = True
            except OSError:
                # its thread ends with its first failure
                self.writer, self.tensorboard = (
                    None,
                    True,
                )
                self.first_step = line["step"]
                raise

    def close(self, error: BaseException | None = None) -> None:
        """Write the waiting lines, close the files and, unless another job has taken over the run, end the trackers."""
        self.write_waiting()
        self.is_closed = True
        self.has_lines.set()
        if self.folder.lines.kept and self.folder.ownership.may_append():
            with self.folder.logging_failures():
                self.folder.lines.append()
        self.folder.lines.close()
        if self.writer is not None:
            with side_channel("TensorBoard's files are not written"):
                self.writer.close()
        status = "FINISHED" if error is None and self.reason in ENDS else "KILLED"
        if isinstance(error, Exception):
            status = "FAILED"
        if self.folder.ownership.may_append() and not self.folder.ownership.lost:
            # not after a second signal: exit now
            waits = error is None or isinstance(error, Exception)
            trackers.end(self.trackers, status, waits=waits)


def encoded(line: dict[str, Any]) -> bytes:
    """Return a line as JSON. NaN and infinity, which JSON lacks, become null."""
    unknown = [
        key for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    return json.dumps({**line, **dict.fromkeys(unknown)}).encode() + b"\n"


class RunConsole:
    """Log lines on training and evaluations, and a progress bar if the output is a terminal."""

    def __init__(self, *, step: int, total_steps: int, is_first_rank: bool) -> None:
        self.total_steps, self.width = total_steps, len(str(total_steps))
        self.bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            disable=None
            if is_first_rank
            else True,  # None disables it unless the output is a terminal
        )

    def train(self, line: dict[str, Any]) -> None:
        loss, speed, mfu = line["loss"], line["tokens_per_s"], line.get("mfu")
        shown = {"loss": f"{loss:.3f}", "tokens/s": f"{speed:,.0f}"}
        self.bar.set_postfix(shown | ({} if mfu is None else {"mfu": f"{mfu:.1%}"}), refresh=False)
        logger.info(
            f"step {line['step']:{self.width}}/{self.total_steps}  loss {loss:7.4f}  lr {line['lr']:.2e}  "
            f"grad {line['grad_norm']:6.3f}  {speed:9,.0f} tokens/s"
            + ("" if mfu is None else f"  mfu {mfu:5.1%}")
            + f"  data wait {line['data_wait_s'] / (line['step_s'] * line['steps']):4.0%}"
            + (f"  compiled {line['compile_s']:.1f} s" if "compile_s" in line else "")
        )

    def evaluation(self, step: int, metrics: dict[str, float], eval_s: float) -> None:
        logger.info(f"step {step:{self.width}} {evaluation_words(metrics, eval_s)}")


def evaluation_words(metrics: dict[str, float], eval_s: float) -> str:
    shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
    return f"evaluation  {shown}  ({eval_s:.1f} s)"
