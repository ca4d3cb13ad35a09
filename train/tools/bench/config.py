"""Settings of `train.bench`: a run's settings, the number of steps to measure, and a sweep's settings."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import TrainConfig, check, setting

MAX_PROCESSES = 4096
MOST_WINDOWS = 5  # The median and extremes are taken over at most this many windows; each waits once for the device.


@dataclass(kw_only=True)
class BenchConfig(TrainConfig):
    """The settings of a measurement or a sweep. `python -m train.bench --cfg job` prints them."""

    steps: int = setting(50, above=0)  # The number of optimizer steps that are timed.
    warmup: int = setting(10, least=1)  # The minimum number of steps before the timed ones, for compiling graphs.
    output: str | None = None  # The JSON file for all figures; None only prints the table.
    max_memory_gib: float | None = setting(None, above=0)  # The host memory in GiB that a rank on CPUs may allocate;
    # None sets no limit, except in a sweep, where the ranks may allocate 90 % of the available memory.
    sweep: bool = False  # Find the largest micro batch that fits and the fastest one, at the same global batch size.
    nproc: int = setting(1, above=0, most=MAX_PROCESSES)  # The number of ranks that a sweep starts on this machine.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.sweep or self.nproc == 1, f"nproc={self.nproc} is only for a sweep; add --sweep, or use torchrun")

    @property
    def window(self) -> int:
        """Number of steps in a window. The timed steps are divided into at most MOST_WINDOWS equal windows."""
        return self.steps // max(each for each in range(1, MOST_WINDOWS + 1) if self.steps % each == 0)

    @property
    def untimed(self) -> int:
        """Number of steps before the timed ones: `warmup`, rounded up to whole windows."""
        return -(-self.warmup // self.window) * self.window
