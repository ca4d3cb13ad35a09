"""The output of a run: lines in metrics.jsonl, curves in TensorBoard, and the console."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from train.config import Failure
from train.observe import trackers
from train.observe.lines import read_back
from train.system.atomic_io import make_alike, open_alike
from train.system.outcome import ENDS
from train.system.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from train.observe.trackers import Tracker

logger = logging.getLogger("train")
MOST_WAITING = 100  # if more lines are waiting to be written, training waits for the disk


class Journal:
    """The writer of a run's metrics lines, on rank 0.

    A thread writes the train lines, so that training does not wait for the disk, the console or TensorBoard. Once
    another job owns the run folder, nothing more is written.
    """

    def __init__(self, folder: RunFolder, *, first_step: int, tensorboard: bool, to: Sequence[Tracker] = ()) -> None:
        folder.cut_half_written_line()
        self.folder, self.first_step, self.tensorboard = folder, first_step, tensorboard
        self.trackers, self.reason = to, ""
        newest = next(read_back(folder.local), None)
        self.attempt = 1 + (newest["attempt"] if newest else 0)
        self.owes_summary = newest is not None and newest["kind"] != "summary"  # the previous attempt was killed
        self.file = open_alike(folder.metrics, "ab")
        self.writer: SummaryWriter | None = None
        self.waiting: deque[tuple[dict[str, Any], Callable[[], None]]] = deque()
        self.has_lines, self.writing, self.is_closed = threading.Event(), threading.Lock(), False
        self.failure: Exception | None = None  # raised by the thread; the next call re-raises it
        self.thread = threading.Thread(target=self._write_beside, name="journal", daemon=True)

    @cached_property
    def cost_before_usd(self) -> float:
        """The cost of all earlier attempts, as their last lines report it; 0 if it is unknown."""
        costs = (line.get("cost_usd") for line in read_back(self.folder.local) if line["attempt"] < self.attempt)
        return next((cost for cost in costs if cost is not None), 0.0)

    def write(self, kind: str, values: dict[str, Any], then: Callable[[], None] = lambda: None) -> None:
        """Write a line, then call `then`. Lines are written in the order of the calls.

        Train lines may be written a little later; any other line is written immediately, after all waiting lines.
        Raises Failure if this line or an earlier one cannot be written.
        """
        line = {"kind": kind, "attempt": self.attempt, "time_unix_s": round(time.time(), 3), **values}
        self.waiting.append((line, then))
        if kind != "train" or len(self.waiting) > MOST_WAITING:
            self.flush()
            return
        if self.thread.ident is None:
            self.thread.start()
        self.has_lines.set()
        self._raise_failure()

    def flush(self) -> None:
        """Write the waiting lines. Raises Failure if a line cannot be written."""
        self._write_waiting()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _write_beside(self) -> None:
        while self.has_lines.wait() and not self.is_closed:
            self.has_lines.clear()
            self._write_waiting()

    def _write_waiting(self) -> None:
        with self.writing:
            lines = [self.waiting.popleft() for _ in range(len(self.waiting))]
            try:
                if lines and not self.file.closed and self.folder.ownership.may_append():
                    self._append([line for line, _ in lines])
                for _, then in lines:
                    then()
            except Exception as error:  # the next call to the journal re-raises it
                self.failure = error

    def _append(self, lines: Sequence[dict[str, Any]]) -> None:
        try:
            self.file.write(b"".join(map(encoded, lines)))
            self.file.flush()
        except OSError as error:
            with suppress(OSError):  # close() retries the failed write
                self.file.close()
            raise Failure(f"cannot write to {self.folder.metrics}: {error.strerror}") from error
        for line in lines:
            if line["kind"] in ("train", "eval"):
                if self.tensorboard:
                    self.add_curves(line)
                trackers.track(self.trackers, line)
            elif line["kind"] == "summary":
                self.reason = line["reason"]

    def add_curves(self, line: dict[str, Any]) -> None:
        try:
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter  # slow: the first step must not wait

                make_alike(self.folder.tensorboard)
                self.writer = SummaryWriter(str(self.folder.tensorboard), purge_step=self.first_step)
            for name, value in line.items():
                if name not in trackers.NO_CURVES:
                    self.writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        except OSError as error:
            logger.warning("cannot write TensorBoard's files (%s): the run continues without them", error.strerror)
            self.tensorboard = False

    def close(self, error: BaseException | None = None) -> None:
        """Write the waiting lines, close the files and, unless another job has taken over the run, end the trackers.

        Raises Failure if lines cannot be written, unless the run is already ending with an `error`.
        """
        self._write_waiting()
        self.is_closed = True
        self.has_lines.set()
        self.file.close()
        if self.writer is not None and self.tensorboard:
            self.writer.close()
        status = "FINISHED" if error is None and self.reason in ENDS else "KILLED"
        if isinstance(error, Exception):
            status = "FAILED"
        if self.folder.ownership.may_append() and not self.folder.ownership.lost:
            waits = error is None or isinstance(error, Exception)  # not after a second signal: exit now
            trackers.end(self.trackers, status, waits=waits)
        if error is None:
            self._raise_failure()


def encoded(line: dict[str, Any]) -> bytes:
    """Return a line as JSON. NaN and infinity, which JSON lacks, become null."""
    unknown = [key for key, value in line.items() if isinstance(value, float) and not math.isfinite(value)]
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
            disable=None if is_first_rank else True,  # None disables it unless the output is a terminal
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
