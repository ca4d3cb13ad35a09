"""One measurement of one loader: `python -m benchmarks.peers.measure KIND READER FOLDER SECONDS`.

Prints one line of JSON. torch computes on one thread.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, hide_torch_xla, ratios

hide_torch_xla()  # mosaicml-streaming imports transformers

import torch
from torch import Tensor

from benchmarks.peers.corpus import LARGE_ROWS, LARGE_SHARDS, RESUME_AT, Corpus, read_corpus, row_numbers
from benchmarks.peers.readers import READERS, WRITERS, limit, ours

CLOCK_EVERY = 16  # batches
TURNS = 20


def measure_write(name: str, corpus: Corpus, _: float) -> Result:
    """Measure a write; here the name is of a format."""
    return {"write_s": timeit.timeit(lambda: WRITERS[name](corpus), number=1)}


def measure_speed(name: str, corpus: Corpus, seconds: float) -> Result:
    """Measure the loader and the limit in turn, so that a neighbour's load affects both."""
    reader = READERS[name]
    import_s = timeit.timeit(reader.load or (lambda: None), number=1)
    start = time.perf_counter()
    batches = itertools.chain.from_iterable(itertools.repeat(reader.build(corpus)))  # epoch after epoch
    check_batch(next(batches), corpus)
    first_batch_s = time.perf_counter() - start
    turns = 1 if reader.num_workers else TURNS  # workers would continue to read during the limit's turn
    base = limit(corpus)
    limits, speeds = [speed(base, seconds / turns)], []
    for _ in range(turns):
        speeds.append(speed(batches, seconds / turns))
        limits.append(speed(base, seconds / turns))
    neighbours = [(before + after) / 2 for before, after in itertools.pairwise(limits)]
    of_limit = statistics.median(ratios(speeds, neighbours))
    return {"of_limit": of_limit, "import_s": import_s, "first_batch_s": first_batch_s}


def speed(batches: Iterator[Tensor], seconds: float) -> float:
    """Return the tokens per second while reading for this number of seconds."""
    next(batches)  # warms the processor's caches up again
    tokens, start = 0, time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        tokens += batch.numel()
        if number % CLOCK_EVERY == 0 and time.perf_counter() - start > seconds:
            break
    return tokens / (time.perf_counter() - start)


def check_batch(batch: Tensor, corpus: Corpus) -> None:
    seen, wanted = (batch.dtype, tuple(batch.shape)), (torch.int64, (corpus.batch, corpus.seq_len))
    if seen != wanted:
        raise RuntimeError(f"a batch is {seen} instead of {wanted}")


def measure_resume(name: str, corpus: Corpus, _: float) -> Result:
    """Measure the seconds from nothing to the first batch at 90 % of an epoch, and check that batch."""
    reader = READERS[name]
    timed_first(lambda: reader.build(corpus))  # libraries import more when they are first used
    loader: Any = reader.build(corpus)
    batches, read = iter(loader), int(corpus.batches * RESUME_AT)
    for _ in itertools.islice(batches, read):
        pass
    has_state = reader.resume == "state_dict"
    state = loader.state_dict() if has_state else read
    wanted = row_numbers(next(batches).numpy())
    del batches, loader

    def resumed() -> Iterable[Tensor]:
        if not has_state:
            return reader.build(corpus, state)
        loader: Any = reader.build(corpus)
        loader.load_state_dict(state)
        return loader  # type: ignore[no-any-return]

    resumed_s, batch = timed_first(resumed)
    return {"resumed_s": resumed_s, "exact": row_numbers(batch.numpy()) == wanted}


def timed_first(build: Callable[[], Iterable[Tensor]]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    batch = next(iter(build()))
    return time.perf_counter() - start, batch


def measure_large(_: str, corpus: Corpus, __: float) -> Result:
    """Measure our start at 90 % and at 0 % of ten million rows: the corpus' rows repeated, in a large one's order."""
    large = {"shard_rows": [LARGE_ROWS // LARGE_SHARDS] * LARGE_SHARDS}
    first = int(LARGE_ROWS // corpus.batch * RESUME_AT)
    timed: dict[int, list[float]] = {0: [], first: []}
    for _, at in itertools.product(range(3), (0, first)):
        timed[at].append(timed_first(lambda at=at: ours(corpus, at, **large))[0])  # type: ignore[misc]
    fresh_s, resumed_s = (statistics.median(times) for times in timed.values())
    return {"fresh_s": fresh_s, "resumed_s": resumed_s, "extra_s": resumed_s - fresh_s}


MEASURES = {
    "write": measure_write,
    "speed": measure_speed,
    "resume": measure_resume,
    "large": measure_large,
}


def main() -> None:
    kind, name, folder, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    result = MEASURES[kind](name, read_corpus(Path(folder)), float(seconds))
    print(json.dumps(result), flush=True)
    os._exit(0)  # some loaders leave threads behind


if __name__ == "__main__":
    main()
