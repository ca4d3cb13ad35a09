"""Hugging Face data sets of packed sequences to shards, by `python -m train.convert`."""

import datasets
import numpy as np
import pytest

from train.data.shards.format import ShardSet, check_files, read_manifest
from train.tools import convert


def run(capsys, *arguments):
    code = convert.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


def save(folder, **columns):
    table = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(train=table, validation=table).save_to_disk(str(folder))
    return folder


def test_sequences_packed_by_others_become_one_segment(prepared, tmp_path, capsys):
    arguments = ["from-arrow", save(tmp_path / "in", input_ids=[[5, 6, 7, 8]] * 10), tmp_path / "out"]
    assert run(capsys, *arguments, "--tokenizer", prepared / "tokenizer", "--column", "input_ids")[0] == 0
    rows = ShardSet(tmp_path / "out", read_manifest(tmp_path / "out"), "train").rows(np.arange(10))
    assert rows.tokens.tolist() == [[5, 6, 7, 8]] * 10 and rows.pivot.tolist() == [4] * 10


def test_columns_of_our_own_are_kept(prepared, tmp_path, capsys):
    before = read_manifest(prepared)
    for split in ("train", "validation"):
        rows = ShardSet(prepared, before, split).rows(np.arange(before.rows(split)))
        save(tmp_path / split, **{name: values.tolist() for name, values in vars(rows).items()})
    splits = {split: datasets.load_from_disk(str(tmp_path / split))[split] for split in ("train", "validation")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "in"))
    given = ["from-arrow", tmp_path / "in", tmp_path / "out", "--tokenizer", prepared / "tokenizer"]
    code, output = run(capsys, *given)
    assert code == 0 and "the tokenizer read the text with 0.00% unknown tokens" in output.out
    after = read_manifest(tmp_path / "out")
    check_files(tmp_path / "out", after, checksums=True)
    assert [shard.sha256 for shard in after.shards] == [shard.sha256 for shard in before.shards]
    assert after.tokenizer.sha256 == before.tokenizer.sha256
    assert after.counts["unigram_entropy"] == pytest.approx(before.counts["unigram_entropy"], abs=0.01)  # the tail


LISTS = [[5, 6]] * 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[5, 6]]}, "has no column tokens; name one of input_ids with --column"),
        ({"tokens": []}, "a split has no rows"),
        ({"tokens": [[], []]}, "sequence 0 has 0 ids; it must have 1 to 65,535"),
        ({"tokens": [[1, 2], [1, 2, 3]]}, "column tokens: sequence 1 must have 2 ids, like sequence 0"),
        ({"tokens": [[1, 2], None]}, "column tokens: sequence 1 must have 2 ids"),
        ({"tokens": [[1, 2], [1, None]]}, "column tokens holds int64 with 1 nulls in the rows from 0;"),
        ({"tokens": [[1, 2], [1, 999]]}, "column tokens holds values from 1 to 999; they must be from 0 to 119"),
        ({"tokens": [[1, 2], [-100, 3]]}, "column tokens holds values from -100 to 3; they must be from 0 to 119"),
        ({"tokens": [[1.5, 2.0]]}, "column tokens holds double in the rows from 0;"),
        ({"tokens": [1, 2]}, "column tokens holds single values; it must hold lists of ids"),
        ({"tokens": LISTS, "pivot": [2, 3, 1]}, "column pivot holds values from 1 to 3; they must be from 0 to 2"),
        ({"tokens": LISTS, "pivot": [-1, 2, 1]}, "column pivot holds values from -1 to 2; they must be from 0 to 2"),
        ({"tokens": LISTS, "pivot": [0.5, 2, 1]}, "column pivot holds double in the rows from 0;"),
        ({"tokens": LISTS, "same_document": [300, 0, 1]}, "same_document holds values from 0 to 300; they must be"),
        ({"tokens": LISTS, "same_document": [None, 0, 1]}, "column same_document holds int64 with 1 nulls"),
        ({"tokens": [[1, 1]] * 3}, "100.00% unknown tokens"),
    ],
)
def test_what_cannot_be_shards_is_rejected_before_anything_is_written(prepared, tmp_path, capsys, columns, message):
    given = ["from-arrow", save(tmp_path / "in", **columns), tmp_path / "out", "--tokenizer", prepared / "tokenizer"]
    code, output = run(capsys, *given)
    assert code == 2 and message in output.err
    assert not (tmp_path / "out").exists()
