"""One measurement of one loader in a process of its own: python -m benchmarks.peers.measure KIND READER FOLDER SECONDS

Prints one line of JSON. torch computes on one thread.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import hide_torch_xla, memory_mib

hide_torch_xla()  # mosaicml-streaming imports transformers

import torch
from torch import Tensor

from benchmarks.peers.corpus import LARGE_ROWS, LARGE_SHARDS, RESUME_AT, Corpus, read_corpus, row_numbers
from benchmarks.peers.readers import READERS, WRITERS, limit, ours

CLOCK_EVERY = 16  # batches
TURNS = 20


def measure_write(name: str, corpus: Corpus, _: float) -> dict[str, Any]:
    """Here the name is of a format."""
    start = time.perf_counter()
    WRITERS[name](corpus)
    return {"write_s": time.perf_counter() - start}


def measure_speed(name: str, corpus: Corpus, seconds: float) -> dict[str, Any]:
    """The loader and the limit in turn, so that a neighbour's load touches both."""
    reader = READERS[name]
    start = time.perf_counter()
    reader.load()
    import_s = time.perf_counter() - start
    start = time.perf_counter()
    batches = itertools.chain.from_iterable(itertools.repeat(reader.build(corpus)))  # epoch after epoch
    check_batch(next(batches), corpus)
    first_batch_s = time.perf_counter() - start
    turns = 1 if reader.has_workers else TURNS  # workers would read on while the limit has its turn
    base = limit(corpus)
    limits, speeds = [speed(base, seconds / turns)], []
    for _ in range(turns):
        speeds.append(speed(batches, seconds / turns))
        limits.append(speed(base, seconds / turns))
    neighbours = [(before + after) / 2 for before, after in itertools.pairwise(limits)]
    return {
        "of_limit": statistics.median(one / other for one, other in zip(speeds, neighbours, strict=True)),
        "tokens_per_s": statistics.median(speeds),
        "limit_tokens_per_s": statistics.median(limits),
        "import_s": import_s,
        "first_batch_s": first_batch_s,
    }


def speed(batches: Iterator[Tensor], seconds: float) -> float:
    """Tokens a second in so many seconds of reading on."""
    next(batches)  # what the other has left in the processor's caches
    tokens, start = 0, time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        tokens += batch.numel()
        if number % CLOCK_EVERY == 0 and time.perf_counter() - start > seconds:
            break
    return tokens / (time.perf_counter() - start)


def check_batch(batch: Tensor, corpus: Corpus) -> None:
    seen, wanted = (batch.dtype, tuple(batch.shape)), (torch.int64, (corpus.batch, corpus.seq_len))
    if seen != wanted:
        raise RuntimeError(f"a batch is {seen} in place of {wanted}")


def measure_memory(name: str, corpus: Corpus, _: float) -> dict[str, Any]:
    """Memory of this process alone after 10 % of an epoch and after all of it; pages of mapped files are not in it."""
    reader = READERS[name]
    reader.load()
    batches = iter(reader.build(corpus))
    sizes = []
    for number in range(1, corpus.batches + 1):
        batch = next(batches, None)
        if batch is None:  # a loader that leaves out more at the end
            break
        if number == max(1, corpus.batches // 10):
            sizes.append(memory_mib("RssAnon"))
    return {"early_mib": sizes[0], "late_mib": memory_mib("RssAnon")}


def measure_resume(name: str, corpus: Corpus, _: float) -> dict[str, Any]:
    """Seconds from nothing to the first batch at 90 % of an epoch and at its start; and if it is the right one."""
    reader = READERS[name]
    reader.load()
    timed_first(lambda: reader.build(corpus))  # libraries import more when they are first used
    fresh_s, _ = timed_first(lambda: reader.build(corpus))
    loader = reader.build(corpus)
    batches = iter(loader)
    read = int(corpus.batches * RESUME_AT)
    for _ in itertools.islice(batches, read):
        pass
    has_state = reader.resume == "state_dict"
    state = loader.state_dict() if has_state else read  # type: ignore[attr-defined]
    wanted = row_numbers(next(batches).numpy())
    del batches, loader

    def resumed() -> Iterable[Tensor]:
        if not has_state:
            return reader.build(corpus, state)
        loader = reader.build(corpus)
        loader.load_state_dict(state)  # type: ignore[attr-defined]
        return loader

    resumed_s, batch = timed_first(resumed)
    got = row_numbers(batch.numpy())
    return {"fresh_s": fresh_s, "resumed_s": resumed_s, "extra_s": resumed_s - fresh_s, "exact": got == wanted}


def timed_first(build: Callable[[], Iterable[Tensor]]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    batch = next(iter(build()))
    return time.perf_counter() - start, batch


def measure_large(name: str, corpus: Corpus, _: float) -> dict[str, Any]:
    """Our start at 90 % of ten million rows against one at 0 %. The rows are those of the corpus again and again: only
    the order is that of a large one. `name` is the number of shards in a window; 0 for all of them.
    """
    from train.data.shards.order import ShuffleBlock

    window = int(name)
    windows = ShuffleBlock(window) if window else ShuffleBlock(LARGE_SHARDS, grow=True)
    shard_rows = [LARGE_ROWS // LARGE_SHARDS] * LARGE_SHARDS
    large = {"shard_rows": shard_rows, "windows": windows}
    first = int(sum(shard_rows) // corpus.batch * RESUME_AT)
    timed: dict[int, list[float]] = {0: [], first: []}
    for _, at in itertools.product(range(3), (0, first)):
        timed[at].append(timed_first(lambda at=at: ours(corpus, at, **large))[0])  # type: ignore[misc]
    fresh_s, resumed_s = (statistics.median(times) for times in timed.values())
    return {"fresh_s": fresh_s, "resumed_s": resumed_s, "extra_s": resumed_s - fresh_s}


MEASURES = {
    "write": measure_write,
    "speed": measure_speed,
    "memory": measure_memory,
    "resume": measure_resume,
    "large": measure_large,
}


def main() -> None:
    kind, name, folder, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    result = MEASURES[kind](name, read_corpus(Path(folder)), float(seconds))
    print(json.dumps({**result, "versions": {"numpy": np.__version__, "torch": torch.__version__}}), flush=True)
    os._exit(0)  # some loaders leave threads behind


if __name__ == "__main__":
    main()
