"""Examples that are not sharded: the same batches and results on any number of ranks."""

from itertools import islice

import datasets
import numpy as np
import pytest
import torch

from train.config import InputError
from train.data.batches import Batches
from train.data.masking import IGNORE_INDEX
from train.data.order import PADDING, EvalOrder, ShardSampler
from train.data.records import Records

ROWS = 50
COLUMNS = {"input_ids": "ids", "labels": "stars", "weights": "weight"}


@pytest.fixture(scope="module")
def table():
    random = np.random.default_rng(0)
    return datasets.Dataset.from_dict(
        {
            "ids": random.integers(0, 99, (ROWS, 7)).tolist(),
            "stars": (np.arange(ROWS) % 3).tolist(),
            "weight": random.random(ROWS).tolist(),
            "text": ["not asked for"] * ROWS,
        }
    )


def test_tensors_hold_the_rows_asked_for(table):
    drawn = Records(table, COLUMNS, label="labels").draw(np.array([[3, 4], [49, 3 + 2 * ROWS]]))
    assert sorted(drawn["inputs"]) == ["input_ids", "labels", "weights"]
    assert drawn["inputs"]["input_ids"].dtype == torch.int64 and drawn["inputs"]["input_ids"].shape == (2, 2, 7)
    assert drawn["inputs"]["weights"].dtype == torch.float32
    assert drawn["inputs"]["input_ids"][1, 0].tolist() == table[49]["ids"]
    assert torch.equal(drawn["inputs"]["input_ids"][0, 0], drawn["inputs"]["input_ids"][1, 1])  # of another epoch
    assert drawn["count"] == [2, 2]


def test_padding_has_no_label(table):
    drawn = Records(table, COLUMNS, label="labels").draw(np.array([[3, PADDING]]))
    assert drawn["inputs"]["labels"].tolist() == [[0, IGNORE_INDEX]]
    assert drawn["count"] == [1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_training_sees_the_same_global_batches(table, world_size):
    data = Records(table, COLUMNS, label="labels")

    def batches(ranks):
        made = []
        for rank in range(ranks):
            order = ShardSampler([ROWS], seed=1, global_batch_size=12, rank=rank, world_size=ranks)
            size = 12 // ranks
            loader = Batches(
                data, order.micro_batches(size), batch_size=size, num_workers=0, prefetch=1, pin_memory=False
            )
            made.append(torch.stack([batch["inputs"]["input_ids"] for batch in islice(loader, 9)]))
        return torch.stack(made, 2).flatten(1, 2)

    assert torch.equal(batches(world_size), batches(1))


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [4, 7])
def test_evaluation_gives_each_result_once_and_in_order(table, world_size, batch_size):
    data, shares = Records(table, COLUMNS, label="labels"), []
    for rank in range(world_size):
        order = EvalOrder(ROWS, batch_size, rank, world_size)
        loader = Batches(data, order, batch_size=batch_size, num_workers=0, prefetch=1, pin_memory=False)
        shares.append(np.concatenate([batch["inputs"]["input_ids"].numpy() for batch in loader]))
    assert np.array_equal(order.merged(shares), np.array(table["ids"]))


def test_what_does_not_fit_is_refused(table):
    with pytest.raises(InputError, match="no column title; there are ids, stars, weight, text"):
        Records(table, {"labels": "title"}, label="labels")
    with pytest.raises(InputError, match="the label stars is none of the inputs"):
        Records(table, COLUMNS, label="stars")
    ragged = datasets.Dataset.from_dict({"ids": [[1], [1, 2]], "stars": [0, 1]})
    data = Records(ragged, {"input_ids": "ids", "labels": "stars"}, label="labels")
    with pytest.raises(InputError, match="column ids has rows of different lengths"):
        data.draw(np.array([[0, 1]]))
