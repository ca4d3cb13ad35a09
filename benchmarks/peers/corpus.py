"""The sequences that every loader reads: Zipf-distributed ids in one flat file, which the limit reads too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

VOCAB_SIZE = 30_000
LARGE_ROWS, LARGE_SHARDS = 10_000_000, 160  # of the order whose resume is timed
RESUME_AT = 0.9  # of an epoch
FIRST_ID = 5  # ids below are special
DIGITS = 20_000  # a row's number in this base is its first two tokens, so that an order can be checked


@dataclass(frozen=True)
class Corpus:
    folder: Path
    shards: int = 8
    shard_rows: int = 24_576
    seq_len: int = 512
    batch: int = 32  # sequences

    @property
    def rows(self) -> int:
        return self.shards * self.shard_rows

    @property
    def batches(self) -> int:
        """Number of batches in an epoch."""
        return self.rows // self.batch

    def path_of(self, name: str) -> Path:
        """Return the path of a format's files."""
        return self.folder / name

    def flat(self) -> np.memmap:
        """Return [rows, seq_len] uint16, in one file."""
        return np.memmap(self.path_of("flat.bin"), np.uint16, "r", shape=(self.rows, self.seq_len))

    def shard(self, number: int) -> np.ndarray:
        """Return [shard_rows, seq_len] uint16."""
        return self.flat()[number * self.shard_rows : (number + 1) * self.shard_rows]


def write_corpus(corpus: Corpus) -> None:
    corpus.folder.mkdir(parents=True, exist_ok=True)
    frequency = 1 / np.arange(1, VOCAB_SIZE - FIRST_ID + 1)
    bounds = np.cumsum(frequency / frequency.sum())
    with corpus.path_of("flat.bin").open("wb") as file:
        for shard in range(corpus.shards):
            drawn = np.random.default_rng(shard).random((corpus.shard_rows, corpus.seq_len), np.float32)
            rows = FIRST_ID + np.searchsorted(bounds, drawn).clip(max=len(bounds) - 1)
            number = np.arange(shard * corpus.shard_rows, (shard + 1) * corpus.shard_rows)
            rows[:, 0], rows[:, 1] = FIRST_ID + number // DIGITS, FIRST_ID + number % DIGITS
            file.write(rows.astype(np.uint16).tobytes())
    fields = {name: value for name, value in asdict(corpus).items() if name != "folder"}
    corpus.path_of("corpus.json").write_text(json.dumps(fields))


def read_corpus(folder: Path) -> Corpus:
    return Corpus(folder, **json.loads((folder / "corpus.json").read_text()))


def row_numbers(batch: np.ndarray) -> list[int]:
    """Return the numbers of the rows in a batch [B, S]."""
    numbers: list[int] = ((batch[:, 0] - FIRST_ID) * DIGITS + batch[:, 1] - FIRST_ID).tolist()
    return numbers
