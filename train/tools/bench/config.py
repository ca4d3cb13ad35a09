"""Settings of a measurement: those of a run, and its duration and subject."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import TrainConfig, check, setting

MAX_PROCESSES = 4096
MOST_WINDOWS = 5  # whose spread is reported; the device is read in each


@dataclass(kw_only=True)
class BenchConfig(TrainConfig):
    """One measurement, or a sweep of them: `python -m train.bench --cfg job` prints it."""

    steps: int = setting(50, above=0)  # The number of optimizer steps that are timed.
    warmup: int = setting(10, least=1)  # The least number of steps before the timed ones, in which graphs are compiled.
    output: str | None = None  # The JSON file that gets all figures; None prints the table alone.
    max_memory_gib: float | None = setting(None, above=0)  # The host memory that a rank on CPUs may allocate; None
    # allows any, in a sweep what the machine has available.
    sweep: bool = False  # Try micro batches, with the same global batch, for the largest and the fastest.
    nproc: int = setting(1, above=0, most=MAX_PROCESSES)  # The number of ranks on this machine of each try of a sweep.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.sweep or self.nproc == 1, f"nproc={self.nproc} is the number of ranks of a sweep: add --sweep")

    @property
    def window(self) -> int:
        """Steps of one window: the timed steps are cut into at most five equal windows."""
        return self.steps // max(each for each in range(1, MOST_WINDOWS + 1) if self.steps % each == 0)

    @property
    def untimed(self) -> int:
        """Steps before the timed ones: whole windows."""
        return -(-self.warmup // self.window) * self.window
