from itertools import islice

import pytest

from train.data.order import PADDING, EvalOrder, TrainOrder, epoch_order

ROWS, G = 103, 24


def steps(*, world_size, micro, number, first_step=0, seed=0):
    """Sorted items of each global step, gathered over ranks and micro batches."""
    per_rank = []
    for rank in range(world_size):
        order = TrainOrder(ROWS, seed, G, micro, rank, world_size, first_step)
        accumulation = G // world_size // micro
        batches = list(islice(iter(order), number * accumulation))
        assert {len(batch) for batch in batches} == {micro}
        per_rank.append([sum(batches[i * accumulation : (i + 1) * accumulation], []) for i in range(number)])
    return [sorted(sum((rank[step] for rank in per_rank), [])) for step in range(number)]


@pytest.mark.parametrize(
    ("world_size", "micro"), [(1, 24), (1, 8), (1, 1), (2, 12), (2, 3), (3, 8), (3, 1), (4, 2), (8, 3), (24, 1)]
)
def test_every_split_over_ranks_and_micro_batches_sees_the_same_steps(world_size, micro):
    assert steps(world_size=world_size, micro=micro, number=9) == steps(world_size=1, micro=G, number=9)


def test_an_epoch_reads_no_sequence_twice_and_leaves_out_only_the_tail():
    epoch = sum(steps(world_size=2, micro=6, number=ROWS // G), [])
    assert len(set(epoch)) == len(epoch) == ROWS // G * G
    assert max(epoch) < ROWS


def test_epochs_differ_in_order_and_in_what_is_left_out():
    first, second = (sum(steps(world_size=1, micro=G, number=4, first_step=s), []) for s in (0, 4))
    assert {item // ROWS for item in second} == {1}
    assert {item % ROWS for item in second} != set(first)
    assert (epoch_order(0, 0, ROWS) != epoch_order(0, 1, ROWS)).any()
    assert (epoch_order(0, 0, ROWS) != epoch_order(1, 0, ROWS)).any()


@pytest.mark.parametrize("first_step", [1, 3, 4, 7])
def test_a_resume_goes_on_with_the_next_step_on_any_number_of_ranks(first_step):
    whole = steps(world_size=1, micro=G, number=10)
    assert steps(world_size=4, micro=3, number=3, first_step=first_step) == whole[first_step : first_step + 3]


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 7, 8, 100])
def test_evaluation_sees_each_sequence_once_in_equally_many_batches(world_size, rows):
    per_rank = [list(EvalOrder(rows, 4, rank, world_size)) for rank in range(world_size)]
    assert len({len(batches) for batches in per_rank}) == 1
    assert {len(batch) for batches in per_rank for batch in batches} == {4}
    seen = [item for batches in per_rank for batch in batches for item in batch if item != PADDING]
    assert sorted(seen) == list(range(rows))
