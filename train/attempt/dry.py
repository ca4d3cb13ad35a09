"""The saver of a dry run, and the recorder of one that executes every graph once for train.precompile: its numbers mean
nothing.
"""

from __future__ import annotations

from typing import Any

from train.checkpoints.saver import Saver
from train.telemetry.metrics import Recorder


class DryRecorder(Recorder):
    """A recorder that reads the loss as often as any other, for the same graphs, but checks no number."""

    def read_skips(self) -> tuple[int, int]:
        return 0, 0

    def check_numbers(self, loss: float, grad_norm: float) -> None:
        pass

    def summary(self, reason: str, facts: dict[str, Any]) -> None:
        pass


class DrySaver(Saver):
    """A saver that writes no checkpoint."""

    def save(self, *state: Any, **options: Any) -> None:
        pass

    def warm(self) -> None:
        pass
