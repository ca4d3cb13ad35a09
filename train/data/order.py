"""Which sequences a rank reads at which step: a pure function of (seed, epoch, number of sequences).

The order does not depend on the number of ranks, micro batches or workers. Step t of an epoch takes
`order[t*G : (t+1)*G]` (G the global batch) and rank r of W every W-th of those from r on, the semantics of torch's
DistributedSampler with drop_last. So the only state of the data is the number of steps taken, a resume seeks in no
time, and any world size that divides the global batch goes on exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PADDING = -1  # fills the last evaluation batch; counts for nothing


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    """[rows] int64: every sequence once, shuffled."""
    return np.random.default_rng([seed, epoch]).permutation(rows)


@dataclass(frozen=True)
class TrainOrder:
    """Endless micro batches of one rank, from any step on. An item is `epoch * rows + row`."""

    rows: int
    seed: int
    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int
    first_step: int = 0

    def __iter__(self) -> Iterator[list[int]]:
        steps_per_epoch = self.rows // self.global_batch_size
        epoch, first = divmod(self.first_step, steps_per_epoch)
        while True:
            order = epoch_order(self.seed, epoch, self.rows)
            for step in range(first, steps_per_epoch):
                batch = order[step * self.global_batch_size : (step + 1) * self.global_batch_size]
                mine = batch[self.rank :: self.world_size] + epoch * self.rows
                for start in range(0, len(mine), self.micro_batch_size):
                    yield mine[start : start + self.micro_batch_size].tolist()
            epoch, first = epoch + 1, 0


@dataclass(frozen=True)
class EvalOrder:
    """Every sequence once over all ranks, in the same number of equally large batches on each; PADDING fills up."""

    rows: int
    batch_size: int
    rank: int
    world_size: int

    def __len__(self) -> int:
        return -(-self.rows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        padded = np.full(len(self) * self.batch_size * self.world_size, PADDING)
        padded[: self.rows] = np.arange(self.rows)
        yield from padded.reshape(len(self), -1)[:, self.rank :: self.world_size].tolist()
