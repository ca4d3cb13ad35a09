"""Which sequences are read at which step: the same however ranks split them; with buckets, one length a step."""

from itertools import islice

import numpy as np
import pytest

from train.data.batches.buckets import BUCKET_SHIFT, BucketEvalOrder, BucketSampler, parts_of
from train.data.shards.order import PADDING, EpochOrder, EvalOrder, ShardSampler, ShuffleBlock

SHARD_ROWS = [40, 30, 8, 20, 5]
ROWS, G = sum(SHARD_ROWS), 12
BUCKETS = np.random.default_rng(7).choice(3, ROWS, p=[0.5, 0.3, 0.2]).astype(np.uint8)
WINDOWS = [ShuffleBlock(1), ShuffleBlock(2), ShuffleBlock(4, grow=True), ShuffleBlock(len(SHARD_ROWS))]
KINDS = [*WINDOWS, "buckets"]


def sampler(kind, *, rank=0, world_size=1, consumed_rows=0, seed=0):
    run = {"global_batch_size": G, "rank": rank, "world_size": world_size, "consumed_rows": consumed_rows, "seed": seed}
    return BucketSampler(BUCKETS, **run) if kind == "buckets" else ShardSampler(SHARD_ROWS, windows=kind, **run)


def steps(kind, number, *, world_size=1, micro=G, first_step=0, seed=0):
    """Items of each global step, gathered over ranks and micro batches and sorted."""
    accumulation = G // world_size // micro
    result = [[] for _ in range(number)]
    for rank in range(world_size):
        order = sampler(kind, rank=rank, world_size=world_size, consumed_rows=first_step * G, seed=seed)
        for index, batch in enumerate(islice(order.micro_batches(micro), number * accumulation)):
            assert len(batch) == micro
            result[index // accumulation] += batch.tolist()
    return [sorted(items) for items in result]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("world_size", "micro"), [(1, 4), (1, 1), (2, 3), (3, 4), (3, 2), (4, 3), (6, 1), (12, 1)])
