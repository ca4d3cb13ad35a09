"""What each rank has to say about the run after a step: stop, save, or a failure. No step waits for it.

A vote is posted before a step and counted after it: it travels while the devices work (benchmarks/ranks.py).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import NamedTuple

from train.attempt.preempt import StopRequest
from train.ranks import World


class Counted(NamedTuple):
    """Numbers of ranks."""

    stops: float
    saves: float
    failures: float


class Votes:
    """Every rank calls each method at the same steps."""

    def __init__(self, world: World, stop: StopRequest) -> None:
        self.world, self.stop = world, stop
        self.failure: Exception | None = None
        self.counting: Callable[[], list[float]] = list
        self.counted = Counted(0, 0, 0)

    def cast(self, failure: Exception | None) -> None:
        """Post this rank's vote; `failure`: why the run cannot continue after the step that begins now."""
        self.failure = failure
        self.counting = self.world.begin_sum(
            [self.stop.reason is not None, self.stop.saves_soon is not None, failure is not None]
        )

    def count(self) -> Counted:
        """The votes that were cast before the step."""
        self.counted = Counted(*self.counting())
        return self.counted

    def raise_failure(self) -> None:
        """Raise on all ranks the failure of one of them, if the last count has one."""
        if self.counted.failures:
            self.world.raise_failure(self.failure)

    def reasons(self) -> list[tuple[int, str, str, str]]:
        """Rank, reason, its kind and the host of each rank that was asked to stop."""
        answers = enumerate(self.world.all_gather_object((self.stop.reason, self.stop.kind, platform.node())))
        return [(rank, reason, kind, host) for rank, (reason, kind, host) in answers if reason is not None]
