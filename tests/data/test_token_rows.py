"""Prepared examples as tensors: padding and lengths."""

import datasets
import numpy as np
import pytest
import torch
from rejections import rejects

from train.data.batches.buckets import with_bucket
from train.data.batches.masking import IGNORE_INDEX
from train.data.records.token_rows import TokenRows
from train.data.shards.order import PADDING

ROWS, LENGTHS, PAD = 50, (8, 20), 1
COLUMNS = {"labels": "label", "number": "row"}


INT32 = datasets.Value("int32")
KINDS = {
    "input_ids": datasets.List(INT32),
    "length": INT32,
    "second_at": INT32,
    "label": datasets.Value("int64"),
    "row": INT32,
}


def made(num_rows, seed):
    """Every third row has a second segment."""
    random = np.random.default_rng(seed)
    lengths = [20, *random.integers(3, 21, num_rows - 1).tolist()]
    columns = {
        "input_ids": [random.integers(2, 99, length).tolist() for length in lengths],
        "length": lengths,
        "second_at": [n // 2 if row % 3 == 0 else n for row, n in enumerate(lengths)],
        "label": (np.arange(num_rows) % 3).tolist(),
        "row": list(range(num_rows)),
    }
    return datasets.Dataset.from_dict(columns, datasets.Features(KINDS))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """On disk, in chunks of 7 rows: as prepared data lies, only larger."""
    path = str(tmp_path_factory.mktemp("table") / "rows.arrow")
    once = made(ROWS, 0).map(
        lambda rows: rows, batched=True, writer_batch_size=7, cache_file_name=path
    )
    assert once.data.column("input_ids").num_chunks > 5
    return once


def token_rows(table, lengths=(20,), columns=COLUMNS, weights=None):
    return TokenRows(table, pad_id=PAD, lengths=lengths, columns=columns, weights=weights)


def drawn_ids(drawn):
    """The tokens of each row, without padding."""
    inputs = drawn["inputs"]
    rows = zip(
        inputs["input_ids"].flatten(0, 1), inputs["attention_mask"].flatten(0, 1), strict=True
    )
    return [tokens[is_token.bool()].tolist() for tokens, is_token in rows]


def test_tensors_hold_the_rows_asked_for(table):
    # the last: of another epoch
    drawn = token_rows(table).draw(np.array([[3, 4], [49, 3 + 2 * ROWS]]))
    inputs = drawn["inputs"]
    assert inputs.keys() == {*COLUMNS, "attention_mask", "input_ids", "token_type_ids"}
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int64}
    for index, number in enumerate([3, 4, 49, 3]):
        found = {name: tensor.flatten(0, 1)[index].tolist() for name, tensor in inputs.items()}
        row = table[number]
        first, length = row["second_at"], row["length"]
        rest = [0] * (20 - length)
        assert found["input_ids"] == row["input_ids"] + [PAD] * len(rest)
        assert found["attention_mask"] == [1] * length + rest
        assert found["token_type_ids"] == [0] * first + [1] * (length - first) + rest
        assert (found["labels"], found["number"]) == (row["label"], row["row"])
    assert drawn["count"] == [2.0, 2.0] and isinstance(drawn["count"][0], float)
    lengths = table["length"]
    assert drawn["tokens"] == [lengths[3] + lengths[4], lengths[49] + lengths[3]]


def with_own(table, values, kind):
    return table.add_column("own", values, feature=kind)


NUMBERS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.int64,
    "uint8": torch.int64,
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_columns_keep_their_numbers(table, kind):
    values = (np.arange(ROWS) % 3 / 2).astype(kind).tolist()
    data = token_rows(with_own(table, values, datasets.Value(kind)), columns={"own": "own"})
    drawn = data.draw(np.array([[7, 9, PADDING]]))["inputs"]["own"]
    assert drawn.dtype == NUMBERS[kind] and drawn[0, :2].tolist() == [values[7], values[9]]
    assert drawn[0, 2].isnan() if drawn.is_floating_point() else drawn[0, 2] == IGNORE_INDEX


