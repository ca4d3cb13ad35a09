"""Detection of stragglers: ranks whose work takes longer than that of other ranks, and longer than before."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FACTOR = 1.5  # a rank is slow if its work is above this multiple of the other ranks' median
WINDOWS = 5  # consecutive slow lines until a rank is named; twice this number at the start
WARM_UP = 1  # first lines, which are not counted: their steps compile, open files and fill caches
MEMORY = 100  # past lines that are kept for each rank
USUAL = 0.9  # share of a rank's past lines whose ratio a slow line must exceed


@dataclass
class Pace:
    """One rank's work divided by the median of other ranks. Ratios do not depend on a line's steps and lengths."""

    past: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    streak: list[float] = field(default_factory=list)  # slow ratios of the newest lines, which are not yet in `past`

    def see(self, ratio: float) -> int:
        """Add a line's ratio. Return the length of the streak of slow lines if it names the rank a straggler, else 0.

        A slow line must also exceed the rank's earlier slow lines: on a shared machine, some are slow by chance.
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
        self.fields: dict[str, float] = {}  # fields for the line

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
            f"rank {rank} on {self.hosts[rank]} holds the others up: its work takes {ratios[rank]:.1f} times the "
            f"median of the other ranks, {num_lines} lines in a row; look at that machine (train.doctor)"
            for rank, num_lines in streaks.items()
            if num_lines
        ]

    def ratios(self, works_s: Sequence[float]) -> Mapping[int, float]:
        """Return each rank's work divided by the median of its stage's other ranks; {} if there are none or it is 0."""
        ratios: dict[int, float] = {}
        for stage in sorted(set(self.stages)):
            ranks = [rank for rank, own in enumerate(self.stages) if own == stage]
            ordered, middle = sorted(works_s[rank] for rank in ranks), (len(ranks) - 1) // 2
            for rank in ranks:
                higher = middle + (works_s[rank] <= ordered[middle])  # index of the other ranks' median
                if higher == len(ordered) or ordered[higher] <= 0:
                    return {}
                ratios[rank] = works_s[rank] / ordered[higher]
        return dict(sorted(ratios.items()))
