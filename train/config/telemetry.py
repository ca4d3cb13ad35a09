"""Settings of what is measured."""

from __future__ import annotations

from dataclasses import dataclass

from train.config.checks import check, check_positive


@dataclass(kw_only=True)
class StragglerConfig:
    # A rank is named once its own work takes this many times the median of the other ranks, and longer than in nine of
    # ten of its own earlier lines, and again when that is over.
    factor: float = 1.5
    windows: int = 5  # metrics lines in a row for which that holds; twice as many if it held from the start

    def __post_init__(self) -> None:
        check(self.factor > 1, f"straggler.factor={self.factor:g} must be above 1")
        check_positive("straggler.", self, "windows")
