"""The lines of one attempt in metrics.jsonl, and their curves in TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from train.config import Failure
from train.run_folder.folder import RunFolder
from train.telemetry.lines import read_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("train")
NO_CURVES = ("step", "steps", "examples", "epoch", "train_s", "tokens")


class Journal:
    """Rank 0 opens it. Nothing is written once another job owns the run folder."""

    def __init__(self, folder: RunFolder, *, first_step: int, tensorboard: bool) -> None:
        folder.cut_half_written_line()
        self.folder, self.first_step, self.tensorboard = folder, first_step, tensorboard
        before = list(read_lines(folder.metrics))
        self.attempt = 1 + max((line["attempt"] for line in before), default=0)
        costs = (line.get("cost_usd") for line in reversed(before))
        known = (cost for cost in costs if type(cost) in (int, float) and 0 <= cost < math.inf)
        self.cost_before_usd: float = next(known, 0.0)  # of the earlier attempts, up to their last line
        self.file = folder.metrics.open("ab")
        self.writer: SummaryWriter | None = None

    def write(self, kind: str, values: dict[str, Any]) -> None:
        if self.file.closed or not self.folder.may_append():
            return
        line = {"kind": kind, "attempt": self.attempt, "time_unix_s": round(time.time(), 3), **values}
        for key, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):  # which JSON does not have
                line[key] = None
        try:
            self.file.write(json.dumps(line).encode() + b"\n")
            self.file.flush()
        except OSError as error:
            with suppress(OSError):  # its buffer holds the line
                self.file.close()
            raise Failure(f"cannot write to {self.folder.metrics}: {error.strerror}") from error
        if self.tensorboard and kind in ("train", "eval"):
            self.add_curves(kind, values)

    def add_curves(self, kind: str, values: dict[str, Any]) -> None:
        try:
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter  # late: the first step need not wait for the import

                self.writer = SummaryWriter(str(self.folder.tensorboard), purge_step=self.first_step)
            for name, value in values.items():
                if name not in NO_CURVES:
                    self.writer.add_scalar(f"{kind}/{name}", value, values["step"])
        except OSError as error:
            logger.warning("TensorBoard's files cannot be written (%s): no more of them", error.strerror)
            self.tensorboard = False

    def close(self) -> None:
        self.file.close()
        if self.writer is not None and self.tensorboard:
            self.writer.close()
