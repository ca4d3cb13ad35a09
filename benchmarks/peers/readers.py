"""The speed at which one loader reads shuffled batches: int64 torch tensors [batch, seq_len].

    python -m benchmarks.peers.readers write|speed NAME FOLDER SHARD_ROWS SECONDS

It prints one line of JSON. torch uses one thread.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Result, hide_torch_xla, ratios

hide_torch_xla()

import torch
from torch import Tensor
from torch.utils.data import DataLoader

VOCAB_SIZE = 30_000
FIRST_ID = 5  # lower ids are special
CLOCK_EVERY = 16  # batches
TURNS = 20

# ---- the sequences ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """The sequences that every loader reads, with ids that follow Zipf's law. The limit reads them from a flat file."""

    folder: Path
    shard_rows: int = 24_576
    shards: int = 8
    seq_len: int = 512
    batch: int = 32  # sequences

    @property
    def rows(self) -> int:
        return self.shards * self.shard_rows

    def path_of(self, name: str) -> Path:
        return self.folder / name

    def flat(self) -> np.memmap:
        """Return all sequences [rows, seq_len] uint16, memory-mapped from one file."""
        return np.memmap(self.path_of("flat.bin"), np.uint16, "r", shape=(self.rows, self.seq_len))

    def shard(self, number: int) -> np.ndarray:
        """Return the sequences of a shard, [shard_rows, seq_len] uint16."""
        return self.flat()[number * self.shard_rows : (number + 1) * self.shard_rows]


def write_corpus(corpus: Corpus) -> None:
    corpus.folder.mkdir(parents=True, exist_ok=True)
    frequency = 1 / np.arange(1, VOCAB_SIZE - FIRST_ID + 1)
    bounds = np.cumsum(frequency / frequency.sum())
    with corpus.path_of("flat.bin").open("wb") as file:
        for shard in range(corpus.shards):
            drawn = np.random.default_rng(shard).random(
                (corpus.shard_rows, corpus.seq_len), np.float32
            )
            rows = FIRST_ID + np.searchsorted(bounds, drawn).clip(max=len(bounds) - 1)
            file.write(rows.astype(np.uint16).tobytes())


# ---- plain numpy ---------------------------------------------------------------------------------------------------


def limit(corpus: Corpus) -> Iterator[Tensor]:
    """Yield batches from one flat file in a full permutation, epoch after epoch, without a DataLoader."""
    flat = corpus.flat()
    for epoch in itertools.count():
        order = np.random.default_rng([0, epoch]).permutation(corpus.rows)
        for start in range(0, corpus.rows - corpus.batch + 1, corpus.batch):
            rows = flat[order[start : start + corpus.batch]]
            yield torch.from_numpy(rows.astype(np.int64))


# ---- ours ----------------------------------------------------------------------------------------------------------


class Gathered:
    """A reader of sequences without masks, to leave out the cost of masking."""

    def __init__(self, shards: Any) -> None:
        self.shards = shards

    def draw(self, items: np.ndarray) -> dict[str, Any]:
        (tokens,) = self.shards.gather(items.ravel() % len(self.shards), ("tokens",))
        ids = torch.from_numpy(tokens.reshape(*items.shape, -1))
        none = [0] * len(items)
        return {"inputs": {"input_ids": ids}, "count": none, "tokens": none}


def ours(corpus: Corpus, *, masked: bool = False) -> Iterator[Tensor]:
    from train.data.batches.loader import Batches, MaskedRows
    from train.data.batches.masking import Masker
    from train.data.shards.format import ShardSet
    from train.data.shards.manifest import read_manifest
    from train.data.shards.order import ShardSampler

    manifest = read_manifest(corpus.path_of("ours"))
    shards = ShardSet(corpus.path_of("ours"), manifest, "train")
    rows: Any = Gathered(shards)
    if masked:
        masker = Masker(
            seed=0,
            mask_rate=0.15,
            max_predictions=max(1, round(corpus.seq_len * 0.15)),
            max_ngram=3,
            mask_id=manifest.tokenizer.mask_id,
            special_ids=tuple(manifest.tokenizer.special_ids),
            vocab_size=VOCAB_SIZE,
        )
        rows = MaskedRows(shards, masker, is_training=True)
    shard_rows = [shard.rows for shard in manifest.splits["train"]]
    sampler = ShardSampler(
        shard_rows, seed=0, global_batch_size=corpus.batch, rank=0, world_size=1
    )
    order = sampler.micro_batches(corpus.batch)
    size = corpus.batch
    batches = Batches(rows, order, batch_size=size, num_workers=0, prefetch=4, pin_memory=False)
    return (batch["inputs"]["input_ids"].long() for batch in batches)


