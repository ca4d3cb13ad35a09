"""Which rank holds the others up: each rank's own work, waiting for others left out, against the median of all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from train.config import StragglerConfig

WARM_UP = 1  # lines that say nothing: the first steps compile, open files, fill caches


class Stragglers:
    """Sees, with every line of the metrics, the seconds that each rank worked since the one before."""

    def __init__(self, cfg: StragglerConfig, hosts: Sequence[str]) -> None:
        """`hosts` [world_size]: the machine of each rank."""
        self.cfg, self.hosts = cfg, hosts
        self.seen = 0
        self.suspect, self.in_a_row = -1, 0
        self.fields: dict[str, float] = {}  # for the line
        self.alarm: str | None = None

    def see(self, works_s: Sequence[float]) -> None:
        """`works_s` [world_size]. Ranks alike see the same."""
        self.seen += 1
        median_s = statistics.median_low(works_s)
        if len(self.hosts) == 1 or self.seen <= WARM_UP or median_s <= 0:
            return
        slowest = max(range(len(self.hosts)), key=lambda rank: works_s[rank])
        ratio = works_s[slowest] / median_s
        self.fields = {"slowest_rank": slowest, "slowest_ratio": ratio}
        is_slow = ratio > self.cfg.factor
        self.in_a_row = (self.in_a_row + 1 if slowest == self.suspect else 1) if is_slow else 0
        self.suspect = slowest if is_slow else -1
        if self.in_a_row == self.cfg.windows:
            self.alarm = (
                f"rank {slowest} on {self.hosts[slowest]} holds the others up: its own work takes {ratio:.1f} times "
                f"the median of all ranks, {self.cfg.windows} lines in a row; look at that machine (train.doctor)"
            )

    def take_alarm(self) -> str | None:
        taken, self.alarm = self.alarm, None
        return taken
