"""TensorBoard's files. A full disk ends them, not the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("train")
NO_CURVES = ("step", "steps", "examples", "epoch", "train_s", "tokens")


class Board:
    """Opens its file at the first line: the import takes a while, and the first step need not wait for it."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        self.folder, self.first_step = folder, first_step
        self.writer: SummaryWriter | None = None
        self.has_given_up = False

    def add(self, kind: str, values: dict[str, Any]) -> None:
        """Write the numbers of a line of the metrics."""
        if self.has_given_up:
            return
        with self.giving_up():
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter  # late, see above

                self.writer = SummaryWriter(str(self.folder), purge_step=self.first_step)
            for name, value in values.items():
                if name not in NO_CURVES:
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
            self.writer, self.has_given_up = None, True
