"""Prepared examples as tensors: padding and lengths."""

import datasets
import numpy as np
import pytest
import torch
from rejections import rejects

from train.data.batches.buckets import BUCKET_SHIFT
from train.data.batches.masking import IGNORE_INDEX
from train.data.records.token_rows import TokenRows
from train.data.shards.order import PADDING

ROWS, LENGTHS, PAD = 50, (8, 20), 1
COLUMNS = {"labels": "label", "number": "row"}


def made(num_rows, seed):
    """Every third row has a second segment."""
    random = np.random.default_rng(seed)
    length = random.integers(3, 21, num_rows)
    length[0] = 20
    columns = {
        "input_ids": [random.integers(2, 99, n).tolist() for n in length],
        "length": length.tolist(),
        "second_at": [int(n) // 2 if row % 3 == 0 else int(n) for row, n in enumerate(length)],
        "label": (np.arange(num_rows) % 3).tolist(),
        "row": list(range(num_rows)),
    }
    int32 = datasets.Value("int32")
    kinds = {"input_ids": datasets.List(int32), "label": datasets.Value("int64"), "length": int32}
    return datasets.Dataset.from_dict(
        columns, datasets.Features(kinds | {"second_at": int32, "row": int32})
    )


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


def test_tensors_hold_the_rows_asked_for(table):
    items = np.array([[3, 4], [49, 3 + 2 * ROWS]])
    drawn = token_rows(table).draw(items)
    assert sorted(drawn["inputs"]) == [
        "attention_mask",
        "input_ids",
        "labels",
        "number",
        "token_type_ids",
    ]
    assert {tensor.dtype for tensor in drawn["inputs"].values()} == {torch.int64}
    assert drawn["inputs"]["labels"].shape == (2, 2)
    # the last is of another epoch
    for index, row in [
        ((0, 0), 3),
        ((0, 1), 4),
        ((1, 0), 49),
        ((1, 1), 3),
    ]:
        row = table[row]
        padding = 20 - row["length"]
        second = row["length"] - row["second_at"]
        inputs = {name: tensor[index].tolist() for name, tensor in drawn["inputs"].items()}
        assert inputs["input_ids"] == row["input_ids"] + [PAD] * padding
        assert inputs["attention_mask"] == [1] * row["length"] + [0] * padding
        assert inputs["token_type_ids"] == [0] * row["second_at"] + [1] * second + [0] * padding
        assert (inputs["labels"], inputs["number"]) == (row["label"], row["row"])
    assert drawn["count"] == [2.0, 2.0] and isinstance(drawn["count"][0], float)
    assert drawn["tokens"] == [
        sum(table["length"][row] for row in rows) for rows in ([3, 4], [49, 3])
    ]


def test_columns_keep_their_numbers_or_are_rejected(table):
    add = lambda values, kind: table.add_column("own", values, feature=kind)  # noqa: E731
    kinds = {
        "float32": torch.float32,
        "float64": torch.float64,
        "bool": torch.int64,
        "uint8": torch.int64,
    }
    for kind, dtype in kinds.items():
        values = (np.arange(ROWS) % 3 / 2).astype(kind).tolist()
        data = token_rows(add(values, datasets.Value(kind)), columns={"own": "own"})
        drawn = data.draw(np.array([[7, 9, PADDING]]))["inputs"]["own"]
        assert drawn.dtype == dtype and drawn[0, :2].tolist() == [values[7], values[9]]
        assert drawn[0, 2].isnan() if dtype.is_floating_point else drawn[0, 2] == IGNORE_INDEX
    lists = add(
        [[0.5] * length for length in table["length"]], datasets.List(datasets.Value("float32"))
    )
    drawn = token_rows(lists, columns={"own": "own"}).draw(np.array([[7]]))["inputs"]["own"]
    assert drawn.dtype == torch.float32 and drawn.nan_to_num(9.0).unique().tolist() == [0.5, 9.0]
    for values, kind, message in (
        (
            ["a"] * ROWS,
            datasets.Value("string"),
            "column own has type string: model inputs must be numbers",
        ),
        ([1, None] * (ROWS // 2), datasets.Value("int64"), "column own has empty values"),
        (
            [[1], [None]] * (ROWS // 2),
            datasets.List(datasets.Value("int64")),
            "column own has empty values",
        ),
    ):
        rejects(message, token_rows, add(values, kind), columns={"own": "own"})


def test_targets_of_several_numbers_are_as_wide_as_they_are_and_any_number_counts(table):
    """-100 too, which stands for no label where labels are whole numbers."""
    pairs = [[row / 4, float(IGNORE_INDEX)] for row in range(ROWS)]
    kind = datasets.List(datasets.Value("float32"), length=2)
    joined = datasets.concatenate_datasets([table.add_column("pair", pairs, feature=kind)] * 2)
    for data, rows in ((joined, [7, ROWS + 8]), (joined.select(range(5, 60)), [2, ROWS + 3])):
        drawn = token_rows(data, columns={"labels": "pair"}).draw(np.array([[*rows, PADDING]]))
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
    long = np.array([[0, PADDING]]) + np.array([[1 << BUCKET_SHIFT, 0]])
    assert data.draw(long)["inputs"]["input_ids"].shape == (1, 2, 20)


def test_rows_that_do_not_fit_their_bucket_are_errors(table):
    data = token_rows(table, LENGTHS)
    rejects("a row of 20 tokens in a batch of 8", data.draw, np.array([[0]]), error=ValueError)
    rejects(
        r"several lengths: buckets \[0, 1\]",
        data.draw,
        np.array([[5, 1 << BUCKET_SHIFT]]),
        error=ValueError,
    )


def whole_rows(drawn):
    inputs = drawn["inputs"]
    return inputs["input_ids"].flatten(0, 1), inputs["attention_mask"].flatten(0, 1)


def test_padding_counts_for_nothing(table):
    """Whole rows stand in for it, also in a batch without another row: a Longformer rejects questions that are cut."""
    data, lengths = token_rows(table, LENGTHS), np.array(table["length"])
    short = int(np.flatnonzero(lengths <= 8)[0])
    drawn = data.draw(np.array([[PADDING, short], [PADDING, PADDING]]))
    assert drawn["inputs"]["labels"].tolist() == [
        [IGNORE_INDEX, table[short]["label"]],
        [IGNORE_INDEX] * 2,
    ]
    rows = [tokens[real.bool()].tolist() for tokens, real in zip(*whole_rows(drawn), strict=True)]
    assert rows == [table[short]["input_ids"]] * 4
    assert (drawn["count"], drawn["tokens"]) == ([1.0, 0.0], [table[short]["length"], 0])
    for given, row in (
        ([PADDING, PADDING], int(lengths.argmin())),
        ([PADDING, 1 << BUCKET_SHIFT], 0),
    ):
        drawn = token_rows(table, (2, 20)).draw(np.array([given]))
        assert [
            tokens[real.bool()].tolist() for tokens, real in zip(*whole_rows(drawn), strict=True)
        ] == [table[row]["input_ids"]] * 2
    assert token_rows(table, columns={}).draw(np.array([[3, PADDING]]))["count"] == [1.0]


def test_chosen_and_joined_tables_are_read_alike(table):
    other = made(9, 1)
    joined = datasets.concatenate_datasets([table, other])
    drawn = token_rows(joined).draw(np.array([[ROWS - 1, ROWS, ROWS + 8]]))["inputs"]
    assert drawn["number"].tolist() == [[ROWS - 1, 0, 8]]
    assert drawn["input_ids"][0, 2, : other[8]["length"]].tolist() == other[8]["input_ids"]
    for chosen in ([41, 7, 8], range(10, 13)):
        drawn = token_rows(table.select(chosen)).draw(np.array([[2, 0]]))["inputs"]
        assert drawn["number"].tolist() == [[chosen[2], chosen[0]]]
        assert (
            drawn["input_ids"][0, 0, : table[chosen[2]]["length"]].tolist()
            == table[chosen[2]]["input_ids"]
        )


def test_what_does_not_fit_is_rejected(table):
    rejects(
        "no column title; there are input_ids, length",
        token_rows,
        table,
        columns={"labels": "title"},
    )
    rejects("a row of 20 tokens, longer than 16", token_rows, table, [8, 16])
