"""The order of sequences per rank and step, a pure function of (seed, epoch, rows of each shard, lanes, window).

Lanes are a fixed partition of the training data: the shards are put in a random order, which depends on the seed, and
cut into parts with equal numbers of sequences. Every global batch has the same number of sequences from each lane, and
a rank reads a contiguous part of the batch. Its sequences therefore come from few lanes, the same ones in every epoch,
and a machine fetches only the shards of its ranks' lanes. The number of lanes depends on the data and the global batch,
not on the ranks, so that any number of ranks and machines sees the same batches.

Within a lane, each epoch shuffles the shards, cuts them into windows (blocks of shards), and shuffles the sequences of
each window by a computed permutation, which needs no table. The data state is therefore three numbers: consumed
sequences, lanes, and shards per window. A run chooses the last two at its start, and its checkpoints store all three. A
resumed run computes its position from them, and continues exactly with any world size that divides the global batch.
Sequences that do not fill a batch are left out, different ones in each epoch.

The canonical nodes of MosaicML Streaming (https://docs.mosaicml.com/projects/streaming) serve the same purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from train.data.random_bits import EVAL_STREAM, draw_rows, hash_bits

PADDING = -1  # an item that fills up the last evaluation batch and is not counted
ROWS_AT_ONCE = 4096  # sequences of the order that are computed together
STEPS_AHEAD = 8  # steps whose shards are fetched in the order in which they are needed
MAX_LANES = 64  # a machine's first batch may need a shard of each lane: 4 GB if shards have 64 MiB, the default
WINDOW_SHARDS = 256  # shards shuffled together over all lanes (16 GiB); the first step of a resume may need all
# a warning appears if all machines together fetch more than this multiple of the data
MOST_FETCHED = 1.1
ROUNDS = 12  # rounds of the permutation; with 8, the order of 12 sequences still differs measurably from a random one
# coordinates after the seed (random_bits.py)
LANE_STREAM, SHARD_STREAM, ROW_STREAM = range(2**21, 2**21 + 3)


def lanes_of(global_batch_size: int, most: int) -> int:
    """Return the largest divisor of the global batch that is at most MAX_LANES and `most`, the number of shards."""
    lanes = min(MAX_LANES, most)
    while global_batch_size % lanes:
        lanes -= 1
    return lanes


def window_of_lane(window_shards: int, lanes: int) -> int:
    """Return how many shards of each lane are shuffled together, given `window_shards` over all lanes."""
    return max(1, window_shards // lanes)


def permuted(positions: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Apply a random permutation of [0, size) to `positions`. All arrays are uint64 of one shape, sizes below 2**32.

    A position is a cell in a grid of about sqrt(size) by sqrt(size). A round shifts either the column, by a random
    number that depends on the line, or the line, by one that depends on the column. All rounds are repeated for
    positions that end outside [0, size): Black and Rogaway, "Ciphers with arbitrary finite domains", 2002,
    https://doi.org/10.1007/3-540-45760-7_9.
    """
    moved = positions.copy()
    left = np.arange(len(positions))
    columns = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    with np.errstate(over="ignore"):
        while len(left):
            wide = columns[left]
            keys = key[left]
            tall = (size[left] + wide - np.uint64(1)) // wide
            line = moved[left] // wide
            column = moved[left] % wide
            for number in range(ROUNDS):
                bits = keys + np.uint64(number)
                if number % 2 == 0:
                    column = shifted(column, line, wide, bits)
                else:
                    line = shifted(line, column, tall, bits)
            moved[left] = line * wide + column
            left = left[moved[left] >= size[left]]
    return moved


def shifted(
    values: np.ndarray, others: np.ndarray, size: np.ndarray, bits: np.ndarray
) -> np.ndarray:
    """Add to `values` random numbers that depend on `others` and `bits`, modulo `size`."""
    half = np.uint64(32)
    drawn = hash_bits(others, state=bits) >> half
    sums = values + ((drawn * size) >> half)
    return np.where(sums >= size, sums - size, sums)


def window_sizes(num_slices: int, most: int, epoch: int) -> list[int]:
    """Return how many slices each window of a lane has. In epoch 0 windows grow, so that training can begin early."""
    sizes: list[int] = []
    size = most if epoch else 1
    while (left := num_slices - sum(sizes)) > 0:
        sizes.append(min(size, left))
        size = min(2 * size, most)
    return sizes


class Slices(NamedTuple):
    """The parts of shards that are in one lane, nearly always whole shards. Arrays [slices] int64."""

    lanes: np.ndarray
    shards: np.ndarray
    first_rows: np.ndarray  # indices into the rows of the data set
    num_rows: np.ndarray


