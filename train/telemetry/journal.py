"""The lines of one attempt in metrics.jsonl, and their curves in TensorBoard."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from train.run_folder.folder import RunFolder
from train.telemetry.lines import LineFile, finite, read_lines
from train.telemetry.tensorboard import Board


class Journal:
    """Rank 0 opens it. Nothing is written once another job owns the run folder."""

    def __init__(self, folder: RunFolder, *, first_step: int, tensorboard: bool) -> None:
        folder.cut_half_written_line()
        self.folder = folder
        before = list(read_lines(folder.metrics))
        self.attempt = 1 + max((line["attempt"] for line in before), default=0)
        costs = (line.get("cost_usd") for line in reversed(before))
        known = (cost for cost in costs if type(cost) in (int, float) and 0 <= cost < math.inf)
        self.cost_before_usd: float = next(known, 0.0)  # of the earlier attempts, up to their last line
        self.file = LineFile(folder.metrics)
        self.board = Board(folder.tensorboard, first_step=first_step) if tensorboard else None

    def write(self, kind: str, values: dict[str, Any]) -> None:
        if self.folder.may_append():
            line = {"kind": kind, "attempt": self.attempt, "time_unix_s": round(time.time(), 3), **values}
            self.file.write(json.dumps({key: value if finite(value) else None for key, value in line.items()}))
            if self.board is not None and kind in ("train", "eval"):
                self.board.add(kind, values)

    def close(self) -> None:
        self.file.close(cuts_off=self.folder.may_append())
        if self.board is not None:
            self.board.close()
