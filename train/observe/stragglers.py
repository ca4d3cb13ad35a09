"""Detection of stragglers: ranks that work longer than other ranks, and longer than they did before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FACTOR = 1.5  # a rank is slow if its work time exceeds this multiple of the other ranks' median
WINDOWS = 5  # a rank is reported after this many slow lines in a row; twice that at the start
# number of train lines to ignore at first: their steps compile, open files and fill caches
WARM_UP = 1
MEMORY = 100  # number of past ratios kept for each rank
USUAL = 0.9  # quantile of a rank's past ratios that a slow line must exceed


@dataclass
class Pace:
    """One rank's work times, each divided by the other ranks' median so that they are comparable between lines."""

    past: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    # newest ratios, all slow, which are not yet in `past`
    streak: list[float] = field(default_factory=list)

    def see(self, ratio: float) -> int:
        """Add a line's ratio. If it makes the rank a straggler, return the number of slow lines in a row, else 0.

        A slow line must also exceed most past ratios of this rank: on a shared machine, some lines are slow by chance.
        """
        usual = sorted(self.past)[int(USUAL * len(self.past))] if self.past else 0.0
        if ratio <= max(FACTOR, usual):
            self.past.extend([*self.streak, ratio])
            self.streak = []
            return 0
        self.streak.append(ratio)
        needed = WINDOWS if len(self.past) >= WINDOWS else 2 * WINDOWS
        return needed if len(self.streak) == needed else 0


class Stragglers:
    """The comparison of the ranks' work times for each metrics line.

    `hosts` and `stages` have one entry per rank. A rank is compared with the other ranks of its pipeline stage.
    """

    def __init__(self, hosts: Sequence[str], stages: Sequence[int]) -> None:
        self.hosts, self.stages = hosts, stages
        self.paces = [Pace() for _ in hosts]
        self.seen = 0
        self.fields: dict[str, float] = {}  # fields of the metrics line

    def see(self, works_s: Sequence[float]) -> list[str]:
        """Return a message for each new straggler; `works_s` has each rank's seconds of work [world_size]."""
        self.seen += 1
        ratios = self.ratios(works_s)
        if self.seen <= WARM_UP or not ratios:
            return []
        slowest = max(ratios, key=ratios.__getitem__)
        self.fields = {"slowest_rank": slowest, "slowest_ratio": ratios[slowest]}
        streaks = {rank: self.paces[rank].see(ratio) for rank, ratio in ratios.items()}
        return [
            f"rank {rank} on {self.hosts[rank]} slows the other ranks down: its work takes {ratios[rank]:.1f} times "
            f"their median, in {num_lines} metrics lines in a row; check that machine with baretrain doctor"
            for rank, num_lines in streaks.items()
            if num_lines
        ]

    def ratios(self, works_s: Sequence[float]) -> Mapping[int, float]:
        """Return each rank's work time over the median of its stage's other ranks; {} if a median is missing or 0."""
        ratios: dict[int, float] = {}
        for stage in sorted(set(self.stages)):
            ranks = [rank for rank, own in enumerate(self.stages) if own == stage]
            ordered, middle = sorted(works_s[rank] for rank in ranks), (len(ranks) - 1) // 2
            for rank in ranks:
                # index of the other ranks' median
                higher = middle + (works_s[rank] <= ordered[middle])
                if higher == len(ordered) or ordered[higher] <= 0:
                    return {}
                ratios[rank] = works_s[rank] / ordered[higher]
        return dict(sorted(ratios.items()))
