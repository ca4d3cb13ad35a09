"""The output of a run: lines in metrics.jsonl, curves in TensorBoard, and the console."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from train.machine.console import RESULT, speech
from train.observe.lines import read_back
from train.observe.trackers import NO_CURVES
from train.run_folder.outcome import ENDS
from train.run_folder.run_folder import RunFolder, side_channel

if TYPE_CHECKING:
    from train.observe.curves import Curves
    from train.observe.trackers import Tracker

logger = logging.getLogger("train")
FIRST_PAUSE_S = 10.0  # between the first lines on training
MOST_WAITING = 100  # if more lines are waiting to be written, training waits for the disk
NO_CURVES_WRITTEN = "TensorBoard's files are not written"


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
        self.folder = folder
        self.first_step = first_step
        self.tensorboard = tensorboard
        self.trackers = to
        self.reason = ""  # why the run ended
        newest = next(read_back(folder.local), None)
        self.attempt = 1
        self.owes_summary = False
        if newest is not None:
            self.attempt += newest["attempt"]
            self.owes_summary = newest["kind"] != "summary"  # the previous attempt was killed
        folder.metrics.touch()
        self.curves: Curves | None = None
        self.waiting: deque[tuple[dict[str, Any], Callable[[], None]]] = deque()
        self.has_lines = threading.Event()
        self.writing = threading.Lock()
        self.is_closed = False
        self.thread = threading.Thread(target=self._write_beside, name="journal", daemon=True)

    @cached_property
    def cost_before_usd(self) -> float:
        """The cost of all earlier attempts, as their last lines report it; 0 if it is unknown."""
        for line in read_back(self.folder.local):
            if line["attempt"] < self.attempt and line.get("cost_usd") is not None:
                return float(line["cost_usd"])
        return 0.0

    def write(
        self, kind: str, values: dict[str, Any], then: Callable[[], None] = lambda: None
    ) -> None:
        """Write a line, then call `then`. Lines are written in the order of the calls.

        Train lines may be written a little later; any other line is written immediately, after all waiting lines.
        """
        when_s = round(time.time(), 3)
        line = {"kind": kind, "attempt": self.attempt, "time_unix_s": when_s, **values}
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
        kept = f"lines are kept in memory until they can be written to {self.folder.metrics}"
        with side_channel(kept):
            self.folder.lines.append(b"".join(map(encoded, lines)))
        for line in lines:
            if line["kind"] in ("train", "eval"):
                with side_channel(NO_CURVES_WRITTEN):
                    self.add_curves(line)
                for tracker in self.trackers:
                    tracker.track(line)
            elif line["kind"] == "summary":
                self.reason = line["reason"]

    def add_curves(self, line: dict[str, Any]) -> None:
        if not self.tensorboard:
            return
        self.tensorboard = False  # unless it succeeds
        if self.curves is None:
            # The first step must not wait for this import.
            from train.observe.curves import Curves

            self.curves = Curves(self.folder.tensorboard, first_step=self.first_step)
        scalars = {}
        for name, value in line.items():
            if name not in NO_CURVES:
                scalars[f"{line['kind']}/{name}"] = value
        self.curves.add(scalars, step=line["step"], time_unix_s=line["time_unix_s"])
        self.tensorboard = True

    def close(self, error: BaseException | None = None) -> None:
        """Write the waiting lines, close the files and, unless another job has taken over the run, end the trackers."""
        self.write_waiting()
        self.is_closed = True
        self.has_lines.set()
        if self.folder.lines.kept and self.folder.ownership.may_append():
            with self.folder.logging_failures():
                self.folder.lines.append()
        self.folder.lines.close()
        if self.curves is not None:
            with side_channel(NO_CURVES_WRITTEN):
                self.curves.close()
        if error is not None and not isinstance(error, Exception):
            return  # after a second signal, the process exits now
        status = "KILLED"
        if error is not None:
            status = "FAILED"
        elif self.reason in ENDS:
            status = "FINISHED"
        if self.folder.ownership.may_append() and not self.folder.ownership.lost:
            for tracker in self.trackers:
                tracker.end(status)


def encoded(line: dict[str, Any]) -> bytes:
    """Return a line as JSON. NaN and infinity, which JSON lacks, become null."""
    known: dict[str, Any] = {}
    for key, value in line.items():
        is_number = not isinstance(value, float) or math.isfinite(value)
        known[key] = value if is_number else None
    return json.dumps(known).encode() + b"\n"


class RunConsole:
    """Log lines on training and evaluations, and a progress bar if the output is a terminal."""

    def __init__(self, *, step: int, total_steps: int, is_first_rank: bool) -> None:
        self.total_steps = total_steps
        self.width = len(str(total_steps))
        self.bar = tqdm(
            total=total_steps,
            initial=step,
            unit="step",
            dynamic_ncols=True,
            # None: unless the output is a terminal
            disable=None if is_first_rank and not speech.is_quiet else True,
        )
        self.due_s = 0.0  # of this attempt's seconds in steps: when the next line is due

    def train(self, line: dict[str, Any]) -> None:
        step = line["step"]
        spent_s = line["train_s"]
        left_s = (self.total_steps - step) * line["step_s"]
        shown = {
            "loss": f"{line['loss']:.3f}",
            "tokens/s": f"{line['tokens_per_s']:,.0f}",
        }
        if "mfu" in line:
            shown["mfu"] = f"{line['mfu']:.1%}"
        self.bar.set_postfix(shown, refresh=False)
        if spent_s < self.due_s and left_s > 0 and not speech.all_lines:
            return
        self.due_s = spent_s + pause_s(spent_s, left_s)
        parts = [
            f"step {step:{self.width}}/{self.total_steps}",
            f"{step / self.total_steps:4.0%}",
            f"left {timedelta(seconds=round(left_s))}",
            f"loss {line['loss']:7.4f}",
            f"lr {line['lr']:.2e}",
            f"grad {line['grad_norm']:6.3f}",
            f"{line['tokens_per_s']:9,.0f} tokens/s",
        ]
        if "mfu" in line:
            parts.append(f"mfu {line['mfu']:5.1%}")
        waited = line["data_wait_s"] / (line["step_s"] * line["steps"])
        parts.append(f"data wait {waited:4.0%}")
        if "compile_s" in line:
            parts.append(f"compiled {line['compile_s']:.1f} s")
        logger.info("  ".join(parts))

    def evaluation(self, step: int, metrics: dict[str, float], eval_s: float) -> None:
        level = logging.INFO
        if step == self.total_steps:
            level = RESULT
        words = evaluation_words(metrics, eval_s)
        logger.log(level, f"step {step:{self.width}} {words}")


def pause_s(spent_s: float, left_s: float) -> float:
    """Return the seconds until the next line on training: 10 at first, later more, for at most some 200 lines."""
    rarer_s = min(spent_s / 8, (spent_s + left_s) / 150)
    return max(FIRST_PAUSE_S, rarer_s)


def evaluation_words(metrics: dict[str, float], eval_s: float) -> str:
    parts = ["evaluation"]
    for name, value in metrics.items():
        parts.append(f"{name} {value:.4f}")
    parts.append(f"({eval_s:.1f} s)")
    return "  ".join(parts)
