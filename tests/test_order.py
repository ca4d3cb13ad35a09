from itertools import islice

import numpy as np
import pytest

from train.data.shards.order import PADDING, EpochOrder, EvalOrder, ShardSampler, ShuffleBlock

SHARD_ROWS = [40, 30, 8, 20, 5]
ROWS, G = sum(SHARD_ROWS), 24
WINDOWS = [ShuffleBlock(1), ShuffleBlock(2), ShuffleBlock(4, grow=True), ShuffleBlock(len(SHARD_ROWS))]


def sampler(*, rank=0, world_size=1, windows=None, seed=0, consumed_rows=0):
    return ShardSampler(
        SHARD_ROWS,
        seed=seed,
        windows=windows,
        global_batch_size=G,
        rank=rank,
        world_size=world_size,
        consumed_rows=consumed_rows,
    )


def steps(*, world_size, micro, number, first_step=0, seed=0, windows=None):
    """Sorted items of each global step, gathered over ranks and micro batches."""
    per_rank = []
    for rank in range(world_size):
        order = sampler(rank=rank, world_size=world_size, windows=windows, seed=seed, consumed_rows=first_step * G)
        accumulation = G // world_size // micro
        batches = [batch.tolist() for batch in islice(order.micro_batches(micro), number * accumulation)]
        assert {len(batch) for batch in batches} == {micro}
        per_rank.append([sum(batches[i * accumulation : (i + 1) * accumulation], []) for i in range(number)])
    return [sorted(sum((rank[step] for rank in per_rank), [])) for step in range(number)]


@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 24), (1, 8), (1, 1), (2, 12), (2, 3), (3, 8), (3, 1), (4, 2), (8, 3), (24, 1)]
)
def test_every_split_over_ranks_and_micro_batches_sees_the_same_steps(world_size, micro):
    for windows in WINDOWS:
        seen = steps(world_size=world_size, micro=micro, number=9, windows=windows)
        assert seen == steps(world_size=1, micro=G, number=9, windows=windows)


@pytest.mark.parametrize("windows", WINDOWS)
def test_an_epoch_reads_no_sequence_twice_and_leaves_out_only_the_tail(windows):
    epoch = sum(steps(world_size=2, micro=6, number=ROWS // G, windows=windows), [])
    assert len(set(epoch)) == len(epoch) == ROWS // G * G
    assert max(epoch) < ROWS


def test_epochs_differ_in_order_and_in_what_is_left_out():
    first, second = (sum(steps(world_size=1, micro=G, number=4, first_step=s), []) for s in (0, 4))
    assert {item // ROWS for item in second} == {1}
    assert {item % ROWS for item in second} != set(first)
    for windows in WINDOWS:
        orders = [
            EpochOrder(SHARD_ROWS, windows, seed=seed, epoch=epoch).rows(0, ROWS).tolist()
            for seed, epoch in ((0, 0), (0, 1), (1, 0))
        ]
        assert len(set(map(tuple, orders))) == 3
        assert all(sorted(order) == list(range(ROWS)) for order in orders)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("first_step", [1, 3, 4, 7])
def test_a_resume_goes_on_with_the_next_step_on_any_number_of_ranks(first_step, windows):
    whole = steps(world_size=1, micro=G, number=10, windows=windows)
    seen = steps(world_size=4, micro=3, number=3, first_step=first_step, windows=windows)
    assert seen == whole[first_step : first_step + 3]


def test_a_window_holds_the_sequences_of_its_shards_and_shuffles_them():
    order = EpochOrder(SHARD_ROWS, ShuffleBlock(2), seed=3, epoch=1)
    firsts = np.cumsum([0, *SHARD_ROWS])
    start = 0
    for shards, end in zip(order.windows, order.ends, strict=True):
        rows = order.rows(start, end)
        held = np.concatenate([np.arange(firsts[shard], firsts[shard + 1]) for shard in shards])
        assert sorted(rows) == held.tolist()
        assert rows.tolist() != held.tolist()
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


def test_a_rank_reads_every_wth_row_of_a_step():
    order = sampler(rank=2, world_size=4, windows=ShuffleBlock(2), consumed_rows=G)
    expected = order.epoch_order(0).rows(G, 2 * G)[2::4]
    assert next(order.micro_batches(G // 4)).tolist() == expected.tolist()


def test_upcoming_windows_begin_with_the_one_that_is_being_read():
    order = sampler(windows=ShuffleBlock(2))
    ends = order.epoch_order(0).ends
    order.consumed_rows = int(ends[0])
    upcoming = [window.tolist() for window in islice(order.upcoming_windows(), 3)]
    expected = [*order.epoch_order(0).windows[1:], *order.epoch_order(1).windows]
    assert upcoming == [window.tolist() for window in expected[:3]]


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 7, 8, 100])
def test_evaluation_sees_each_sequence_once_in_equally_many_batches(world_size, rows):
    per_rank = [list(EvalOrder(rows, 4, rank, world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in per_rank}) == 1
    assert {len(batch) for batches in per_rank for batch in batches} == {4}
    seen = [item for batches in per_rank for batch in batches for item in batch if item != PADDING]
    assert sorted(seen) == list(range(rows))
