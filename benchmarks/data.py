"""Our loader, LitData, mosaicml-streaming, Hugging Face datasets and numpy; and the effect of windows on a shuffle.

    python -m benchmarks.data [--parts speed resume shuffle] [--rounds 5] [--rows 24576] [--peers-dir DIR]

Shuffled batches [32, 512] of int64 torch tensors, out of 8 shards of uint16 ids that follow Zipf's law, in the page
cache, each loader's data in its format. The limit is numpy's: whole batches gathered out of one memory-mapped file
in a full permutation, no DataLoader. Every measurement has a process, torch on one thread, where loader and limit
read in turn: a speed is the median of the ratios of neighbours. Rounds go through all loaders; tables hold least /
**median** / greatest of the rounds.

Peers are installed from the package index into an environment each, under --peers-dir; torch is ours in all of them.
One that cannot be installed is named and left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import sysconfig
import tempfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result, machine, run, shown, spread, table
from benchmarks.peers.corpus import LARGE_ROWS, LARGE_SHARDS, RESUME_AT, Corpus, write_corpus
from benchmarks.peers.readers import READERS, WRITERS, Reader

PARTS = ("speed", "resume", "shuffle")
PEERS = {"litdata": "litdata==0.2.76", "mds": "mosaicml-streaming==0.13.0"}  # an environment each
SHUFFLE_SHARDS, SHUFFLE_SHARD_ROWS, SHUFFLE_BATCH = 64, 1024, 256
SHUFFLE_WAYS = (
    (1, SHUFFLE_SHARDS),
    (1, 1),
    (1, 16),
    (4, 1),
    (16, 1),
    (16, 4),
    (SHUFFLE_SHARDS, 1),
)  # lanes, window of one
TEXT_BATCH = 64  # a text of some thousand sequences has to give many batches
RARE = 5  # expected number in a batch below which tokens are counted as one, as usual for chi-square


# ---- environments --------------------------------------------------------------------------------------------------


def environments(folder: Path, wanted: list[str]) -> dict[str, str]:
    """Return the interpreter of every environment that could be made."""
    made = {"ours": sys.executable}
    for name in wanted:
        try:
            made[name] = environment(folder / name, PEERS[name])
        except RuntimeError as error:
            print(f"{PEERS[name]} cannot be installed, so it is left out:\n{error}", file=sys.stderr)
    return made


def environment(folder: Path, requirement: str) -> str:
    """Return an interpreter with this package in front of those of our environment."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists() or done.read_text() != requirement:
        run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder))
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "zz_ours.pth").write_text(sysconfig.get_paths()["purelib"])
        pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
        run(*pip, "install", "--quiet", requirement, f"torch=={metadata.version('torch')}")
        done.write_text(requirement)
    return str(python)


def measure(python: str, kind: str, name: str, corpus: Corpus, seconds: float) -> Result | None:
    """Return the measurement of one process; None, and the reason on stderr, if it failed."""
    command = (python, "-m", "benchmarks.peers.measure", kind, name, str(corpus.folder), str(seconds))
    try:
        result: Result = json.loads(run(*command).splitlines()[-1])
    except RuntimeError as error:
        print(f"{kind} of {name} failed: {error}", file=sys.stderr)
        return None
    print(f"{kind} {name}: {result}", file=sys.stderr)
    return result


# ---- loaders -------------------------------------------------------------------------------------------------------


def write_formats(corpus: Corpus, pythons: dict[str, str]) -> dict[str, Reader]:
    """Write the corpus in every loader's format; return the loaders with data."""
    write_corpus(corpus)
    readers = {name: reader for name, reader in READERS.items() if reader.environment in pythons}
    homes = {reader.format: reader.environment for reader in readers.values() if reader.format in WRITERS}
    lost = {name for name, home in homes.items() if measure(pythons[home], "write", name, corpus, 0) is None}
    return {name: reader for name, reader in readers.items() if reader.format not in lost}


