"""Batches of a few static lengths: one length a step, nothing lost, the same on any number of ranks."""

from itertools import islice

import numpy as np
import pytest

from train.data.batches.buckets import BUCKET_SHIFT, BucketEvalOrder, BucketSampler, parts_of
from train.data.shards.order import PADDING

ROWS, G = 103, 12
BUCKETS = np.random.default_rng(7).choice(3, ROWS, p=[0.5, 0.3, 0.2]).astype(np.uint8)


def sampler(*, rank=0, world_size=1, consumed_rows=0, seed=0):
    return BucketSampler(
        BUCKETS, seed=seed, global_batch_size=G, rank=rank, world_size=world_size, consumed_rows=consumed_rows
    )


def steps(world_size, micro, number, first_step=0):
    """Items of each global step, over ranks and micro batches, sorted; each micro batch has one bucket."""
    accumulation = G // world_size // micro
    result = [[] for _ in range(number)]
    for rank in range(world_size):
        order = sampler(rank=rank, world_size=world_size, consumed_rows=first_step * G)
        for index, batch in enumerate(islice(order.micro_batches(micro), number * accumulation)):
            result[index // accumulation] += batch.tolist()
    return [sorted(items) for items in result]


@pytest.mark.parametrize(("world_size", "micro"), [(1, 4), (3, 2), (12, 1)])
def test_every_split_has_the_same_steps(world_size, micro):
    assert steps(world_size, micro, 20) == steps(1, 12, 20)


def test_a_step_has_one_length_that_holds_all_its_examples_and_few_are_padded_to_a_longer_one():
    """Only what does not fill a batch moves up: fewer than a batch of each length but the last."""
    moved, buckets = 0, []
    for items in steps(1, 12, 16):
        rows, bucket = parts_of(np.array(items))
        assert (BUCKETS[rows % ROWS] <= bucket).all()
        moved += int((BUCKETS[rows % ROWS] < bucket).sum())
        buckets.append(bucket)
    assert moved < 4 * G  # of two epochs
    assert buckets[:3] == [2, 1, 0]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_has_every_example_at_most_once_and_leaves_out_less_than_a_batch(epoch):
    batches = ROWS // G
    numbers = np.concatenate(steps(1, 12, batches, first_step=epoch * batches)) & (2**BUCKET_SHIFT - 1)
    assert len(np.unique(numbers % ROWS)) == len(numbers) == batches * G
    assert set(numbers // ROWS) == {epoch}


def test_epochs_and_seeds_differ_and_a_resume_continues():
    whole = steps(1, 12, 20)
    assert whole[8:] == steps(3, 4, 12, first_step=8)
    rows = [(parts_of(np.array(items))[0] % ROWS).tolist() for items in whole]
    assert rows[:8] != rows[8:16]
    other = next(sampler(seed=1).micro_batches(12)).tolist()
    assert sorted(other) != whole[0]


def test_a_bucket_without_a_whole_batch_of_its_own_is_no_step():
    few = np.array([0] * 30 + [1] * 5 + [2] * 20, np.uint8)
    order = BucketSampler(few, seed=0, global_batch_size=10, rank=0, world_size=1)
    result = [parts_of(batch) for batch in islice(order.micro_batches(10), 5)]
    assert sorted(bucket for _, bucket in result) == [0, 0, 0, 2, 2]
    assert all((few[rows % 55] <= bucket).all() for rows, bucket in result)


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 4), (3, 7)])
def test_evaluation_gives_each_result_once_in_the_order_of_the_data_at_its_own_length(world_size, batch_size):
    shares = []
    for rank in range(world_size):
        order = BucketEvalOrder(BUCKETS, batch_size=batch_size, rank=rank, world_size=world_size)
        result = []
        for batch in order:
            rows, bucket = parts_of(np.array(batch))
            assert len(batch) == batch_size
            real = rows[rows != PADDING]
            assert (BUCKETS[real] == bucket).all()
            result.append(np.stack([rows, rows * 2], 1))
        assert len(result) == len(order)
        shares.append(np.concatenate(result))
    merged = order.merged(shares)
    assert merged[:, 0].tolist() == list(range(ROWS)) and merged[:, 1].tolist() == list(range(0, 2 * ROWS, 2))


def test_a_length_that_no_example_needs_is_no_batch():
    order = BucketEvalOrder(np.array([2, 2, 0], np.uint8), batch_size=2, rank=0, world_size=1)
    assert [parts_of(np.array(batch))[1] for batch in order] == [0, 2]
    assert order.merged([np.arange(4)[:, None]]).tolist() == [[2], [3], [0]]


def test_only_graphs_are_a_batch_of_each_length():
    order = BucketEvalOrder(BUCKETS, batch_size=4, rank=1, world_size=2, most=8)
    assert [parts_of(np.array(batch))[1] for batch in order] == [0, 1, 2]
