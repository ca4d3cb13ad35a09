"""Stragglers: ranks whose work takes longer than that of the others, and longer than it used to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

FACTOR = 1.5  # multiple of the median of the other ranks' work above which a rank is slow
WINDOWS = 5  # slow lines in a row to name a rank; twice this number at the start
WARM_UP = 1  # lines that are not counted: the first steps compile, open files, fill caches
MEMORY = 100  # lines of a rank's past
USUAL = 0.9  # share of its past lines that a slow rank has to exceed


@dataclass
class Pace:
    """One rank's work in multiples of the median of the others: lines differ in steps and lengths, ratios do not."""

    past: deque[float] = field(default_factory=lambda: deque(maxlen=MEMORY))
    streak: list[float] = field(default_factory=list)  # the newest lines, if all are slow; for a named rank, if none is
    is_named: bool = False

    def see(self, ratio: float) -> int:
        """Return the length of the streak after which the rank becomes a straggler, or ceases to be one; else 0.

        Until it is named, a rank is compared with its earlier slow lines too: those of a shared machine are slow by
        chance.
        """
        usual = sorted(self.past)[int(USUAL * len(self.past))] if self.past and not self.is_named else 0.0
        if (ratio > max(FACTOR, usual)) == self.is_named:
            if not self.is_named:
                self.past.extend([*self.streak, ratio])  # a slow stretch that ends by itself is usual for this rank
            self.streak = []
            return 0
        self.streak.append(ratio)
        has_past = self.is_named or len(self.past) >= WINDOWS
        needed = WINDOWS if has_past else 2 * WINDOWS
        if len(self.streak) < needed:
            return 0
        if self.is_named:
            self.past.extend(self.streak)
        self.is_named, self.streak = not self.is_named, []
        return needed


class Stragglers:
    """The comparison of the ranks' work times for each line of the metrics.

    `hosts` and `stages` have one entry per rank: ranks are compared only with others of their stage, by default with
    all.
    """

    def __init__(self, hosts: Sequence[str], stages: Sequence[int] | None = None) -> None:
        self.hosts, self.stages = hosts, stages or [0] * len(hosts)
        self.paces = [Pace() for _ in hosts]
        self.seen = 0
        self.fields: dict[str, float] = {}  # of the line

    def see(self, works_s: Sequence[float]) -> list[str]:
        """Return a message for each new or former straggler, on all ranks, from the seconds of work [world_size]."""
        self.seen += 1
        ratios = self.ratios(works_s)
        if self.seen <= WARM_UP or not ratios:
            return []
        slowest = max(ratios, key=ratios.__getitem__)
        self.fields = {"slowest_rank": slowest, "slowest_ratio": ratios[slowest]}
        texts = []
        for rank, ratio in ratios.items():
            pace = self.paces[rank]
            if num_lines := pace.see(ratio):
                texts.append(
                    f"rank {rank} on {self.hosts[rank]} holds the others up: its work takes {ratio:.1f} times the "
                    f"median of the other ranks, {num_lines} lines in a row; look at that machine (train.doctor)"
                    if pace.is_named
                    else f"rank {rank} on {self.hosts[rank]} no longer holds the others up, {num_lines} lines in a row"
                )
        return texts

    def ratios(self, works_s: Sequence[float]) -> Mapping[int, float]:
        """Return each rank's work over the median of its stage's others; {} without others, or if that is 0."""
        ratios: dict[int, float] = {}
        for stage in sorted(set(self.stages)):
            ranks = [rank for rank, own in enumerate(self.stages) if own == stage]
            ordered, middle = sorted(works_s[rank] for rank in ranks), (len(ranks) - 1) // 2
            for rank in ranks:
                higher = middle + (works_s[rank] <= ordered[middle])  # index among all ranks of the others' median
                if higher == len(ordered) or ordered[higher] <= 0:
                    return {}
                ratios[rank] = works_s[rank] / ordered[higher]
        return dict(sorted(ratios.items()))
