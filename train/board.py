"""TensorBoard's files. What a full disk refuses ends them, not the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger("train")
NO_CURVES = ("step", "examples", "epoch")


class Board:
    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer: SummaryWriter | None = None
        try:
            self.writer = SummaryWriter(str(folder), purge_step=first_step)
        except OSError as error:
            self.give_up(error)

    def add(self, kind: str, values: dict[str, Any]) -> None:
        """The numbers of a line of the metrics."""
        if self.writer is None:
            return
        try:
            for name, value in values.items():
                if name not in NO_CURVES:
                    self.writer.add_scalar(f"{kind}/{name}", value, values["step"])
        except OSError as error:
            self.give_up(error)

    def close(self) -> None:
        if self.writer is not None:
            try:
                self.writer.close()
            except OSError as error:
                self.give_up(error)

    def give_up(self, error: OSError) -> None:
        logger.warning("TensorBoard's files cannot be written (%s): no more of them", error.strerror)
        self.writer = None