def test_every_split_over_ranks_and_micro_batches_sees_the_same_steps(kind, world_size, micro):
    assert steps(kind, 18, world_size=world_size, micro=micro) == steps(kind, 18)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_has_every_sequence_at_most_once_and_leaves_out_less_than_a_batch(kind, epoch):
    items = np.concatenate(steps(kind, ROWS // G, first_step=epoch * (ROWS // G))) & (2**BUCKET_SHIFT - 1)
    assert len(np.unique(items)) == len(items) == ROWS // G * G
    assert set(items // ROWS) == {epoch}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_epochs_and_seeds_differ(kind):
    per_epoch = ROWS // G
    first, second, other = (
        [[item & (2**BUCKET_SHIFT - 1) for item in step] for step in steps(kind, per_epoch, **start)]
        for start in ({}, {"first_step": per_epoch}, {"seed": 1})
    )
    assert first != other and first != [[item - ROWS for item in step] for step in second]
    assert set(sum(first, [])) != {item - ROWS for item in sum(second, [])}  # what is left out, too


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("first_step", [1, 3, 8, 11])
def test_a_resume_goes_on_with_the_next_step_on_any_number_of_ranks(kind, first_step):
    seen = steps(kind, 3, world_size=4, micro=3, first_step=first_step)
    assert seen == steps(kind, 14)[first_step : first_step + 3]


def test_a_window_holds_the_sequences_of_its_shards_and_shuffles_them():
    order = EpochOrder(SHARD_ROWS, ShuffleBlock(2), seed=3, epoch=1)
    firsts = np.cumsum([0, *SHARD_ROWS])
    start = 0
    for shards, end in zip(order.windows, order.ends, strict=True):
        rows = order.rows(start, end)
        held = np.concatenate([np.arange(firsts[shard], firsts[shard + 1]) for shard in shards])
        assert sorted(rows) == held.tolist() != rows.tolist()
        start = end
    assert sorted(np.concatenate(order.windows)) == list(range(len(SHARD_ROWS)))


def test_growing_windows_double_in_the_first_epoch_and_are_full_size_later():
    assert ShuffleBlock(20, grow=True).sizes(50, epoch=0) == [2, 4, 8, 16, 20]
    assert ShuffleBlock(20, grow=True).sizes(50, epoch=1) == [20, 20, 10]
    assert ShuffleBlock(20).sizes(50, epoch=0) == [20, 20, 10]
    assert ShuffleBlock(1, grow=True).sizes(3, epoch=0) == [1, 1, 1]


def test_one_window_is_the_full_permutation_that_runs_had_before_windows():
    order = EpochOrder(SHARD_ROWS, ShuffleBlock(len(SHARD_ROWS)), seed=5, epoch=2)
    assert order.rows(0, ROWS).tolist() == np.random.default_rng([5, 2]).permutation(ROWS).tolist()


def test_upcoming_windows_begin_with_the_one_that_is_being_read():
    order = sampler(ShuffleBlock(2))
    first, second = order.epoch_order(0), order.epoch_order(1)
    order.consumed_rows = int(first.ends[0])
    upcoming = [window.tolist() for window in islice(order.upcoming_windows(), 3)]
    assert upcoming == [window.tolist() for window in [*first.windows[1:], *second.windows][:3]]


def test_a_step_has_one_length_that_holds_all_its_examples_and_few_are_padded_to_a_longer_one():
    """Only what does not fill a batch moves up: fewer than a batch of each length but the last."""
    moved, buckets = 0, []
    for items in steps("buckets", 16):
        rows, bucket = parts_of(np.array(items))
        assert (BUCKETS[rows % ROWS] <= bucket).all()
        moved += int((BUCKETS[rows % ROWS] < bucket).sum())
        buckets.append(bucket)
    assert moved < 4 * G  # of two epochs
    assert buckets[:3] == [2, 1, 0]
    mixed = BucketSampler(BUCKETS, seed=0, global_batch_size=G, rank=0, world_size=1, is_mixed=True)
    mixed_buckets = [parts_of(batch)[1] for batch in islice(mixed.micro_batches(G), ROWS // G)]
    assert (
        mixed_buckets[0] == 2
        and mixed_buckets[:6] != buckets[:6]
        and sorted(mixed_buckets) == sorted(buckets[: ROWS // G])
    )
    few = np.array([0] * 30 + [1] * 5 + [2] * 20, np.uint8)  # no whole batch of the second length
    order = BucketSampler(few, seed=0, global_batch_size=10, rank=0, world_size=1)
    assert sorted(parts_of(batch)[1] for batch in islice(order.micro_batches(10), 5)) == [0, 0, 0, 2, 2]


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 4), (2, 4), (3, 7), (5, 4)])
@pytest.mark.parametrize("rows", [1, 7, 8, ROWS])
@pytest.mark.parametrize("has_buckets", [False, True])
def test_evaluation_has_each_result_once_in_the_order_of_the_data(rows, has_buckets, world_size, batch_size):
    """In equally many batches on each rank, and with buckets each at its own length."""
    buckets, shares = BUCKETS[:rows] if has_buckets else np.zeros(rows, int), []
    for rank in range(world_size):
        split = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
        order = BucketEvalOrder(buckets, **split) if has_buckets else EvalOrder(rows, **split)
        seen = [parts_of(np.array(batch)) for batch in order]
        assert len(seen) == len(order) and {len(items) for items, _ in seen} == {batch_size}
        assert all((buckets[items[items != PADDING]] == bucket).all() for items, bucket in seen)
        shares.append(np.concatenate([np.stack([items, items * 2], 1) for items, _ in seen]))
    assert len({len(share) for share in shares}) == 1
    assert order.merged(shares).tolist() == [[row, 2 * row] for row in range(rows)]


def test_a_length_that_no_example_needs_is_no_batch_and_graphs_need_a_batch_of_each():
    for buckets, split, wanted in (
        (np.array([2, 2, 0], np.uint8), {"batch_size": 2, "rank": 0, "world_size": 1}, [0, 2]),
        (BUCKETS, {"batch_size": 4, "rank": 1, "world_size": 2, "most": 8}, [0, 1, 2]),
    ):
        assert [parts_of(np.array(batch))[1] for batch in BucketEvalOrder(buckets, **split)] == wanted
