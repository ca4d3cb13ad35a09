"""Batches of a few lengths: the padded length of each example, and batches in which few tokens are padding.

The examples of a step are those of the plain order, so that a step sees short and long examples, and their labels, as
they occur in the data. Only within the step, the examples are sorted by length and cut into micro batches, each padded
to the shortest length that fits its longest example. All ranks take their examples of a micro batch from the same part
of the sorted step, so that they pad it to the same length. Lengths and cut do not change what is learnt.

An item, as samplers yield and workers read it, is the number of an example in the run (epoch * rows + row) together
with the bucket to which it is padded: `with_bucket` packs the two into one int64, and `without_bucket` unpacks them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from train.data.shards.order import PADDING, EvalOrder, ShardSampler

BUCKET_SHIFT = 48  # bits of an item below its bucket
TRIED_ROWS = 2**16  # rows whose padding decides how a step is cut


@dataclass(frozen=True)
class Buckets:
    lengths: tuple[int, ...]  # tokens, ascending
    train: np.ndarray  # [rows] uint8: the bucket of each example, an index into `lengths`
    evaluation: np.ndarray  # [rows] uint8

    def best_cut(self, share: int, replicas: int, *, cost: int) -> int:
        """Return how many micro batches of a step are fastest, if each takes the time of `cost` more tokens.

        `share`: the examples of each of the `replicas` in a step.
        """
        batch = share * replicas
        shape = (max(1, TRIED_ROWS // batch), batch)
        drawn = np.random.default_rng(0).integers(len(self.train), size=shape)
        steps = np.sort(self.train[drawn])
        tokens = {}
        for cut in range(1, share + 1):
            if share % cut == 0:
                longest = steps.reshape(-1, batch // cut).max(1)
                mean = np.take(self.lengths, longest).mean()
                tokens[cut] = cut * cost + share * mean
        return min(tokens, key=lambda cut: tokens[cut])

    def fewest_cut(self, share: int, *, most: int) -> int:
        """Return the least number of micro batches of a rank's `share` that have at most `most` tokens on average.

        If `share` has no divisor near that number, its parts are larger.
        """
        tokens = share * np.take(self.lengths, self.train).mean()
        needed = max(1, math.ceil(tokens / most))
        cuts = [cut for cut in range(1, share + 1) if share % cut == 0]
        fewest = next((cut for cut in cuts if cut >= needed), share)
        if fewest <= 2 * needed:
            return fewest
        return max(cut for cut in cuts if cut <= needed)


def with_bucket(examples: np.ndarray, bucket: int | np.ndarray) -> np.ndarray:
    """Return the items of `examples`, numbers below 2**48, or PADDING, which has no bucket."""
    items = examples + (np.asarray(bucket, np.int64) << BUCKET_SHIFT)
    return np.where(examples == PADDING, PADDING, items)


def without_bucket(items: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the examples of `items`, and the bucket that they share (0 if all are PADDING)."""
    is_padding = items == PADDING
    buckets = np.unique(items[~is_padding] >> BUCKET_SHIFT)
    if len(buckets) > 1:
        raise ValueError(f"a batch of several lengths: buckets {buckets.tolist()}")
    examples = np.where(is_padding, PADDING, items & (2**BUCKET_SHIFT - 1))
    return examples, int(buckets.max(initial=0))


class BucketSampler(ShardSampler):
    """A ShardSampler over one shard whose micro batches have similar lengths. `bucket_of` [rows]: the buckets.

    `together`: so many micro batches in a row share a bucket.
    """

    def __init__(
        self, bucket_of: np.ndarray, *, rank: int, together: int = 1, **place: Any
    ) -> None:
        super().__init__([len(bucket_of)], rank=rank, **place)
        self.bucket_of = bucket_of
        self.rank = rank
        self.together = together
        # a step is sorted before the ranks share it
        self.indices = np.arange(self.global_batch_size)

    def micro_batches(self, size: int) -> Iterator[np.ndarray]:
        batches = super().micro_batches(size)
        if self.consumed_rows == 0:
            # The run begins at the greatest length, so that a lack of device memory shows immediately.
            longest = self.bucket_of.max()
            for batch in islice(batches, self.together):
                examples, _ = without_bucket(batch)
                yield with_bucket(examples, longest)
        yield from batches

    def cut(self, steps: np.ndarray, size: int) -> np.ndarray:
        buckets = self.bucket_of[steps % self.rows]
        order = np.argsort(buckets, axis=1, kind="stable")
        of_parts = (-1, size * self.together, self.world_size)
        sorted_buckets = np.take_along_axis(buckets, order, 1).reshape(of_parts)
        sorted_items = np.take_along_axis(steps, order, 1).reshape(of_parts)
        longest = sorted_buckets.max((1, 2))
        mine = sorted_items[:, :, self.rank]
        return with_bucket(mine, longest[:, None]).reshape(-1, size)


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
        self.num_rows = len(bucket_of)
        self.batch_size = batch_size
        self.members: list[np.ndarray] = []
        self.parts: list[EvalOrder] = []
        for bucket in range(int(bucket_of.max(initial=0)) + 1):
            rows = np.flatnonzero(bucket_of == bucket)
            self.members.append(rows)
            self.parts.append(EvalOrder(len(rows), batch_size, rank, world_size))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[list[int]]:
        for bucket, (rows, part) in enumerate(zip(self.members, self.parts, strict=True)):
            for batch in part:
                slots = np.asarray(batch)
                examples = np.where(slots == PADDING, PADDING, rows[slots])
                yield with_bucket(examples, bucket).tolist()

    def merged(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """Return [rows, ...]: see EvalOrder.merged."""
        result = np.empty((self.num_rows, *shares[0].shape[1:]), shares[0].dtype)
        start = 0
        for rows, part in zip(self.members, self.parts, strict=True):
            stop = start + len(part) * self.batch_size
            result[rows] = part.merged([share[start:stop] for share in shares])
            start = stop
        return result
