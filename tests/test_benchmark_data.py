"""The benchmark of loaders in its smallest form, without peers: what it reads and counts, not what it times."""

import itertools
import re

import numpy as np
import pytest
import torch

from benchmarks import data
from benchmarks.peers.corpus import Corpus, read_corpus, row_numbers, write_corpus
from benchmarks.peers.readers import READERS, WRITERS

BATCHES = 7
OURS = [
    name for name, reader in READERS.items() if reader.environment == "ours" and not reader.label.startswith("data")
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A tiny one, in the formats that need no other library."""
    made = Corpus(
        tmp_path_factory.mktemp("benchmark") / "corpus", shards=4, shard_rows=8 * BATCHES, seq_len=32, batch=8
    )
    write_corpus(made)
    for name in ("ours", "shards"):
        WRITERS[name](made)
    assert read_corpus(made.folder) == made
    return made


@pytest.mark.parametrize("name", OURS)
def test_every_reader_gives_every_row_once_in_an_epoch(written, name):
    batches = list(itertools.islice(READERS[name].build(written), written.batches))
    assert {(batch.dtype, tuple(batch.shape)) for batch in batches} == {(torch.int64, (8, 32))}
    flat = written.flat().astype(np.int64)
    if not name.startswith("masked"):
        rows = [row for batch in batches for row in row_numbers(batch.numpy())]
        assert sorted(rows) == list(range(written.rows))
        assert rows != sorted(rows)
        np.testing.assert_array_equal(torch.cat(batches).numpy(), flat[rows])


def test_one_run_prints_the_tables(prepared, monkeypatch, capsys):
    monkeypatch.setattr(data, "READERS", {"ours": READERS["ours"]})
    monkeypatch.setattr(data, "LARGE_WINDOWS", (16,))
    monkeypatch.setattr(data, "SHUFFLE_SHARDS", 4)
    monkeypatch.setattr(data, "SHUFFLE_WINDOWS", (1, 4))
    small = "--parts speed resume shuffle --rounds 1 --seconds 0.05 --rows 64 --epochs 2 --peers --text".split()
    data.main([*small, str(prepared)])
    loaders, large, shuffles = capsys.readouterr().out.strip().split("\n\n")[1:]
    ours = loaders.splitlines()[-1]
    assert re.match(r"\| \*\*ours\*\* \| [0-9.]+ \| [0-9.]+ \|", ours)
    assert "| yes |" in ours
    assert "windows of 16 shards" in large
    one, full = (line.split(" | ") for line in shuffles.splitlines()[2:])
    assert float(one[1]) == 1
    assert float(full[1]) > 3.5
    assert float(one[2]) > 10 * float(full[2])


def test_a_shuffle_is_measured_against_independent_draws():
    shard_rows = [64] * 16
    tokens = np.repeat(np.arange(16), 64)[:, None] * np.ones(32, int)  # a token for each shard
    full = [data.shuffle_of(data.epoch_batches(shard_rows, 32, 16, epoch), shard_rows, tokens) for epoch in range(20)]
    # 640 batches: the relative error of a variance is about sqrt(2 / 640) = 6 %
    assert np.mean([one.places for one in full]) == pytest.approx(1, abs=0.2)
    whole = data.shuffle_of(np.arange(1024).reshape(-1, 32), shard_rows, tokens)
    assert whole.shards == 1
    assert whole.tokens > 10 * np.mean([one.tokens for one in full])


def test_a_peer_that_cannot_be_installed_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "PEERS", {"none": "/no/such/package.whl"})
    assert list(data.environments(tmp_path, ["none"])) == ["ours"]
    assert "/no/such/package.whl cannot be installed" in capsys.readouterr().err
