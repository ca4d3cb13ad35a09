"""The command `python -m train.convert from-arrow FOLDER OUTPUT`, which makes shards from packed sequences.

FOLDER must have been written by `datasets.DatasetDict.save_to_disk`. One column must contain lists of token ids, all
of the same length. Without the columns `pivot` and `same_document` (see packing.py), each sequence has one segment.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from train.config import S3Config, check, shortlist
from train.data.records.formats import load_saved
from train.data.shards.format import MAX_SEQ_LEN, SPLITS, DataManifest, Rows, Shard, write_manifest, write_shard
from train.data.text.coverage import unknown_share
from train.data.text.encoding import id_dtype
from train.data.text.guessing import neighbour_accuracy, unigram_entropy
from train.data.text.preparation import rows_of_shard
from train.data.text.tokenizer import load_tokenizer, publish_tokenizer, published_vocabulary
from train.run.command import DONE, add_s3_flags, command_parser, run_flags
from train.system.folders import local_path, open_folder


def from_arrow(source: Path, output: str, s3: S3Config, *, tokenizer: str, column: str = "tokens") -> DataManifest:
    """Make shards from a data set of sequences. Raises InputError before writing if a column has an unusable value."""
    import datasets  # takes a second or more to import

    saved = load_saved(source)
    check(
        isinstance(saved, datasets.DatasetDict) and all(saved.get(split) is not None for split in SPLITS),
        f"{source} must hold the splits {' and '.join(SPLITS)}: datasets.DatasetDict(train=..., validation=...)",
    )
    folder = open_folder(output, s3)
    check(not folder.names(), f"{output} is not empty; choose another folder")
    for split in SPLITS:
        names = saved[split].column_names
        check(column in names, f"{source} has no column {column}; name one of {shortlist(names)} with --column")
        check(len(saved[split]) > 0, f"{source}: the split {split} has no sequences")
    seq_len = len_of(saved[SPLITS[0]][0][column], column)
    theirs = load_tokenizer(tokenizer)
    vocab_size, dtype = len(theirs), id_dtype(len(theirs))
    counts = {split: np.zeros(vocab_size, np.int64) for split in SPLITS}
    for split in SPLITS:
        for rows in pieces(saved[split], column, seq_len, vocab_size):
            counts[split] += np.bincount(rows.tokens.ravel(), minlength=vocab_size)
    every = sum(counts.values(), np.zeros(vocab_size, np.int64))
    unknown = 0 if theirs.unk_token_id is None else int(every[theirs.unk_token_id])
    tokens = int(np.delete(every, theirs.all_special_ids).sum()) + unknown
    print(unknown_share(unknown, tokens, f"{source}: the tokenizer read the text"))
    publish_tokenizer(theirs, folder)
    info = published_vocabulary(folder).info
    splits: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    for split, shards in splits.items():
        for rows in pieces(saved[split], column, seq_len, vocab_size):
            shards.append(write_shard(folder, f"{split}-{len(shards):05d}.safetensors", rows))
    return write_manifest(
        folder,
        seq_len=seq_len,
        dtype=dtype.name,
        splits=splits,
        tokenizer=info,
        counts={
            "tokens": tokens,
            "unknown_tokens": unknown,
            "unigram_entropy": unigram_entropy(counts["train"], info),
            "neighbour_accuracy": neighbour_accuracy(folder, splits, info),
        },
        config={"from_arrow": {split: len(saved[split]) for split in SPLITS}},
    )


def len_of(sequence: Any, column: str) -> int:
    """Return the length of a sequence. Raises InputError if shards do not support that length."""
    check(isinstance(sequence, list), f"column {column} holds single values; it must hold lists of ids")
    longest = f"it must have 1 to {MAX_SEQ_LEN:,}"
    check(1 <= len(sequence) <= MAX_SEQ_LEN, f"column {column}: sequence 0 has {len(sequence):,} ids; {longest}")
    return len(sequence)


def pieces(table: Any, column: str, seq_len: int, vocab_size: int) -> Iterator[Rows]:
    """Yield the sequences, one shard's rows at a time. Raises InputError if a column has an unusable value."""
    size, table = rows_of_shard(seq_len, id_dtype(vocab_size)), table.with_format("arrow")
    for start in range(0, len(table), size):
        part = table[start : start + size]
        yield Rows(
            values_of(part, column, vocab_size - 1, start, seq_len).astype(id_dtype(vocab_size)),
            values_of(part, "pivot", seq_len, start, default=seq_len).astype(np.uint16),
            values_of(part, "same_document", 1, start, default=0).astype(np.uint8),
        )


def values_of(
    part: pa.Table, name: str, most: int, start: int, seq_len: int | None = None, *, default: int = 0
) -> np.ndarray:
    """Return a column of whole numbers from 0 to `most`: [rows] or, for lists of `seq_len` numbers, [rows, seq_len].

    If `part` lacks the column, each row gets `default`. Raises InputError if the column holds anything else. `start` is
    the index of the first row in the whole table, for error messages.
    """
    if name not in part.column_names:
        return np.full(len(part), default)
    column = part.column(name).combine_chunks()
    if seq_len is not None:
        is_lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        check(is_lists or pa.types.is_fixed_size_list(column.type), f"column {name} holds {column.type}, not lists")
        lengths = pc.list_value_length(column).to_pylist()
        bad = next((number for number, length in enumerate(lengths, start) if length != seq_len), None)
        check(bad is None, f"column {name}: sequence {bad} must have {seq_len} ids, like sequence 0")
        column = column.flatten()
    is_whole = (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)) and not column.null_count
    nulls = f" with {column.null_count:,} nulls" if column.null_count else ""
    check(is_whole, f"column {name} holds {column.type}{nulls} in the rows from {start:,}; it must hold whole numbers")
    low, top = (int(pc.min_max(column)[side].as_py()) for side in ("min", "max"))
    check(low >= 0 and top <= most, f"column {name} holds values from {low} to {top}; they must be from 0 to {most}")
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    return values.reshape(-1, seq_len or 1) if seq_len else values


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "train.convert",
        "Turn packed sequences, in a folder written by datasets.DatasetDict.save_to_disk, into shards.",
        examples=(
            "from-arrow arrow data/mine --tokenizer bert-base-cased --column input_ids",
            "from-arrow arrow s3://bucket/mine --tokenizer runs/tokenizer",
        ),
    )
    parser.add_argument("direction", choices=("from-arrow",))
    parser.add_argument("source", help="folder of the data set")
    parser.add_argument("output", help="folder to write, new or empty, or s3://bucket/prefix")
    parser.add_argument("--tokenizer", required=True, help="Hub id or folder of the tokenizer that made the ids")
    parser.add_argument("--column", default="tokens", help="column of the token ids (default: tokens)")
    add_s3_flags(parser, caches=False)
    return run_flags(parser, arguments, convert)


def convert(options: argparse.Namespace, s3: S3Config) -> int:
    source = local_path(options.source)
    manifest = from_arrow(source, options.output, s3, tokenizer=options.tokenizer, column=options.column)
    print(f"{options.output}: {manifest.rows('train'):,} training sequences, id {manifest.id[:12]}")
    return DONE
