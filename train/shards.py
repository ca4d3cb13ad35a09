"""`python -m train.shards ls | verify | head | stats FOLDER`: look into prepared data.

Exit code 0: done, 1: `verify` found damage, 2: there is no prepared data to look into.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from train.config import InputError, check
from train.data.masking import IGNORE_INDEX, Masker
from train.data.shards import SPLITS, Manifest, Shard, ShardSet, read_manifest
from train.data.tokenizer import load_tokenizer
from train.storage import local_path, sha256_file

MASK_RATE, MAX_NGRAM = 0.15, 3  # of ALBERT, as conf/task/mlm.yaml
ROWS_AT_ONCE = 65536  # that `stats` holds in memory
RED, BLUE, OFF = "\033[31m", "\033[34m", "\033[0m"


def list_shards(folder: Path, manifest: Manifest) -> Iterator[str]:
    """What the manifest says: a line for the set and one for each shard."""
    tokens = manifest.seq_len * sum(manifest.rows(split) for split in SPLITS)
    yield f"{folder}: id {manifest.id[:12]}, {tokens:,} tokens in sequences of {manifest.seq_len} ({manifest.dtype})"
    yield f"tokenizer {manifest.tokenizer.sha256[:12]}, vocabulary {manifest.tokenizer.vocab_size:,}"
    for split in SPLITS:
        for shard in manifest.splits[split]:
            yield f"{shard.file:28} {shard.rows:10,} rows  {shard.bytes / 2**20:9.1f} MiB  sha256 {shard.sha256[:12]}"


def find_damage(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with each file that the manifest names, read in parallel; empty if all is well."""
    shards = [shard for split in SPLITS for shard in manifest.splits[split]]
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,  # hashing lets other threads run
        tqdm(total=sum(shard.bytes for shard in shards), unit="B", unit_scale=True, disable=None) as bar,
    ):

        def examine(shard: Shard) -> str | None:
            fault = damage(folder / shard.file, shard)
            bar.update(shard.bytes)
            return fault

        faults = list(pool.map(examine, shards))
    if not tokenizer.is_file() or sha256_file(tokenizer) != manifest.tokenizer.sha256:
        faults.append(f"{tokenizer} is not the tokenizer that made the shards")
    return [fault for fault in faults if fault is not None]


def damage(path: Path, shard: Shard) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != shard.bytes:
        return f"{path} has {size} bytes, the manifest says {shard.bytes}"
    seen = sha256_file(path)
    return None if seen == shard.sha256 else f"{path} has sha256 {seen[:12]}, the manifest says {shard.sha256[:12]}"


def show_rows(folder: Path, manifest: Manifest, split: str, number: int, *, colour: bool) -> Iterator[str]:
    """The first sequences of a split, decoded, and as a model sees them, with the places to predict marked."""
    tokenizer, info = load_tokenizer(str(folder / "tokenizer")), manifest.tokenizer
    masker = Masker(
        seed=0,
        mask_rate=MASK_RATE,
        max_predictions=max(1, round(manifest.seq_len * MASK_RATE)),
        max_ngram=MAX_NGRAM,
        mask_id=info.mask_id,
        special_ids=tuple(info.special_ids),
        vocab_size=info.vocab_size,
        word_start=None,
    )
    rows = np.arange(min(number, manifest.rows(split)))
    tokens = ShardSet(folder, manifest, split).rows(rows).tokens
    masked = masker(tokens, np.zeros_like(rows), rows)
    for row in rows:
        predicted = set(masked.positions[row][masked.labels[row] != IGNORE_INDEX].tolist())
        pieces = tokenizer.convert_ids_to_tokens(masked.input_ids[row].tolist())
        marked = [mark(piece, place in predicted, colour=colour) for place, piece in enumerate(pieces)]
        yield f"--- {split} {row}"
        yield tokenizer.decode(tokens[row].tolist())
        yield " ".join(marked)


def mark(piece: str, is_predicted: bool, *, colour: bool) -> str:
    if not is_predicted:
        return piece
    if not colour:
        return f"<{piece}>"
    return f"{RED if piece == '[MASK]' else BLUE}{piece}{OFF}"


def describe(folder: Path, manifest: Manifest, split: str, number: int) -> Iterator[str]:
    """Lengths, the most frequent tokens, and what their frequencies alone would predict."""
    data = ShardSet(folder, manifest, split)
    check(len(data) > 0, f"{folder} has no {split} sequences")
    counts = np.zeros(manifest.tokenizer.vocab_size, np.int64)
    firsts, same = [], 0
    for start in range(0, len(data), ROWS_AT_ONCE):
        rows = data.rows(np.arange(start, min(start + ROWS_AT_ONCE, len(data))))
        counts += np.bincount(rows.tokens.ravel(), minlength=len(counts))
        firsts.append(rows.pivot)
        same += int(rows.same_document.sum())
    special = counts[manifest.tokenizer.special_ids].sum()
    text = counts.copy()
    text[manifest.tokenizer.special_ids] = 0
    share = text[text > 0] / text.sum()
    quantiles = np.quantile(np.concatenate(firsts), [0, 0.25, 0.5, 0.75, 1]).astype(int)
    yield f"{split}: {len(data):,} sequences of {manifest.seq_len} tokens, {special / counts.sum():.1%} special ones"
    yield f"first segment: {' / '.join(map(str, quantiles))} tokens (least, quartiles, most)"
    yield f"both segments of one document: {same / len(data):.1%}"
    entropy = -(share * np.log(share)).sum()
    yield f"{np.count_nonzero(text):,} of {len(counts):,} pieces occur, unigram entropy {entropy:.3f} nats"
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    for token in np.argsort(-text, kind="stable")[:number]:
        yield f"{text[token]:12,}  {text[token] / text.sum():6.2%}  {tokenizer.convert_ids_to_tokens(int(token))}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.shards", description="Look into prepared data.")
    parser.add_argument("command", choices=("ls", "verify", "head", "stats"))
    parser.add_argument("folder", help="what python -m train.prepare output=... wrote")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("-n", type=int, default=None, help="sequences of head (default 3), top tokens of stats (20)")
    options = parser.parse_args(arguments)
    try:
        check(options.n is None or options.n > 0, f"-n {options.n} must be above 0")
        folder = local_path(options.folder)
        manifest = read_manifest(folder)
        if options.command == "verify":
            faults = find_damage(folder, manifest)
            print("\n".join(faults) or f"{folder}: all {sum(map(len, manifest.splits.values()))} shards are whole")
            return 1 if faults else 0
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        lines = {
            "ls": lambda: list_shards(folder, manifest),
            "head": lambda: show_rows(folder, manifest, options.split, options.n or 3, colour=colour),
            "stats": lambda: describe(folder, manifest, options.split, options.n or 20),
        }[options.command]
        for line in lines():
            print(line)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
