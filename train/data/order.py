"""Which sequences a rank reads at which step: a pure function of (seed, epoch, rows of each shard, window).

Shards are shuffled, cut into windows of K, and the sequences of a window are shuffled together; one window of all
shards is a full permutation. The order does not depend on the number of ranks, micro batches or workers. Step t of an
epoch takes `order[t*G : (t+1)*G]` (G the global batch) and rank r of W every W-th of those from r on, the semantics of
torch's DistributedSampler with drop_last. So the only state of the data is the number of sequences consumed, a resume
seeks in no time, and any world size that divides the global batch goes on exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import DistributedSampler

PADDING = -1  # fills the last evaluation batch; counts for nothing
ROWS_AT_ONCE = 4096  # looked up in the order together
FIRST_WINDOW = 2  # shards, where windows grow: what has to be there before the first batch


@dataclass(frozen=True)
class Windows:
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

    def __init__(self, shard_rows: Sequence[int], windows: Windows, *, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch
        self.firsts, self.counts = np.cumsum([0, *shard_rows]), np.asarray(shard_rows, np.int64)
        sizes = windows.sizes(len(shard_rows), epoch)
        shuffled = np.random.default_rng([seed, epoch, 0, 1]).permutation(len(shard_rows))
        self.windows = [np.sort(part) for part in np.split(shuffled, np.cumsum(sizes)[:-1])]
        self.ends = np.cumsum([self.counts[shards].sum() for shards in self.windows])  # places in the order
        self.held: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))  # the window asked for last

    def window(self, number: int) -> np.ndarray:
        """[rows of it] int64: the sequences of a window in their order."""
        if self.held[0] != number:
            self.held = (number, self.shuffled(number))
        return self.held[1]

    def shuffled(self, number: int) -> np.ndarray:
        shards = self.windows[number]
        rows = np.concatenate([np.arange(self.firsts[s], self.firsts[s + 1]) for s in shards])
        return np.random.default_rng([self.seed, self.epoch, number]).permutation(rows)

    def window_at(self, place: int) -> int:
        return int(np.searchsorted(self.ends, place, side="right"))

    def rows(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: the sequences at these places of the order."""
        parts = []
        while start < stop:
            number = self.window_at(start)
            before = self.ends[number - 1] if number else 0
            end = min(stop, int(self.ends[number]))
            parts.append(self.window(number)[start - before : end - before])
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.int64)])


class ShardSampler(DistributedSampler[int]):
    """torch's DistributedSampler in the order above: iterating gives this rank's sequences in the rest of the epoch.

    `consumed_rows` counts sequences of the whole run over all ranks. It is for the training loop to set, from optimizer
    steps: what loaders have prefetched does not move it.
    """

    def __init__(
        self,
        shard_rows: Sequence[int],
        *,
        seed: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        windows: Windows | None = None,
        consumed_rows: int = 0,
    ) -> None:
        rows = int(sum(shard_rows))
        super().__init__(range(rows), num_replicas=world_size, rank=rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.shard_rows, self.windows = list(shard_rows), windows or Windows(len(shard_rows))
        self.rows, self.global_batch_size = rows, global_batch_size
        self.total_size = rows // global_batch_size * global_batch_size  # of an epoch, over all ranks
        self.num_samples = self.total_size // world_size
        self.consumed_rows = consumed_rows

    @property
    def window_rows(self) -> int:
        """Sequences of a window of the largest shards."""
        return self.windows.shards * max(self.shard_rows)

    def epoch_order(self, epoch: int) -> EpochOrder:
        return EpochOrder(self.shard_rows, self.windows, seed=self.seed, epoch=epoch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch."""
        self.epoch, self.consumed_rows = epoch, epoch * self.total_size

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_rows": self.consumed_rows, "seed": self.seed, "window_shards": self.windows.shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another sampler stopped, of any world size. ValueError if its order was another one."""
        mine = self.state_dict()
        for key in ("seed", "window_shards"):
            if state[key] != mine[key]:
                raise ValueError(f"the order was made with {key}={state[key]}, this one has {mine[key]}")
        self.consumed_rows = int(state["consumed_rows"])

    def __iter__(self) -> Iterator[int]:
        epoch, start = divmod(self.consumed_rows, self.total_size)
        order = self.epoch_order(epoch)
        for first in range(start, self.total_size, self.global_batch_size):
            yield from order.rows(first, first + self.global_batch_size)[self.rank :: self.num_replicas].tolist()

    def micro_batches(self, size: int) -> Iterator[np.ndarray]:
        """Endless micro batches [size] int64 of this rank from `consumed_rows` on. An item is `epoch * rows + row`."""
        epoch, start = divmod(self.consumed_rows, self.total_size)
        batch_size = self.global_batch_size
        together = max(1, ROWS_AT_ONCE // batch_size) * batch_size
        while True:
            order = self.epoch_order(epoch)
            for first in range(start, self.total_size, together):
                rows = order.rows(first, min(first + together, self.total_size)) + epoch * self.rows
                for mine in rows.reshape(-1, batch_size)[:, self.rank :: self.num_replicas]:  # one step each
                    for low in range(0, len(mine), size):
                        yield mine[low : low + size]
            epoch, start = epoch + 1, 0

    def upcoming_windows(self) -> Iterator[np.ndarray]:
        """Shards of the window that `consumed_rows` lies in, then of those that follow, endlessly."""
        epoch, place = divmod(self.consumed_rows, self.total_size)
        while True:
            order = self.epoch_order(epoch)
            yield from order.windows[order.window_at(place) :]
            epoch, place = epoch + 1, 0


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
        yield from padded.reshape(len(self), self.batch_size * self.world_size)[
            :, self.rank :: self.world_size
        ].tolist()

    def merged(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """[rows, ...]: results in the order of the data set, each once, from those of all ranks: [len * batch, ...]
        each, in the order of their batches. What belongs to PADDING is left out.
        """
        stacked = np.stack([share.reshape(len(self), self.batch_size, *share.shape[1:]) for share in shares], axis=2)
        return stacked.reshape(-1, *stacked.shape[3:])[: self.rows]
