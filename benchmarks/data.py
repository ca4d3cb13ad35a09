"""The speed of our loader, Hugging Face datasets and numpy on the same sequences.

    python -m benchmarks.data [--rounds 5] [--rows 24576]

The loaders read shuffled batches [32, 512] of int64 torch tensors from 8 shards of uint16 ids, which follow Zipf's law.
Each loader has the data in its own format, in the page cache. The limit is numpy, which gathers whole batches from one
memory-mapped file in a full permutation, without a DataLoader. Each measurement is a process, with torch on one thread,
in which the loader and the limit read alternately; the loader's speed is the median ratio of neighbouring readings.
Each round measures all loaders. The table shows minimum / **median** / maximum over the rounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Result, machine, spread, table, turns
from benchmarks.peers.readers import READERS, WRITERS, Corpus, write_corpus


def measure(kind: str, name: str, corpus: Corpus, seconds: float = 0) -> Result:
    """Return the measurement of one process."""
    words = (kind, name, str(corpus.folder), str(corpus.shard_rows), str(seconds))
    result = harness.answer("benchmarks.peers.readers", *words)
    print(f"{kind} {name}: {result}", file=sys.stderr)
    return result


def speed_table(folder: Path, options: argparse.Namespace) -> str:
    corpus = Corpus(folder / "corpus", options.rows)
    write_corpus(corpus)
    for name in WRITERS:
        measure("write", name, corpus)
    results: dict[str, list[Result]] = defaultdict(list)
    for _, name in turns(options.rounds, list(READERS)):
        results[name].append(measure("speed", name, corpus, options.seconds))
    rows = []
    for name, seen in results.items():
        first_s = spread((one["first_batch_s"] for one in seen), 2)
        rows.append((READERS[name].label, spread(one["of_limit"] for one in seen), first_s))
    return table(("loader", "tokens/s, share of the limit's", "first batch, s"), rows)


def main() -> None:
    parser = harness.parser(__doc__, rounds=5, rows=Corpus.shard_rows)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds of reading per measurement"
    )
    options = parser.parse_args()
    print(f"{machine('torch', 'numpy', 'datasets')}.\n")
    with tempfile.TemporaryDirectory() as name:
        print(speed_table(Path(name), options))


if __name__ == "__main__":
    main()
