"""The speed of our loader, LitData, mosaicml-streaming, Hugging Face datasets and numpy on the same sequences.

    python -m benchmarks.data [--rounds 5] [--rows 24576] [--peers-dir DIR]

The loaders read shuffled batches [32, 512] of int64 torch tensors from 8 shards of uint16 ids, which follow Zipf's law.
Each loader has the data in its own format, in the page cache. The limit is numpy, which gathers whole batches from one
memory-mapped file in a full permutation, without a DataLoader. Each measurement is a process, with torch on one thread,
in which the loader and the limit read alternately; the loader's speed is the median ratio of neighbouring readings.
Each round measures all loaders. The table shows minimum / **median** / maximum over the rounds.

Each peer is installed from the package index into a separate environment under --peers-dir, which uses our torch. A
peer that cannot be installed is named and left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import tempfile
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Result, machine, run, spread, table, turns
from benchmarks.peers.readers import READERS, WRITERS, Corpus, write_corpus

PEERS = {"litdata": "litdata==0.2.76", "mds": "mosaicml-streaming==0.13.0"}  # each in a separate environment


# ---- environments --------------------------------------------------------------------------------------------------


def environments(folder: Path, wanted: list[str]) -> dict[str, str]:
    """Return the interpreters of the environments that could be created."""
    made = {"ours": sys.executable}
    for name in wanted:
        try:
            made[name] = environment(folder / name, PEERS[name])
        except RuntimeError as error:
            print(f"{PEERS[name]} cannot be installed, so it is left out:\n{error}", file=sys.stderr)
    return made


def environment(folder: Path, requirement: str) -> str:
    """Return an interpreter that finds this package before the packages of our environment."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists() or done.read_text() != requirement:
        run(sys.executable, "-m", "venv", "--without-pip", "--clear", str(folder))
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "zz_ours.pth").write_text(sysconfig.get_paths()["purelib"])
        pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
        run(*pip, "install", "--quiet", requirement, f"torch=={metadata.version('torch')}")
        done.write_text(requirement)
    return str(python)


def measure(python: str, kind: str, name: str, corpus: Corpus, seconds: float = 0) -> Result | None:
    """Return the measurement of one process; if it fails, print the reason to stderr and return None."""
    words = (kind, name, str(corpus.folder), str(corpus.shard_rows), str(seconds))
    try:
        result: Result = json.loads(run(python, "-m", "benchmarks.peers.readers", *words).splitlines()[-1])
    except RuntimeError as error:
        print(f"{kind} of {name} failed: {error}", file=sys.stderr)
        return None
    print(f"{kind} {name}: {result}", file=sys.stderr)
    return result


# ---- loaders -------------------------------------------------------------------------------------------------------


def speed_table(folder: Path, options: argparse.Namespace) -> str:
    home = options.peers_dir or folder / "peers"
    print(f"peers are installed under {home}", file=sys.stderr)
    pythons, corpus = environments(home, options.peers), Corpus(folder / "corpus", options.rows)
    readers = {name: reader for name, reader in READERS.items() if reader.environment in pythons}
    write_corpus(corpus)
    for name, where in {reader.format: reader.environment for reader in readers.values()}.items():
        if name in WRITERS:
            measure(pythons[where], "write", name, corpus)
    results: dict[str, list[Result]] = defaultdict(list)
    for _, name in turns(options.rounds, list(readers)):
        result = measure(pythons[readers[name].environment], "speed", name, corpus, options.seconds)
        results[name] += [result] if result else []
    rows = []
    for name, seen in results.items():
        first_s = spread((one["first_batch_s"] for one in seen), 2)
        rows.append((readers[name].label, spread(one["of_limit"] for one in seen), first_s))
    return table(("loader", "tokens/s, share of the limit's", "first batch, s"), rows)


def main() -> None:
    parser = harness.parser(__doc__, rounds=5, rows=Corpus.shard_rows)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of reading per measurement")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peers-dir", type=Path, help="folder for the peers' environments; default: a temporary one")
    options = parser.parse_args()
    print(f"{machine('torch', 'numpy', 'datasets')}, {', '.join(PEERS.values())}.\n")
    with tempfile.TemporaryDirectory() as name:
        print(speed_table(Path(name), options))


if __name__ == "__main__":
    main()
