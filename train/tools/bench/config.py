"""Settings of `baretrain bench`: a run's settings, and the number of steps to measure."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import TrainConfig, setting

MOST_WINDOWS = 5  # The median and extremes are taken over at most this many windows; each waits once for the device.


@dataclass(kw_only=True)
class BenchConfig(TrainConfig):
    """The settings of a measurement. `baretrain bench --cfg job` prints them."""

    # The number of optimizer steps that are timed.
    steps: int = setting(50, above=0)
    # The minimum number of steps before the timed ones, for compiling graphs.
    warmup: int = setting(10, least=1)
    # The JSON file for all figures; None only prints the table.
    output: str | None = None

    @property
    def window(self) -> int:
        """Number of steps in a window. The timed steps are divided into at most MOST_WINDOWS equal windows."""
        return self.steps // max(
            each for each in range(1, MOST_WINDOWS + 1) if self.steps % each == 0
        )

    @property
    def untimed(self) -> int:
        """Number of steps before the timed ones: `warmup`, rounded up to whole windows."""
        return -(-self.warmup // self.window) * self.window
