"""Batches of a few static lengths: the padded length of each example, and an order with one length per step.

Every global batch has examples of one bucket (examples padded to the same length), so all ranks run the same graph at
every step. Rows that do not fill a batch of their bucket move up to the next longer bucket, so that an epoch leaves out
no more rows than without buckets. The first batch of a run has the greatest length, so that a lack of device memory
shows immediately. If there are few lengths, the first batches use all of them, so that every graph is compiled at the
start. With many lengths, a run would begin with many batches in order of length, and short runs would learn less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.data.shards.order import PADDING, EvalOrder, ShardSampler

BUCKET_SHIFT = 48  # an item is bucket * 2**48 + epoch * rows + row
# batches of each length at the start; they suffice to compile all graphs of that length
FIRST_ROUNDS = 2


@dataclass(frozen=True)
class Buckets:
    lengths: tuple[int, ...]  # tokens, ascending
    train: np.ndarray  # [rows] uint8: the bucket of each example, an index into `lengths`
    evaluation: np.ndarray  # [rows] uint8
    # True: a batch of the greatest length comes first; False: batches of all lengths do
    is_mixed: bool = False


def parts_of(items: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the items with the bucket removed, and the bucket that they share (0 if all are PADDING)."""
    is_padding = items == PADDING
    buckets = np.unique(items[~is_padding] >> BUCKET_SHIFT)
    if len(buckets) > 1:
        raise ValueError(f"a batch of several lengths: buckets {buckets.tolist()}")
    plain = np.where(is_padding, PADDING, items & (2**BUCKET_SHIFT - 1))
    return plain, int(buckets[0]) if len(buckets) else 0


class BucketEpochOrder:
    """The order of one epoch: batches of rows, with each row's bucket."""

    def __init__(
        self,
        bucket_of: np.ndarray,
        *,
        seed: int,
        epoch: int,
        batch_size: int,
        is_mixed: bool = False,
    ) -> None:
        shuffled = np.random.default_rng([seed, epoch]).permutation(len(bucket_of))
        mine = bucket_of[shuffled]
        batches: list[np.ndarray] = []  # [batches, batch_size] for each bucket
        left = np.empty(0, np.int64)
        for bucket in range(int(bucket_of.max()) + 1):
            rows = np.concatenate([left, shuffled[mine == bucket]])
            whole = len(rows) // batch_size * batch_size
            batches.append(rows[:whole].reshape(-1, batch_size) + (bucket << BUCKET_SHIFT))
            left = rows[whole:]
        rounds = [*reversed(range(len(batches)))] * FIRST_ROUNDS
        if is_mixed:
            rounds = [max(bucket for bucket, of_length in enumerate(batches) if len(of_length))]
        first = []
        for bucket in rounds if epoch == 0 else ():
            first.append(batches[bucket][:1])
            batches[bucket] = batches[bucket][1:]
        rest = np.concatenate(batches)
        rest = rest[np.random.default_rng([seed, epoch, 0, 2]).permutation(len(rest))]
        self.batches = np.concatenate([*first, rest])

    def rows(self, first_step: int, last_step: int, slots: np.ndarray) -> np.ndarray:
        """Return [steps, slots] int64 like EpochOrder.rows, but with each row's bucket."""
        return self.batches[first_step:last_step, slots]


class BucketSampler(ShardSampler):
    """A ShardSampler over one shard. All rows of a global batch share a bucket. `bucket_of` [rows]: the buckets."""

    def __init__(self, bucket_of: np.ndarray, *, is_mixed: bool = False, **place: Any) -> None:
        super().__init__([len(bucket_of)], **place)
        self.bucket_of, self.is_mixed = bucket_of, is_mixed

    def epoch_order(self, epoch: int) -> BucketEpochOrder:  # type: ignore[override]  # it has the same method `rows`
        how: Any = {"batch_size": self.global_batch_size, "is_mixed": self.is_mixed}
        return BucketEpochOrder(self.bucket_of, seed=self.seed, epoch=epoch, **how)


class BucketEvalOrder:
    """An evaluation order, bucket by bucket, so that padded lengths do not depend on the number of ranks."""

    def __init__(
        self,
        bucket_of: np.ndarray,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.num_rows, self.batch_size = len(bucket_of), batch_size
        buckets = range(int(bucket_of.max(initial=0)) + 1)
        self.members = [np.flatnonzero(bucket_of == bucket) for bucket in buckets]
        self.parts = [EvalOrder(len(rows), batch_size, rank, world_size) for rows in self.members]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[list[int]]:
        for bucket, (rows, part) in enumerate(zip(self.members, self.parts, strict=True)):
            for batch in part:
                slots = np.asarray(batch)
                items = rows[np.maximum(slots, 0)] + (bucket << BUCKET_SHIFT)
                yield np.where(slots == PADDING, PADDING, items).tolist()

    def merged(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """Return [rows, ...]: see EvalOrder.merged."""
        result = np.empty((self.num_rows, *shares[0].shape[1:]), shares[0].dtype)
        start = 0
        for rows, part in zip(self.members, self.parts, strict=True):
            stop = start + len(part) * self.batch_size
            result[rows] = part.merged([share[start:stop] for share in shares])
            start = stop
        return result
