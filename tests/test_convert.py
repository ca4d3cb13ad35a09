"""Shards to Hugging Face data sets and back, by `python -m train.convert`."""

import datasets
import numpy as np
import pytest

from train import convert
from train.data.shards.format import ShardSet, check_files, read_manifest


def run(capsys, *arguments):
    code = convert.main([str(argument) for argument in arguments])
    return code, capsys.readouterr()


@pytest.fixture
def arrow(prepared, tmp_path, capsys):
    code, _ = run(capsys, "to-arrow", prepared, tmp_path / "arrow")
    assert code == 0
    return tmp_path / "arrow"


def test_there_and_back_changes_no_sequence(prepared, arrow, tmp_path, capsys):
    result = datasets.load_from_disk(str(arrow))
    before = read_manifest(prepared)
    for split in ("train", "validation"):
        rows = ShardSet(prepared, before, split).rows(np.arange(before.rows(split)))
        table = result[split].with_format("numpy")[:]
        assert np.array_equal(table["tokens"], rows.tokens) and np.array_equal(table["pivot"], rows.pivot)
        assert result[split].features["tokens"].feature.dtype == "uint16"
    code, output = run(capsys, "from-arrow", arrow, tmp_path / "back", "--tokenizer", prepared / "tokenizer")
    assert code == 0, output.err
    after = read_manifest(tmp_path / "back")
    check_files(tmp_path / "back", after, checksums=True)
    assert [shard.sha256 for shard in after.shards] == [shard.sha256 for shard in before.shards]
    assert after.tokenizer.sha256 == before.tokenizer.sha256
    assert after.counts["unigram_entropy"] == pytest.approx(before.counts["unigram_entropy"], abs=0.01)  # the tail


def save(folder, **columns):
    table = datasets.Dataset.from_dict(columns)
    datasets.DatasetDict(train=table, validation=table).save_to_disk(str(folder))
    return folder


def test_sequences_packed_by_others_become_one_segment(prepared, tmp_path, capsys):
    arguments = ["from-arrow", save(tmp_path / "in", input_ids=[[5, 6, 7, 8]] * 10), tmp_path / "out"]
    assert run(capsys, *arguments, "--tokenizer", prepared / "tokenizer", "--column", "input_ids")[0] == 0
    rows = ShardSet(tmp_path / "out", read_manifest(tmp_path / "out"), "train").rows(np.arange(10))
    assert rows.tokens.tolist() == [[5, 6, 7, 8]] * 10 and rows.pivot.tolist() == [4] * 10


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"input_ids": [[5, 6]]}, "has no column tokens; there are input_ids (--column)"),
        ({"tokens": [[1, 2], [1, 2, 3]]}, "sequences 0 and following are not 2 ids each"),
        ({"tokens": [[1, 2], [1, 999]]}, "holds ids from 1 to 999, the tokenizer's are 0 to 119: another one?"),
        ({"tokens": [[1, 2], [-100, 3]]}, "holds ids from -100 to 3, the tokenizer's are 0 to 119: another one?"),
        ({"tokens": [1, 2]}, "column tokens holds single values; it must hold lists of ids"),
        ({"tokens": [[5, 6]] * 3, "pivot": [2, 3, 1]}, "column pivot holds 3, beyond the sequence's 2"),
    ],
)
def test_what_cannot_be_shards_is_rejected(prepared, tmp_path, capsys, columns, message):
    given = ["from-arrow", save(tmp_path / "in", **columns), tmp_path / "out", "--tokenizer", prepared / "tokenizer"]
    code, output = run(capsys, *given)
    assert code == 2 and message in output.err
    assert not (tmp_path / "out" / "manifest.json").exists()