class Windows(NamedTuple):
    """The windows of an epoch. Arrays [windows]. Starts and ends are places (see EpochOrder)."""

    lanes: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    keys: np.ndarray  # uint64: of the permutation of the window's rows


class Lanes:
    """The lanes of a data set: its shards in a random order, cut into slices where a lane begins."""

    def __init__(self, shard_rows: Sequence[int], number: int, *, seed: int) -> None:
        self.number = number
        self.seed = seed
        counts = np.asarray(shard_rows, np.int64)
        bits = hash_bits(seed, LANE_STREAM, np.arange(len(counts)))
        shards = np.argsort(bits, kind="stable")
        ends = np.cumsum(counts[shards])
        begins = ends - counts[shards]
        self.num_rows = int(counts.sum())
        # each lane's first row, then the number of rows
        self.starts = np.arange(number + 1) * self.num_rows // number
        cuts = np.unique(np.concatenate([[0], ends, self.starts]))
        begins_of_slices = cuts[:-1]
        nth = np.searchsorted(ends, begins_of_slices, side="right")
        first_of_shards = np.cumsum(counts) - counts
        in_shard = begins_of_slices - begins[nth]
        self.slices = Slices(
            lanes=np.searchsorted(self.starts, begins_of_slices, side="right") - 1,
            shards=shards[nth],
            first_rows=first_of_shards[shards[nth]] + in_shard,
            num_rows=np.diff(cuts),
        )

    def shards_of(self, lanes: Sequence[int]) -> list[int]:
        """Return the indices of the shards with a slice in these lanes, ascending."""
        is_in = np.isin(self.slices.lanes, lanes)
        return np.unique(self.slices.shards[is_in]).tolist()