FLOATS, WHOLE = datasets.List(datasets.Value("float32")), datasets.Value("int64")
NO_INPUTS = [
    (["a"] * ROWS, datasets.Value("string"), "type string: model inputs must be numbers"),
    ([1, None] * (ROWS // 2), WHOLE, "column own has empty values"),
    ([[1], [None]] * (ROWS // 2), datasets.List(WHOLE), "column own has empty values"),
]


def test_lists_are_padded_and_what_is_no_number_is_rejected(table):
    halves = [[0.5] * length for length in table["length"]]
    lists = token_rows(with_own(table, halves, FLOATS), columns={"own": "own"})
    drawn = lists.draw(np.array([[7]]))["inputs"]["own"]
    assert drawn.dtype == torch.float32 and drawn.nan_to_num(9.0).unique().tolist() == [0.5, 9.0]
    for values, kind, message in NO_INPUTS:
        rejects(message, token_rows, with_own(table, values, kind), columns={"own": "own"})
    rejects("no column title; there are input_ids", token_rows, table, columns={"labels": "title"})
    rejects("a row of 20 tokens, longer than 16", token_rows, table, [8, 16])


def test_targets_of_several_numbers_are_as_wide_as_they_are_and_any_number_counts(table):
    """-100 too, which stands for no label where labels are whole numbers."""
    pairs = [[row / 4, float(IGNORE_INDEX)] for row in range(ROWS)]
    kind = datasets.List(datasets.Value("float32"), length=2)
    joined = datasets.concatenate_datasets([with_own(table, pairs, kind)] * 2)
    for data, rows in ((joined, [7, ROWS + 8]), (joined.select(range(5, 60)), [2, ROWS + 3])):
        drawn = token_rows(data, columns={"labels": "own"}).draw(np.array([[*rows, PADDING]]))
        labels = drawn["inputs"]["labels"]
        assert labels.dtype == torch.float32 and labels[0, :2].tolist() == [pairs[7], pairs[8]]
        assert labels[0, 2].isnan().all() and drawn["count"] == [4.0]


def test_a_row_takes_the_first_length_it_fits_into(table):
    data, lengths = token_rows(table, LENGTHS), np.array(table["length"])
    assert np.array_equal(data.bucket_of, lengths > 8) and data.bucket_of.dtype == np.uint8
    assert token_rows(table, [2, 20]).bucket_of.all()
    short = np.flatnonzero(lengths <= 8)[:4]
    drawn = data.draw(short[None] + 2**40 // ROWS * ROWS)  # of a late epoch
    assert drawn["inputs"]["input_ids"].shape == (1, 4, 8)
    assert drawn["inputs"]["number"].tolist() == [short.tolist()]
    long = with_bucket(np.array([[0, PADDING]]), 1)
    assert data.draw(long)["inputs"]["input_ids"].shape == (1, 2, 20)


def test_rows_that_do_not_fit_their_bucket_are_errors(table):
    draw = token_rows(table, LENGTHS).draw
    rejects("a row of 20 tokens in a batch of 8", draw, np.array([[0]]), error=ValueError)
    mixed = with_bucket(np.array([[5, 0]]), np.array([[0, 1]]))
    rejects(r"several lengths: buckets \[0, 1\]", draw, mixed, error=ValueError)


def test_padding_counts_for_nothing(table):
    """Whole rows stand in for it, also in a batch without another row: a Longformer rejects questions that are cut."""
    lengths = np.array(table["length"])
    short = table[int(np.flatnonzero(lengths <= 8)[0])]
    items = np.array([[PADDING, short["row"]], [PADDING, PADDING]])
    drawn = token_rows(table, LENGTHS).draw(items)
    labels = [[IGNORE_INDEX, short["label"]], [IGNORE_INDEX] * 2]
    assert drawn["inputs"]["labels"].tolist() == labels
    assert drawn_ids(drawn) == [short["input_ids"]] * 4
    assert (drawn["count"], drawn["tokens"]) == ([1.0, 0.0], [short["length"], 0])
    shortest = int(lengths.argmin())
    for given, bucket, row in (([PADDING, PADDING], 0, shortest), ([PADDING, 0], 1, 0)):
        drawn = token_rows(table, (2, 20)).draw(with_bucket(np.array([given]), bucket))
        assert drawn_ids(drawn) == [table[row]["input_ids"]] * 2
    assert token_rows(table, columns={}).draw(np.array([[3, PADDING]]))["count"] == [1.0]