def measure_loaders(
    corpus: Corpus, pythons: dict[str, str], readers: dict[str, Reader], options: argparse.Namespace
) -> dict[str, list[Result]]:
    """Return the measurements of all kinds for each loader, rounds interleaved."""
    results: dict[str, list[Result]] = defaultdict(list)
    for _ in range(options.rounds):
        for kind, (name, reader) in itertools.product(("speed", "resume"), readers.items()):
            if kind in options.parts and kind in reader.measures:
                result = measure(pythons[reader.environment], kind, name, corpus, options.seconds)
                results[name] += [result] if result else []
        if "resume" in options.parts:
            result = measure(sys.executable, "large", "ours", corpus, 0)
            results["large"] += [result] if result else []
    return results


def bytes_on_disk(folder: Path) -> int:
    files = [folder] if folder.is_file() else [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def values(result: list[Result], key: str) -> list[Any]:
    return [one[key] for one in result if one.get(key) is not None]


def loader_table(results: dict[str, list[Result]], corpus: Corpus) -> str:
    head = ("loader", "tokens/s of the limit's", "import, s", "first batch, s")
    head += (f"resume at {RESUME_AT:.0%}, s", "right batch", "on disk, of the tokens")
    rows = []
    for name, reader in READERS.items():
        result = results.get(name)
        if result:
            size = bytes_on_disk(corpus.path_of(reader.format)) / bytes_on_disk(corpus.path_of("flat.bin"))
            cells = (
                spread(values(result, "of_limit")),
                spread(values(result, "import_s"), 2) if reader.load else "",
                spread(values(result, "first_batch_s"), 2),
                spread(values(result, "resumed_s"), 2),
                " / ".join(sorted({"yes" if exact else "no" for exact in values(result, "exact")})),
                f"{size:.2f}",
            )
            rows.append((reader.label, *cells))
    return table(head, rows)


def large_table(results: dict[str, list[Result]]) -> str:
    result = results.get("large", [])
    cells = (spread(values(result, key), 2) for key in ("fresh_s", "resumed_s", "extra_s"))
    of = f"ours, {LARGE_ROWS:,} rows in {LARGE_SHARDS} shards: fresh start, s"
    return table((of, "at 90 %, s", "more, s"), [tuple(cells)] if result else [])


# ---- what windows do to a shuffle ----------------------------------------------------------------------------------


def epoch_batches(shard_rows: list[int], batch: int, lanes: int, window: int, epoch: int) -> np.ndarray:
    """Return [batches, batch] row numbers in our order."""
    from train.data.shards.order import ShardSampler

    how = {"seed": 0, "global_batch_size": batch, "lanes": lanes, "window_shards": window}
    order = ShardSampler(shard_rows, rank=0, world_size=1, **how)
    return order.epoch_order(epoch).rows(0, order.steps, order.slots)


def distinct_shards(batches: np.ndarray, shard_rows: list[int]) -> float:
    """Return the mean number of distinct shards in a batch."""
    bounds = np.cumsum(shard_rows)
    return statistics.mean(len(np.unique(np.searchsorted(bounds, rows, side="right"))) for rows in batches)


def variance_of_places(batches: np.ndarray, num_rows: int) -> float:
    """Return the variance of a batch's mean place in the corpus, over that of independent draws."""
    means = ((batches + 0.5) / num_rows).mean(1)
    return float(np.mean((means - 0.5) ** 2)) * 12 * batches.shape[1]


def chi_square(batches: np.ndarray, tokens: np.ndarray) -> float:
    """Return the mean chi-square, per degree of freedom, of a batch's tokens against those of the whole corpus."""
    counts = np.bincount(tokens.ravel())
    share = counts / counts.sum()
    size = batches.shape[1] * tokens.shape[1]
    common = np.flatnonzero(share * size >= RARE)
    bins = np.full(len(counts), len(common))
    bins[common] = np.arange(len(common))
    expected = np.bincount(bins, share * size, len(common) + 1)
    seen = np.stack([np.bincount(bins[tokens[rows].ravel()], minlength=len(expected)) for rows in batches])
    used = expected > 0
    return float(np.mean(((seen - expected) ** 2)[:, used] / expected[used]) * used.sum() / (used.sum() - 1))


def prepare_text(folder: Path) -> Path:
    """Prepare the demo's corpus: text that comes with Python."""
    settings = ("seq_len=64", "tokenizer.vocab_size=2000", "validation_fraction=0.01")
    run(sys.executable, "-m", "train.prepare", "corpus=pydocs", f"output={folder}", *settings)
    return folder


def shuffle_table(text: Path, epochs: int) -> str:
    """Compare lanes, and windows of K shards of each, with a full permutation; figures are means over these epochs."""
    from train.data.shards.format import ShardSet, read_manifest

    shards = ShardSet(text, read_manifest(text), "train")
    tokens = shards.rows(np.arange(len(shards))).tokens  # in the corpus' order
    even = [SHUFFLE_SHARD_ROWS] * SHUFFLE_SHARDS
    parts = [len(part) for part in np.array_split(np.arange(len(tokens)), SHUFFLE_SHARDS)]
    rows, chi_squares = [], {}
    for lanes, window in SHUFFLE_WAYS:
        made = [epoch_batches(even, SHUFFLE_BATCH, lanes, window, epoch) for epoch in range(1, epochs + 1)]
        real = [epoch_batches(parts, TEXT_BATCH, lanes, window, epoch) for epoch in range(1, epochs + 1)]
        distinct = statistics.mean(distinct_shards(batches, even) for batches in made)
        places = statistics.mean(variance_of_places(batches, sum(even)) for batches in made)
        chi_squares[lanes, window] = statistics.mean(chi_square(batches, tokens) for batches in real)
        label = f"{lanes} x {window}" + (" (full permutation)" if window == SHUFFLE_SHARDS else "")
        rows.append((label, f"{distinct:.1f}", shown(places)))
    head = (
        f"lanes x shards of a window, of {SHUFFLE_SHARDS}",
        f"distinct shards in a batch of {SHUFFLE_BATCH}",
        "variance of its mean place, of independent draws'",
        f"tokens of a batch of {TEXT_BATCH} against all: chi-square, of a full permutation's",
    )
    of_full = [f"{value / chi_squares[1, SHUFFLE_SHARDS]:.3f}" for value in chi_squares.values()]
    return table(head, [(*row, of_text) for row, of_text in zip(rows, of_full, strict=True)])


# ---- all of it -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = harness.parser(__doc__, rounds=5, rows=Corpus(Path()).shard_rows, epochs=20)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seconds", type=float, default=2.0, help="of reading, of each run")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peers-dir", type=Path, help="keeps the peers' environments; left out: a temporary folder")
    parser.add_argument("--text", type=Path, help="prepared data to shuffle; left out: the demo's corpus")
    options = parser.parse_args()
    tables = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if set(options.parts) != {"shuffle"}:
            home = options.peers_dir or folder / "peers"
            print(f"peers are installed under {home}", file=sys.stderr)
            pythons = environments(home, options.peers)
            corpus = Corpus(folder / "corpus", shard_rows=options.rows)
            readers = write_formats(corpus, pythons)
            results = measure_loaders(corpus, pythons, readers, options)
            tables.append(loader_table(results, corpus))
            tables += [large_table(results)] if "resume" in options.parts else []
        if "shuffle" in options.parts:
            tables.append(shuffle_table(options.text or prepare_text(folder / "text"), options.epochs))
    print("\n\n".join((f"{machine('torch', 'numpy', 'datasets')}, {', '.join(PEERS.values())}.", *tables)))


if __name__ == "__main__":
    main()