def write_ours(corpus: Corpus) -> None:
    from benchmarks.pretraining import write_data

    shards = [corpus.shard(number) for number in range(corpus.shards)]
    write_data(
        corpus.path_of("ours"), {"train": shards, "validation": []}, VOCAB_SIZE, corpus.seq_len
    )


# ---- Hugging Face datasets -----------------------------------------------------------------------------------------


def write_hf(corpus: Corpus) -> None:
    import datasets
    import pyarrow as pa

    flat = pa.array(np.asarray(corpus.flat()).ravel())
    table = pa.table({"tokens": pa.FixedSizeListArray.from_arrays(flat, corpus.seq_len)})
    datasets.Dataset(table).save_to_disk(corpus.path_of("hf"), num_shards=corpus.shards)


def hf_torch(corpus: Corpus) -> DataLoader[Any]:
    import datasets

    def stack(rows: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack([row["tokens"] for row in rows]).long()

    rows: Any = datasets.load_from_disk(corpus.path_of("hf")).with_format("torch")
    return DataLoader(rows, corpus.batch, shuffle=True, drop_last=True, collate_fn=stack)


# ---- the table of readers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    label: str
    build: Callable[[Corpus], Iterable[Tensor]]
    format: str = "flat.bin"  # a file or folder of the corpus, which WRITERS writes


READERS = {
    "limit": Reader("numpy: one memmap, whole batches, no DataLoader (the limit)", limit),
    "ours": Reader("**ours**", ours, "ours"),
    "masked": Reader("ours with masks", partial(ours, masked=True), "ours"),
    "hf_torch": Reader("datasets, torch format, DataLoader", hf_torch, "hf"),
}
WRITERS = {"ours": write_ours, "hf": write_hf}


# ---- one measurement -------------------------------------------------------------------------------------------------


def measure(name: str, corpus: Corpus, seconds: float) -> Result:
    """Measure the loader and the limit alternately, so that other load on the machine affects both."""
    build = READERS[name].build
    batch = next(iter(build(corpus)))  # libraries import more at their first use
    seen = (batch.dtype, tuple(batch.shape))
    wanted = (torch.int64, (corpus.batch, corpus.seq_len))
    if seen != wanted:
        raise RuntimeError(f"a batch is {seen} instead of {wanted}")
    start = time.perf_counter()
    batches = itertools.chain.from_iterable(itertools.repeat(build(corpus)))  # epoch after epoch
    next(batches)
    first_batch_s = time.perf_counter() - start
    base = limit(corpus)
    limits = [speed(base, seconds / TURNS)]
    speeds = []
    for _ in range(TURNS):
        speeds.append(speed(batches, seconds / TURNS))
        limits.append(speed(base, seconds / TURNS))
    neighbours = [(before + after) / 2 for before, after in itertools.pairwise(limits)]
    return {
        "of_limit": statistics.median(ratios(speeds, neighbours)),
        "first_batch_s": first_batch_s,
    }


def speed(batches: Iterator[Tensor], seconds: float) -> float:
    """Read for `seconds`, and return the tokens per second."""
    next(batches)  # warms the processor's caches up again
    tokens = 0
    start = time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        tokens += batch.numel()
        if number % CLOCK_EVERY == 0 and time.perf_counter() - start > seconds:
            break
    return tokens / (time.perf_counter() - start)


def main() -> None:
    kind, name, folder, shard_rows, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    corpus = Corpus(Path(folder), int(shard_rows))
    result = {}
    if kind == "write":
        WRITERS[name](corpus)
    else:
        result = measure(name, corpus, float(seconds))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
