"""Which sequences are read at which step: the same however ranks split them; with lengths, sorted within a step."""

import re
from itertools import islice

import numpy as np
import pytest

from train.data.batches.buckets import (
    BucketEvalOrder,
    Buckets,
    BucketSampler,
    without_bucket,
)
from train.data.random_bits import hash_bits
from train.data.shards.order import (
    PADDING,
    EvalOrder,
    ShardSampler,
    eval_sample,
    eval_shards,
    permuted,
    window_of_lane,
    window_sizes,
)

SHARD_ROWS = [40, 30, 8, 20, 5]
ROWS, G = sum(SHARD_ROWS), 12
BUCKETS = np.random.default_rng(7).choice(3, ROWS, p=[0.5, 0.3, 0.2]).astype(np.uint8)
LANES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 1), (12, 2)]  # and shards of a window of a lane
KINDS = [*LANES, "buckets"]


def sampler(kind, *, rank=0, world_size=1, consumed_rows=0, seed=0, **more):
    run = {
        "global_batch_size": G,
        "rank": rank,
        "world_size": world_size,
        "consumed_rows": consumed_rows,
        "seed": seed,
    }
    if kind == "buckets":
        return BucketSampler(BUCKETS, **run)
    return ShardSampler(SHARD_ROWS, lanes=kind[0], window_shards=kind[1], **run, **more)


