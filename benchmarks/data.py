"""The speed of our loader, Hugging Face datasets and numpy on the same sequences, and of preparing text.

    python -m benchmarks.data [--rounds 5] [--rows 24576]
    python -m benchmarks.data --texts 10mb.txt 50mb.txt --tokenizer all-MiniLM-L6-v2 [--processes 1]

With --texts, it compares `baretrain prepare` with `map` of datasets, which tokenises the same text, cuts it into rows
of 128 tokens and saves them. Each side is a whole process, in turns, with the same number of processes.

The loaders read shuffled batches [32, 512] of int64 torch tensors from 8 shards of uint16 ids, which follow Zipf's law.
Each loader has the data in its own format, in the page cache. The limit is numpy, which gathers whole batches from one
memory-mapped file in a full permutation, without a DataLoader. Each measurement is a process, with torch on one thread,
in which the loader and the limit read alternately; the loader's speed is the median ratio of neighbouring readings.
Each round measures all loaders. The table shows minimum / **median** / maximum over the rounds.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Result, Usage, machine, ratios, spread, table, turns
from benchmarks.peers.readers import READERS, WRITERS, Corpus, write_corpus

SIDES = ("ours", "datasets")
SEQ_LEN = 128  # tokens


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


def prepared(side: str, text: Path, folder: Path, options: argparse.Namespace) -> Usage:
    """Prepare a text by one side in a new process."""
    result = folder / "prepared"
    shutil.rmtree(result, ignore_errors=True)
    words = [str(text), options.tokenizer, str(result), str(SEQ_LEN), str(options.processes)]
    module = "benchmarks.peers.mapped"
    if side == "ours":
        settings = {
            "corpus": "text",
            "corpus.path": text,
            "tokenizer.pretrained": options.tokenizer,
            "output": result,
            "seq_len": SEQ_LEN,
            "processes": options.processes,
        }
        words = ["prepare", *(f"{key}={value}" for key, value in settings.items())]
        module = "train"
    return harness.run_timed(module, *words, log=folder / f"{side}.log")


def preparation_table(folder: Path, options: argparse.Namespace) -> str:
    rows = []
    for text in options.texts:
        used: dict[str, list[Usage]] = defaultdict(list)
        for _, side in turns(options.rounds, SIDES):
            used[side].append(prepared(side, text, folder, options))
            print(f"{text} {side}: {used[side][-1]}", file=sys.stderr)
        cells = [f"{text.name}, {text.stat().st_size / 1e6:.0f} MB"]
        for kind in ("wall_s", "cpu_s"):
            ours, theirs = ([getattr(one, kind) for one in used[side]] for side in SIDES)
            cells += [spread(ours), spread(theirs), spread(ratios(theirs, ours))]
        rows.append(cells)
    head = ["text"]
    for kind in ("s", "CPU s"):
        head += [f"ours, {kind}", f"datasets, {kind}", "datasets / ours"]
    return table(head, rows)


def main() -> None:
    parser = harness.parser(__doc__, rounds=5, rows=Corpus.shard_rows, processes=1)
    parser.add_argument("--texts", type=Path, nargs="+", help="files of text to prepare")
    parser.add_argument("--tokenizer", help="the tokenizer's folder, or its name on the Hub")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="seconds of reading per measurement"
    )
    options = parser.parse_args()
    print(f"{machine('torch', 'numpy', 'datasets', 'transformers', 'tokenizers')}.\n")
    with tempfile.TemporaryDirectory() as name:
        if options.texts is None:
            print(speed_table(Path(name), options))
        else:
            print(preparation_table(Path(name), options))


if __name__ == "__main__":
    main()