class EpochOrder:
    """The order of one epoch. It stores a few numbers per shard, however many sequences the shard has.

    A place is an index into the rows of all lanes, one lane after another, before the rows are shuffled. For example,
    three shards A, B and C of 4 rows are in 2 lanes, which cut A; a window has 1 slice, and a batch 4 rows:

        place    0  1  2  3  4  5    6  7  8  9  10 11
        lane     0                   1
        slice    A0 A1 B0 B1 B2 B3   C0 C1 C2 C3 A2 A3    another order in each epoch
        window   0     1             2           3
        row      A1 A0 B2 B0 B3 B1   C1 C3 C0 C2 A2 A3    shuffled within each window
        step     0     1     2       0     1     2        so step 0 reads A1 A0 C1 C3
    """

    def __init__(self, lanes: Lanes, *, batch_size: int, window_shards: int, epoch: int) -> None:
        self.lanes = lanes
        self.each = batch_size // lanes.number  # rows of each lane in a batch
        numbers = np.arange(len(lanes.slices.lanes))
        bits = hash_bits(lanes.seed, SHARD_STREAM, epoch, numbers)
        order = np.lexsort((bits, lanes.slices.lanes))
        self.slices = Slices(*(column[order] for column in lanes.slices))
        # places
        self.slice_ends = np.cumsum(self.slices.num_rows)
        self.slice_starts = self.slice_ends - self.slices.num_rows
        sizes: list[int] = []  # slices of each window
        for of_lane in np.bincount(self.slices.lanes).tolist():
            sizes += window_sizes(of_lane, window_shards, epoch)
        numbers = np.arange(len(sizes))
        self.window_of_slice = np.repeat(numbers, sizes)
        last_slices = np.cumsum(sizes) - 1
        ends = self.slice_ends[last_slices]
        self.windows = Windows(
            lanes=self.slices.lanes[last_slices],
            starts=np.append(0, ends[:-1]),
            ends=ends,
            keys=hash_bits(lanes.seed, ROW_STREAM, epoch, numbers),
        )

    def rows(self, first_step: int, last_step: int, indices: np.ndarray) -> np.ndarray:
        """Return [steps, n] int64: the sequences with these `indices` [n] in the batches [first_step, last_step)."""
        lane, number = np.divmod(indices, self.each)
        steps = np.arange(first_step, last_step)[:, None]
        in_lane = number + steps * self.each
        grid = self.lanes.starts[lane] + in_lane
        unshuffled = grid.ravel()
        window = np.searchsorted(self.windows.starts, unshuffled, side="right") - 1
        starts = self.windows.starts[window]
        sizes = (self.windows.ends[window] - starts).astype(np.uint64)
        positions = (unshuffled - starts).astype(np.uint64)
        moved = permuted(positions, sizes, self.windows.keys[window])
        place = moved.astype(np.int64) + starts
        nth = np.searchsorted(self.slice_ends, place, side="right")
        in_slice = place - self.slice_starts[nth]
        rows = self.slices.first_rows[nth] + in_slice
        return rows.reshape(grid.shape)

    def shards_from(self, step: int, lanes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards of the windows that `step` reads in these lanes, and of later windows (in order of use)."""
        # indices into the rows of the window's own lane
        lane_starts = self.lanes.starts[self.windows.lanes]
        begins = self.windows.starts - lane_starts
        ends = self.windows.ends - lane_starts
        first_row = step * self.each
        is_left = np.isin(self.windows.lanes, lanes) & (ends > first_row)
        is_now = is_left & (begins < first_row + self.each)
        is_later = is_left & ~is_now
        shards = self.slices.shards
        window = self.window_of_slice
        later = np.flatnonzero(is_later[window])
        in_order = np.argsort(begins[window][later], kind="stable")
        return shards[is_now[window]], shards[later[in_order]]


class ShardSampler:
    """The sequences that one rank reads, in the order that this module defines.

    `consumed_rows` counts the sequences that all ranks have consumed since the run began, as of this attempt's start. A
    rank never changes it; the prefetching process sets it in its own copy after each step.
    """

    def __init__(
        self,
        shard_rows: Sequence[int],
        *,
        seed: int,
        global_batch_size: int,
        rank: int,
        world_size: int,
        machine_ranks: Sequence[int] | None = None,
        lanes: int | None = None,
        window_shards: int | None = None,
        eval_shards: Sequence[int] | None = None,
        consumed_rows: int = 0,
    ) -> None:
        """Order the rows of shards with these `shard_rows`. `machine_ranks`: this machine's ranks; None: only `rank`.

        `window_shards`: how many shards of each lane are shuffled together; None: WINDOW_SHARDS over all lanes.
        `eval_shards`: the validation shards that the machine reads; None: all.
        """
        self.shard_rows = list(shard_rows)
        self.global_batch_size = global_batch_size
        self.world_size = world_size
        self.rows = sum(shard_rows)
        self.steps = self.rows // global_batch_size  # steps per epoch
        self.consumed_rows = consumed_rows
        self.eval_shards = eval_shards
        num_lanes = lanes or lanes_of(global_batch_size, len(self.shard_rows))
        self.lanes = Lanes(self.shard_rows, num_lanes, seed=seed)
        self.window_shards = window_shards or window_of_lane(WINDOW_SHARDS, self.lanes.number)
        self.indices = self.indices_of(rank)
        self.machine_ranks = [rank] if machine_ranks is None else machine_ranks
        self.lanes_here = self.lanes_of(self.machine_ranks)

    def indices_of(self, rank: int) -> np.ndarray:
        """Return the indices of a rank's sequences in each global batch, [global batch / world size]."""
        share = self.global_batch_size // self.world_size
        return np.arange(rank * share, (rank + 1) * share)

    def lanes_of(self, ranks: Sequence[int]) -> list[int]:
        """Return the lanes that these ranks read, ascending."""
        indices = np.concatenate([self.indices_of(rank) for rank in ranks])
        return np.unique(indices // (self.global_batch_size // self.lanes.number)).tolist()

    def fetched_more(self, machines: Sequence[Sequence[int]]) -> str | None:
        """Return a warning if machines with these ranks together fetch much of the data more than once; else None."""
        parts = [self.lanes.shards_of(self.lanes_of(ranks)) for ranks in machines]
        times = sum(self.shard_rows[shard] for part in parts for shard in part) / self.rows
        if times <= MOST_FETCHED:
            return None
        lanes = self.lanes.number
        batch = self.global_batch_size
        shards = len(self.shard_rows)
        why = f"their parts of a batch of {batch:,} do not match its {lanes} lanes of shards"
        cure = f"use a number of machines that divides {lanes}"
        if shards < 2 * MAX_LANES:
            why = f"{shards} shards are few for {lanes} lanes"
            cure = "prepare more and smaller ones (rows_per_shard)"
        elif batch % MAX_LANES:
            cure = f"make global_batch_size a multiple of {MAX_LANES}"
        return f"{len(machines)} machines fetch {times:.2f} times the training data in all, because {why}; {cure}"

    @property
    def window_rows(self) -> int:
        """The maximum number of sequences that one window of every lane can contain in all."""
        return self.lanes.number * self.window_shards * max(self.shard_rows)

    @property
    def position(self) -> tuple[int, int]:
        """The next epoch, and the next step in it."""
        return divmod(self.consumed_rows // self.global_batch_size, self.steps)

    def epoch_order(self, epoch: int) -> EpochOrder:
        return EpochOrder(
            self.lanes,
            batch_size=self.global_batch_size,
            window_shards=self.window_shards,
            epoch=epoch,
        )

    def micro_batches(self, size: int) -> Iterator[np.ndarray]:
        """Yield this rank's micro batches forever, starting after `consumed_rows`: [size] items, epoch * rows + row."""
        epoch, start = self.position
        together = max(1, ROWS_AT_ONCE // len(self.indices))
        while True:
            order = self.epoch_order(epoch)
            for first in range(start, self.steps, together):
                last = min(first + together, self.steps)
                rows = order.rows(first, last, self.indices) + epoch * self.rows
                yield from self.cut(rows, size)
            epoch += 1
            start = 0

    def cut(self, steps: np.ndarray, size: int) -> np.ndarray:
        """Return this rank's micro batches [batches, size] of `steps` [steps, sequences]."""
        return steps.reshape(-1, size)

    def upcoming_shards(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the shards that this machine reads now, and those for the rest of this epoch and the next.

        Both are in the order of use. Of each lane, the next step needs no more shards than it has sequences.
        """
        epoch, step = self.position
        order = self.epoch_order(epoch)
        next_order = self.epoch_order(epoch + 1)
        now, later = order.shards_from(step, self.lanes_here)
        now = self.by_need(now, order, step)
        following = next_order.shards_from(0, self.lanes_here)
        return now, np.concatenate([later, *following])

    def by_need(self, shards: np.ndarray, order: EpochOrder, step: int) -> np.ndarray:
        """Return these shards in the order in which this machine's ranks need them from `step` on.

        All ranks draw their first rows at the same time.
        """
        of_ranks = [self.indices_of(rank) for rank in self.machine_ranks]
        indices = np.stack(of_ranks, axis=1).ravel()
        last = min(step + STEPS_AHEAD, self.steps)
        rows = order.rows(step, last, indices).ravel()
        needed = np.searchsorted(np.cumsum(self.shard_rows), rows, side="right")
        is_asked = np.isin(needed, shards)
        both = np.append(needed[is_asked], shards)
        _, first = np.unique(both, return_index=True)
        return both[np.sort(first)]


def eval_sample(rows: int, most: int | None, *, seed: int) -> np.ndarray:
    """Return the rows that are evaluated, ascending: `most` of them, drawn with the seed, or all if `most` is None."""
    return draw_rows(rows, most or rows, seed, EVAL_STREAM)


def eval_part(rows: int, rank: int, world_size: int) -> range:
    """Return the rows of an evaluation that a rank reads. The row counts of two ranks differ by at most one."""
    return range(rank * rows // world_size, (rank + 1) * rows // world_size)


def eval_shards(
    shard_rows: Sequence[int],
    sample: np.ndarray,
    ranks: Sequence[int],
    world_size: int,
    num_shown: int,
) -> list[int]:
    """Return the validation shards that these ranks read, ascending.

    `sample` [n]: the rows that are evaluated, ascending. `num_shown`: how many of them, evenly spaced, rank 0 reads for
    the report.
    """
    # A rank without a part reads row 0: see MaskedRows.last_item.
    parts = []
    for rank in ranks:
        own = eval_part(len(sample), rank, world_size) or range(1)
        of_rank = sample[own.start : own.stop]
        parts.append(of_rank)
    if 0 in ranks:
        shown = evenly_spaced(len(sample), num_shown)
        parts.append(sample[shown])
    rows = np.concatenate(parts)
    shards = np.searchsorted(np.cumsum(shard_rows), rows, side="right")
    return np.unique(shards).tolist()


def evenly_spaced(num_rows: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced row indices, including the first row and the last."""
    return np.unique(np.linspace(0, num_rows - 1, most).astype(np.int64))


@dataclass(frozen=True)
class EvalOrder:
    """An evaluation order: all ranks together read every sequence once.

    All ranks have the same number of batches of the same size, filled up with PADDING. A rank reads a contiguous part
    of the sequences, and so needs few shards.
    """

    rows: int
    batch_size: int
    rank: int
    world_size: int

    def __len__(self) -> int:
        return -(-self.rows // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        padded = np.full(len(self) * self.batch_size, PADDING)
        part = eval_part(self.rows, self.rank, self.world_size)[: len(padded)]
        padded[: len(part)] = part
        yield from padded.reshape(len(self), self.batch_size).tolist()

    def merged(self, shares: Sequence[np.ndarray]) -> np.ndarray:
        """Return the result of each row once, in the order of the data set, without PADDING: [rows, ...].

        `shares`: each rank's results in the order of its batches, [len(self) * batch_size, ...].
        """
        results = []
        for rank, share in enumerate(shares):
            part = eval_part(self.rows, rank, self.world_size)
            results.append(share[: len(part)])
        return np.concatenate(results)
