"""Which sequences a rank reads at which step: a pure function of (seed, epoch, rows of each shard, window).

Shards are shuffled, cut into windows of K, and the sequences of a window are shuffled together; one window of all
shards is a full permutation. The order does not depend on the number of ranks, micro batches or workers. Step t of an
epoch takes `order[t*G : (t+1)*G]` (G the global batch), and rank r of W takes every W-th of those, beginning with the
r-th, as torch's DistributedSampler with drop_last does. So the only state of the data is the number of sequences
consumed, a resume seeks in no time, and any world size that divides the global batch continues exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

PADDING = -1  # fills up the last evaluation batch, and is not counted
ROWS_AT_ONCE = 4096  # looked up in the order together
FIRST_WINDOW = 2  # shards, where windows grow; they must be there before the first batch


@dataclass(frozen=True)
class ShuffleBlock:
    """How many shards are shuffled together. Growing ones double in the first epoch, from FIRST_WINDOW to `shards`, so
    that training begins when two shards are there; later epochs find the rest in the cache.
    """

    shards: int
    grow: bool = False

    def sizes(self, num_shards: int, epoch: int) -> list[int]:
        sizes: list[int] = []
        size = min(FIRST_WINDOW, self.shards) if self.grow and epoch == 0 else self.shards
        while (left := num_shards - sum(sizes)) > 0:
            sizes.append(min(size, left))
            size = min(2 * size, self.shards)
        return sizes


class EpochOrder:
    """The order of one epoch, a window at a time; a window costs memory and time only when rows of it are asked for."""

    def __init__(self, shard_rows: Sequence[int], windows: ShuffleBlock, *, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self.firsts, self.counts = np.cumsum([0, *shard_rows]), np.asarray(shard_rows, np.int64)
        sizes = windows.sizes(len(shard_rows), epoch)
        shuffled = np.random.default_rng([seed, epoch, 0, 1]).permutation(len(shard_rows))
        self.windows = [np.sort(part) for part in np.split(shuffled, np.cumsum(sizes)[:-1])]
        self.ends = np.cumsum([self.counts[shards].sum() for shards in self.windows])  # positions in the order
        self.held: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # the window that was asked for last

    def window(self, number: int) -> np.ndarray:
        """[rows of the window] int64: its sequences in order."""
        if self.held[0] != number:
            rows = np.concatenate([np.arange(self.firsts[s], self.firsts[s + 1]) for s in self.windows[number]])
            self.held = (number, np.random.default_rng([self.seed, self.epoch, number]).permutation(rows))
        return self.held[1]

    def window_at(self, position: int) -> int:
        return int(np.searchsorted(self.ends, position, side="right"))

    def rows(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: the sequences at these positions of the order."""
        parts = []
        while start < stop:
            number = self.window_at(start)
            before = self.ends[number - 1] if number else 0
            end = min(stop, int(self.ends[number]))
            parts.append(self.window(number)[start - before : end - before])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.int64)])


class ShardSampler:
    """The sequences of one rank in the order above.

    `consumed_rows` counts sequences of the whole run over all ranks. The training loop sets it by optimizer steps; what
    loaders have prefetched does not change it.
    """

    def __init__(
        self,
        shard_rows: Sequence[int],
        *,
        seed: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        windows: ShuffleBlock | None = None,
        consumed_rows: int = 0,
    ) -> None:
        self.shard_rows, self.windows = list(shard_rows), windows or ShuffleBlock(len(shard_rows))
        self.seed, self.global_batch_size, self.rank, self.world_size = seed, global_batch_size, rank, world_size
        self.rows = sum(shard_rows)
        self.total_size = self.rows // global_batch_size * global_batch_size  # of an epoch, over all ranks
        self.consumed_rows = consumed_rows

    @property
    def window_rows(self) -> int:
        """Sequences of a window of the largest shards."""
        return self.windows.shards * max(self.shard_rows)

    def epoch_order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.shard_rows, self.windows, seed=self.seed, epoch=epoch)

    def micro_batches(self, size: int) -> Iterator[np.ndarray]:
        """Endless micro batches [size] int64 of this rank from `consumed_rows` on. An item is `epoch * rows + row`."""
        epoch, start = divmod(self.consumed_rows, self.total_size)
        batch_size = self.global_batch_size
        together = max(1, ROWS_AT_ONCE // batch_size) * batch_size
        while True:
            order = self.epoch_order(epoch)
            for first in range(start, self.total_size, together):
                rows = order.rows(first, min(first + together, self.total_size)) + epoch * self.rows
                for mine in rows.reshape(-1, batch_size)[:, self.rank :: self.world_size]:  # one step each
                    for low in range(0, len(mine), size):
                        yield mine[low : low + size]
            epoch, start = epoch + 1, 0

    def upcoming_windows(self) -> Iterator[np.ndarray]:
        """The shards of the window at `consumed_rows`, then of the following ones, endlessly."""
        epoch, position = divmod(self.consumed_rows, self.total_size)
        while True:
            order = self.epoch_order(epoch)
            yield from order.windows[order.window_at(position) :]
            epoch, position = epoch + 1, 0


@dataclass(frozen=True)
class EvalOrder:
    """Every sequence once over all ranks, in equally many and equally large batches on each; PADDING fills the rest."""

    rows: int
    batch_size: int
    rank: int
    world_size: int

    def __len__(self) -> int:
        return -(-self.rows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        padded = np.full(len(self) * self.batch_size * self.world_size, PADDING)
        padded[: self.rows] = np.arange(self.rows)
        yield from padded.reshape(len(self), self.batch_size * self.world_size)[
            :, self.rank :: self.world_size
        ].tolist()

    def merged(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """[rows, ...]: each result once, in the order of the data set, without those of PADDING. `shares` are the
        results of all ranks in the order of their batches, [len * batch, ...] each.
        """
        stacked = np.stack([share.reshape(len(self), self.batch_size, *share.shape[1:]) for share in shares], axis=2)
        return stacked.reshape(-1, *stacked.shape[3:])[: self.rows]
