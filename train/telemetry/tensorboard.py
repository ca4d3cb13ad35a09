"""TensorBoard's files. A full disk ends them, not the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger("train")
NO_CURVES = ("step", "steps", "examples", "epoch", "train_s", "tokens")


class Board:
    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer: SummaryWriter | None = None
        with self.giving_up():
            self.writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, kind: str, values: dict[str, Any]) -> None:
        """Write the numbers of a line of the metrics."""
        with self.giving_up():
            for name, value in values.items():
                if self.writer is not None and name not in NO_CURVES:
                    self.writer.add_scalar(f"{kind}/{name}", value, values["step"])

    def close(self) -> None:
        with self.giving_up():
            if self.writer is not None:
                self.writer.close()

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Inside, a write that the disk refuses ends TensorBoard's files, not the run."""
        try:
            yield
        except OSError as error:
            logger.warning("TensorBoard's files cannot be written (%s): no more of them", error.strerror)
            self.writer = None