def steps(kind, number, *, world_size=1, micro=G, first_step=0, seed=0):
    """Items of each global step, gathered over ranks and micro batches, sorted, without their buckets."""
    accumulation = G // world_size // micro
    result = [[] for _ in range(number)]
    for rank in range(world_size):
        order = sampler(
            kind, rank=rank, world_size=world_size, consumed_rows=first_step * G, seed=seed
        )
        for index, batch in enumerate(islice(order.micro_batches(micro), number * accumulation)):
            assert len(batch) == micro
            result[index // accumulation] += without_bucket(batch)[0].tolist()
    return [sorted(items) for items in result]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 4), (1, 1), (2, 3), (3, 4), (3, 2), (4, 3), (6, 1), (12, 1)]
)
def test_every_split_over_ranks_and_micro_batches_sees_the_same_steps(kind, world_size, micro):
    assert steps(kind, 18, world_size=world_size, micro=micro) == steps(kind, 18)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_has_every_sequence_at_most_once_and_leaves_out_less_than_a_batch(kind, epoch):
    items = np.concatenate(steps(kind, ROWS // G, first_step=epoch * (ROWS // G)))
    assert len(np.unique(items)) == len(items) == ROWS // G * G
    assert set(items // ROWS) == {epoch}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_epochs_and_seeds_differ(kind):
    per_epoch = ROWS // G
    starts = [{}, {"first_step": per_epoch}, {"seed": 1}]
    first, second, other = (steps(kind, per_epoch, **start) for start in starts)
    assert first != other and first != [[item - ROWS for item in step] for step in second]
    # what is left out, too
    assert set(sum(first, [])) != {item - ROWS for item in sum(second, [])}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("first_step", [1, 3, 8, 11])
def test_a_resume_goes_on_with_the_next_step_on_any_number_of_ranks(kind, first_step):
    seen = steps(kind, 3, world_size=4, micro=3, first_step=first_step)
    assert seen == steps(kind, 14)[first_step : first_step + 3]


def permutation(size, key):
    return permuted(
        np.arange(size, dtype=np.uint64), np.full(size, size, np.uint64), np.full(size, key)
    )


@pytest.mark.slow
def test_the_computed_permutation_is_one_for_every_size_and_another_for_another_key():
    for size in range(1, 5001):
        assert np.array_equal(np.sort(permutation(size, hash_bits(size))), np.arange(size))
    assert not np.array_equal(permutation(5000, hash_bits(1)), permutation(5000, hash_bits(2)))
    large = 10**9 + 7
    some = np.random.default_rng(0).choice(large, 200_000, replace=False).astype(np.uint64)
    one, other = (
        permuted(some, np.full(len(some), large, np.uint64), np.full(len(some), hash_bits(key)))
        for key in (1, 2)
    )
    assert len(np.unique(one)) == len(some) and one.max() < large and (one == other).sum() < 5


def test_each_epoch_has_the_shards_of_a_lane_in_another_order():
    order = sampler(LANES[0])
    orders = {tuple(order.epoch_order(epoch).slices.shards) for epoch in range(20)}
    assert len(orders) > 10 and len({tuple(sorted(each)) for each in orders}) == 1


@pytest.mark.parametrize("kind", LANES, ids=str)
def test_a_batch_takes_turns_over_the_lanes_and_a_window_shuffles_the_sequences_of_its_shards(
    kind,
):
    order = sampler(kind)
    epoch, firsts = order.epoch_order(1), np.cumsum([0, *SHARD_ROWS])
    rows = epoch.rows(0, order.steps, order.indices)
    held = [[] for _ in range(kind[0])]  # (first row, rows) of each slice
    slices = order.lanes.slices
    for lane, first, number in zip(slices.lanes, slices.first_rows, slices.num_rows, strict=True):
        held[lane].append((first, number))
    assert sum(rows for of_lane in held for _, rows in of_lane) == ROWS
    assert np.ptp([sum(rows for _, rows in of_lane) for of_lane in held]) <= 1
    of_lanes = rows.reshape(len(rows), kind[0], -1)
    for lane, of_lane in enumerate(held):
        members = np.concatenate([np.arange(first, first + number) for first, number in of_lane])
        assert set(of_lanes[:, lane].ravel()) <= set(members)
        assert of_lanes[:, lane].ravel().tolist() != sorted(of_lanes[:, lane].ravel())
    shard_of = np.searchsorted(firsts, rows, side="right") - 1
    for step in range(order.steps):
        now, _ = epoch.shards_from(step, range(kind[0]))
        assert set(shard_of[step]) <= {*now}  # also where a step ends in the next window


def test_windows_double_from_one_shard_of_each_lane_in_the_first_epoch():
    assert window_sizes(50, 20, epoch=0) == [1, 2, 4, 8, 16, 19]
    assert window_sizes(50, 20, epoch=1) == [20, 20, 10]
    assert window_sizes(3, 1, epoch=0) == [1, 1, 1]
    assert [window_of_lane(256, lanes) for lanes in (1, 64, 300)] == [256, 4, 1]
    order = ShardSampler([1000] * 200, seed=3, global_batch_size=128, rank=0, world_size=1)
    assert len({*(next(order.micro_batches(128)) // 1000).tolist()}) <= order.lanes.number == 64


@pytest.mark.parametrize(
    ("machines", "ranks", "batch"), [(1, 32, 4096), (4, 32, 4096), (16, 32, 4096), (3, 8, 3072)]
)
def test_machines_share_the_shards_and_keep_theirs_in_every_epoch(machines, ranks, batch):
    """Of 1,200 shards that differ in length, as the last one of a split does; on 16 machines 1.02 times the data."""
    shard_rows = [259 + number % 7 for number in range(1199)] + [13]
    fetched = first = 0
    for machine in range(machines):
        here = range(machine * ranks, (machine + 1) * ranks)
        place = {"rank": here[0], "world_size": machines * ranks, "machine_ranks": here}
        order = ShardSampler(shard_rows, seed=1, global_batch_size=batch, **place)
        mine = set(order.lanes.shards_of(order.lanes_here))
        for epoch in (0, 1):
            order.consumed_rows = epoch * order.steps * batch
            now, later = order.upcoming_shards()
            assert {*now, *later} == mine
            first = max(first, len(now)) if epoch == 0 else first
            indices = np.concatenate([order.indices_of(rank) for rank in here])
            rows = order.epoch_order(epoch).rows(0, order.steps, indices)
            assert {
                *(np.searchsorted(np.cumsum(shard_rows), np.unique(rows), side="right")).tolist()
            } <= mine
        fetched += len(mine)
        if rank_0 := machine == 0:
            said = order.fetched_more(
                [range(first, first + ranks) for first in range(0, machines * ranks, ranks)]
            )
            assert rank_0 and said is None
    assert fetched <= 1.1 * len(shard_rows)
    # a step takes a quarter of a shard, and a lane may begin with less
    assert first <= 2 * -(-64 // machines)


@pytest.mark.parametrize(
    ("machines", "batch", "shards", "said"),
    [
        (
            16,
            16 * 31,
            1200,
            "^16 machines fetch 1.24 times .* batch of 496 do not match its 62 .* a multiple of 64$",
        ),
        (48, 48 * 64, 1200, "64 lanes of shards; use a number of machines that divides 64$"),
        (
            16,
            4096,
            20,
            r"fetch 1.60 times .* 20 shards are few for 16 lanes; prepare more .*\(rows_per_shard\)$",
        ),
        (6, 4092, 1200, None),  # 62 lanes, of which a machine shares one with the next
        (64, 4096, 1200, None),
        (3, 3 * 64, 1200, None),
    ],
)
def test_what_machines_fetch_more_than_once_is_said(machines, batch, shards, said):
    order = ShardSampler(
        [250_000] * shards, seed=1, global_batch_size=batch, rank=0, world_size=machines
    )
    more = order.fetched_more([[rank] for rank in range(machines)])
    assert (more is None) if said is None else re.search(said, more), more


@pytest.mark.parametrize(("world_size", "micro"), [(1, 4), (1, 12), (2, 3), (3, 1)])
def test_a_step_with_lengths_has_the_rows_of_one_without_and_each_micro_batch_fits_its_longest(
    world_size, micro
):
    """Whatever labels go with lengths, a step has them as often as a random batch does."""
    run = {"seed": 0, "global_batch_size": G, "world_size": world_size}
    plain = ShardSampler([ROWS], rank=0, **{**run, "world_size": 1})
    ranks = [
        BucketSampler(BUCKETS, rank=rank, **run).micro_batches(micro) for rank in range(world_size)
    ]
    parts = G // world_size // micro
    for step, rows in enumerate(islice(plain.micro_batches(G), 20)):
        seen, used = [], []
        for _ in range(parts):
            drawn = [without_bucket(next(rank)) for rank in ranks]
            (bucket,) = {bucket for _, bucket in drawn}  # the same on all ranks
            items = np.concatenate([items for items, _ in drawn])
            assert bucket == BUCKETS[items % ROWS].max() or (step == len(used) == 0)
            seen += items.tolist()
            used.append(bucket)
        assert sorted(seen) == sorted(rows)
        assert used == sorted(used) or step == 0
        if step == 0:
            assert used[0] == 2  # a lack of memory shows at once


def test_a_step_is_cut_where_that_saves_more_padding_than_a_pass_costs():
    lengths = np.random.default_rng(0).integers(1, 9, 4000)  # multiples of 8 tokens
    buckets = Buckets(tuple(range(8, 72, 8)), (lengths - 1).astype(np.uint8), np.zeros(0))
    cuts = [buckets.best_cut(32, 1, cost=cost) for cost in (10, 100, 300, 10_000)]
    assert cuts == [8, 4, 2, 1]
    assert buckets.best_cut(8, 4, cost=100) == 2  # the same batch, over four ranks
    assert buckets.best_cut(31, 1, cost=100) == 1  # nothing between one pass and one for each row


def test_a_step_is_cut_into_as_few_parts_as_have_so_many_tokens():
    buckets = Buckets((8, 24), np.array([0, 1], np.uint8), np.zeros(0))  # 16 on average
    cuts = [buckets.fewest_cut(12, most=most) for most in (200, 192, 191, 64, 63, 1)]
    assert cuts == [1, 1, 2, 3, 4, 12]
    assert buckets.fewest_cut(1, most=1) == 1
    # 31 parts of one row, where two would do, take too long
    assert [buckets.fewest_cut(rows, most=300) for rows in (31, 32, 62)] == [1, 2, 2]


def test_micro_batches_that_a_device_executes_together_have_one_length():
    """Otherwise each sequence of lengths would be another graph."""
    run = {"seed": 0, "global_batch_size": G, "rank": 0, "world_size": 1}
    drawn = BucketSampler(BUCKETS, together=2, **run).micro_batches(3)
    buckets = np.array([without_bucket(batch)[1] for batch in islice(drawn, 40)]).reshape(-1, 2)
    assert (buckets[:, 0] == buckets[:, 1]).all() and len(np.unique(buckets)) > 1


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 4), (2, 4), (3, 7), (5, 4)])
@pytest.mark.parametrize("rows", [1, 7, 8, ROWS])
@pytest.mark.parametrize("has_buckets", [False, True])
def test_evaluation_has_each_result_once_in_the_order_of_the_data(
    rows, has_buckets, world_size, batch_size
):
    """In equally many batches on each rank, and with buckets each at its own length."""
    buckets, shares = BUCKETS[:rows] if has_buckets else np.zeros(rows, int), []
    for rank in range(world_size):
        split = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
        order = BucketEvalOrder(buckets, **split) if has_buckets else EvalOrder(rows, **split)
        seen = [without_bucket(np.array(batch)) for batch in order]
        assert len(seen) == len(order) and {len(items) for items, _ in seen} == {batch_size}
        assert all((buckets[items[items != PADDING]] == bucket).all() for items, bucket in seen)
        shares.append(np.concatenate([np.stack([items, items * 2], 1) for items, _ in seen]))
    assert len({len(share) for share in shares}) == 1
    assert order.merged(shares).tolist() == [[row, 2 * row] for row in range(rows)]


@pytest.mark.parametrize("most", [None, 1, 3, 60])
@pytest.mark.parametrize("machines", [1, 2, 3, 16, 120])
def test_machines_share_the_validation_shards(machines, most):
    """Two ranks each. Those between two parts are read by both machines, and what the report shows by the first."""
    sample, ends = eval_sample(ROWS, most, seed=3), np.cumsum(SHARD_ROWS)
    parts = []
    for number in range(machines):
        ranks = [2 * number, 2 * number + 1]
        parts.append(eval_shards(SHARD_ROWS, sample, ranks, 2 * machines, num_shown=0))
        for rank in ranks:
            rows = sample[
                [
                    row
                    for batch in EvalOrder(len(sample), 4, rank, 2 * machines)
                    for row in batch
                    if row >= 0
                ]
            ]
            assert {int(shard) for shard in np.searchsorted(ends, rows, side="right")} <= set(
                parts[-1]
            )
    used = np.unique(np.searchsorted(ends, sample, side="right")).tolist()
    assert sorted({shard for part in parts for shard in part}) == used
    assert sum(map(len, parts)) <= len(used) + 2 * machines
    assert eval_shards(SHARD_ROWS, sample, [0], 2 * machines, num_shown=ROWS) == used


@pytest.mark.parametrize("ranks", [range(32), range(8, 16)])
@pytest.mark.parametrize("batch", [64, 128, 512])
def test_a_resume_late_in_an_epoch_asks_first_for_the_shards_of_its_next_step(ranks, batch):
    """One of 32 ranks of 1 TB in shards of 64 MiB; the bound is a shard for each row of a lane in a step."""
    counts = [4096] * 15_000
    consumed = batch * int(0.9 * sum(counts) // batch)
    run = {"seed": 1, "global_batch_size": batch, "world_size": 32, "consumed_rows": consumed}
    order = ShardSampler(counts, rank=ranks[0], machine_ranks=ranks, **run)
    now = order.upcoming_shards()[0]
    assert len(now) == len(set(now)) == order.window_shards * len(order.lanes_here)
    epoch, step = order.position
    slots = np.concatenate([order.indices_of(rank) for rank in ranks])
    rows = order.epoch_order(epoch).rows(step, step + 3, slots)
    needed = [set((rows[number] // 4096).ravel().tolist()) for number in range(3)]
    for number in range(3):
        until = set().union(*needed[: number + 1])
        assert set(now[: len(until)]) == until
    rows_of_lane = batch // order.lanes.number
    assert len(needed[0]) <= len(order.lanes_here) * min(rows_of_lane, order.window_shards)
    # Before the second micro batch of one row, only the shards of each rank's first row.
    firsts = {int(rows[0][number]) // 4096 for number in range(0, len(slots), batch // 32)}
    assert set(now[: len(firsts)]) == firsts
