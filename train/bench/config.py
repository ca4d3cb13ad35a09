"""Settings of a measurement: those of a run, and how long and what to measure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from train.config import TrainConfig, check, setting

MAX_PROCESSES = 4096


@dataclass(kw_only=True)
class BenchConfig(TrainConfig):
    """One measurement, or a sweep of them: `python -m train.bench --cfg job` prints it."""

    steps: int = setting(50, above=0)  # optimizer steps that are timed
    warmup: int = setting(10, least=1)  # steps before them, at least; graphs are compiled in these
    windows: int = setting(5, above=0)  # parts of the timed steps, whose spread is reported; the device is read in each
    output: str | None = None  # JSON file that gets all figures; None: the table is all
    max_memory_gib: float | None = setting(None, above=0)  # host memory that a rank on CPUs may allocate; None: any, in
    # a sweep what the machine has available
    sweep: bool = False  # also --sweep: try micro batches, with the same global batch, for the largest and the fastest
    max_micro_batch: int | None = setting(None, above=0)  # sweep: the largest that is tried; None: a rank's whole share
    nproc: int = setting(1, above=0, most=MAX_PROCESSES)  # sweep: ranks of each try on this machine
    save_as: str | None = None  # sweep: name of the experiment that gets the result, conf/experiment/NAME.yaml;
    # None: it is printed

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.steps % self.windows == 0,
            f"steps={self.steps} must be a multiple of windows={self.windows}, its parts",
        )
        only = {"max_micro_batch": self.max_micro_batch, "save_as": self.save_as, "nproc": self.nproc - 1 or None}
        given = [name for name, value in only.items() if value is not None]
        check(self.sweep or not given, f"{', '.join(given)}: only a sweep has them; add --sweep")
        name = self.save_as
        check(
            name is None or re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name) is not None,
            f"save_as={name} is the name of an experiment: letters, digits, - and _",
        )

    @property
    def window(self) -> int:
        """Steps of one window."""
        return self.steps // self.windows

    @property
    def untimed(self) -> int:
        """Steps before the timed ones: whole windows."""
        return -(-self.warmup // self.window) * self.window
