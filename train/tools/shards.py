"""The command `baretrain shards ls | verify | head LOCATION`, which shows prepared data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from train.config import S3Config, ShardsConfig, check
from train.data.shards.manifest import SPLITS, DataManifest, fault_of_tokenizer, read_manifest
from train.data.shards.prepared import PreparedData
from train.data.text.tokenizer import load_tokenizer
from train.machine.console import say
from train.machine.memory import usable_cpus
from train.run.command import DONE, EXITS, FAILED, add_s3_flags, command_parser, run_flags
from train.storage.folders import open_folder

MOST_AT_ONCE = 8  # maximum number of shards that `verify` reads at the same time


def list_shards(location: str, manifest: DataManifest) -> Iterator[str]:
    """Yield lines with the content of the manifest: the data set, the tokenizer, and each shard."""
    tokens = manifest.seq_len * sum(manifest.rows(split) for split in SPLITS)
    yield f"{location}: id {manifest.id[:12]}, {tokens:,} tokens in sequences of {manifest.seq_len} ({manifest.dtype})"
    yield f"tokenizer {manifest.tokenizer.sha256[:12]}, vocabulary {manifest.tokenizer.vocab_size:,}"
    for split in SPLITS:
        for shard in manifest.splits[split]:
            yield f"{shard.file:28} {shard.rows:10,} rows  {shard.bytes / 2**20:9.1f} MiB  sha256 {shard.sha256[:12]}"


def find_damage(data: PreparedData) -> list[str]:
    """Read the files that the manifest names, in parallel, and return their faults."""
    with ThreadPoolExecutor(min(MOST_AT_ONCE, usable_cpus())) as pool:  # Hashing releases the GIL.
        faults = list(pool.map(data.fault, data.manifest.shards))
    faults.append(fault_of_tokenizer(data.folder, data.manifest))
    return [fault for fault in faults if fault is not None]


def show_rows(data: PreparedData, split: str, number: int) -> Iterator[str]:
    """Yield the first sequences of a split as text and as tokens."""
    tokenizer = load_tokenizer(str(data.folder / "tokenizer"))
    shards = data.split(split)
    rows = np.arange(min(number, len(shards)))
    last = np.searchsorted(shards.first_rows, len(rows))
    data.bring(shards.shards[:last])
    for row, ids in zip(rows, shards.rows(rows).tokens.tolist(), strict=True):
        yield f"--- {split} {row}"
        yield tokenizer.decode(ids)
        yield " ".join(tokenizer.convert_ids_to_tokens(ids))


def main(arguments: Sequence[str]) -> int:
    parser = command_parser(
        "shards",
        "Show prepared data, on disk or in S3: its files, checksums or sequences.",
        examples=(
            "ls data/mine",
            "verify s3://bucket/mine",
            "head data/mine -n 5 --split validation",
        ),
        exits={**EXITS, FAILED: "verify found damage, or S3 did not answer"},
    )
    what = "list files; compare checksums; show sequences as text and as tokens"
    parser.add_argument("command", choices=("ls", "verify", "head"), help=what)
    parser.add_argument(
        "location",
        metavar="LOCATION",
        help="the output of baretrain prepare: a folder or s3://bucket/prefix",
    )
    parser.add_argument(
        "--split", choices=SPLITS, default="train", help="for head (default: train)"
    )
    parser.add_argument("-n", type=int, default=3, help="sequences for head (default: 3)")
    add_s3_flags(parser)
    return run_flags(parser, arguments, look)


def look(options: argparse.Namespace, s3: S3Config) -> int:
    check(options.n > 0, f"-n {options.n} must be above 0")
    if options.command == "ls":
        say(*list_shards(options.location, read_manifest(open_folder(options.location, s3))))
        return DONE
    cfg = ShardsConfig(path=options.location, cache_dir=options.cache_dir)
    data = PreparedData(cfg, s3, looks=False)
    if options.command == "verify":
        faults = find_damage(data)
        say(*faults or [f"{options.location}: all {len(data.manifest.shards)} shards are valid"])
        return FAILED if faults else DONE
    for line in show_rows(data, options.split, options.n):
        say(line)
    return DONE
