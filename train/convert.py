"""`python -m train.convert to-arrow SOURCE FOLDER | from-arrow FOLDER OUTPUT`: shards to Hugging Face sets, and back.

A data set in Arrow has the columns `tokens` (a list of seq_len ids), `pivot` and `same_document` of the shards
(packing.py), and is a folder as `datasets.load_from_disk` reads it. Sequences that others have packed, with
nothing but a column of ids of one length, become shards too: their one segment ends with the sequence.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.cli.command import DONE, add_s3_flags, command_parser, run_flags
from train.config import S3Config, ShardsConfig, check
from train.data.records.formats import load_saved
from train.data.shards.format import SPLITS, DataManifest, Shard, ShardSet, write_manifest, write_shard
from train.data.shards.prepared import PreparedData
from train.data.text.guessing import neighbour_accuracy, unigram_entropy
from train.data.text.packing import Rows
from train.data.text.preparation import rows_of_shard
from train.data.text.tokenizer import load_tokenizer, publish_tokenizer, published_vocabulary
from train.storage.folders import local_path, make_folder, open_folder

ROWS_AT_ONCE = 16384  # held in memory


def to_arrow(data: PreparedData, output: Path) -> None:
    """Write every split of a prepared data set to `output`. Bounded memory."""
    import datasets  # takes a second or more

    is_new = not output.exists() or (output.is_dir() and not any(output.iterdir()))
    check(is_new, f"{output} is {'a file' if output.is_file() else 'not empty'}; choose another folder")
    splits = {}
    with tempfile.TemporaryDirectory(dir=make_folder(output)) as temporary:
        for split in SPLITS:
            if not data.manifest.splits[split]:
                continue
            file = str(Path(temporary, f"{split}.arrow"))
            write_table(data.on_demand(split), file)
            splits[split] = datasets.Dataset.from_file(file)
        datasets.DatasetDict(splits).save_to_disk(str(output))


def write_table(rows: ShardSet, file: str) -> None:
    import pyarrow as pa
    from datasets import Features, Value
    from datasets import Sequence as ListOf
    from datasets.arrow_writer import ArrowWriter

    ids = Value(rows.dtype.name)
    features = Features(
        {"tokens": ListOf(ids, length=rows.seq_len), "pivot": Value("uint16"), "same_document": Value("uint8")}
    )
    with ArrowWriter(path=file, features=features) as writer:
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows.rows(np.arange(start, min(start + ROWS_AT_ONCE, len(rows))))
            tokens = pa.FixedSizeListArray.from_arrays(pa.array(part.tokens.ravel()), rows.seq_len)
            columns = {"tokens": tokens, "pivot": part.pivot, "same_document": part.same_document}
            writer.write_table(pa.table(columns))
        writer.finalize()


def from_arrow(source: Path, output: str, s3: S3Config, *, tokenizer: str, column: str = "tokens") -> DataManifest:
    """Make shards of a data set of sequences. InputError if it does not hold sequences of one length."""
    import datasets

    saved = load_saved(source)
    check(
        isinstance(saved, datasets.DatasetDict) and all(saved.get(split) is not None for split in SPLITS),
        f"{source} must hold the splits {' and '.join(SPLITS)}: datasets.DatasetDict(train=..., validation=...)",
    )
    folder = open_folder(output, s3)
    check(not folder.names(), f"{output} is not empty; choose another folder")
    for split in SPLITS:
        check_column(saved[split], column, source)
    lengths = {len(saved[split][0][column]) for split in SPLITS}
    check(len(lengths) == 1, f"{source}: sequences of {sorted(lengths)} tokens; all must have one length")
    seq_len = lengths.pop()
    publish_tokenizer(load_tokenizer(tokenizer), folder)
    vocabulary = published_vocabulary(folder)
    counts = np.zeros(vocabulary.info.vocab_size, np.int64)
    splits: dict[str, list[Shard]] = {}
    for split in SPLITS:
        splits[split] = []
        for rows in pieces(saved[split], column, seq_len, vocabulary.dtype, vocabulary.info.vocab_size):
            if split == "train":
                counts += np.bincount(rows.tokens.ravel(), minlength=len(counts))
            splits[split].append(write_shard(folder, f"{split}-{len(splits[split]):05d}.safetensors", rows))
    tokens = int(np.delete(counts, vocabulary.info.special_ids).sum())
    return write_manifest(
        folder,
        seq_len=seq_len,
        dtype=vocabulary.dtype.name,
        splits=splits,
        tokenizer=vocabulary.info,
        counts={
            "tokens": tokens,
            "unigram_entropy": unigram_entropy(counts, vocabulary.info),
            "neighbour_accuracy": neighbour_accuracy(folder, splits, vocabulary.info),
        },
        config={"from_arrow": {split: len(saved[split]) for split in SPLITS}},
    )


def check_column(table: Any, column: str, source: Path) -> None:
    names = table.column_names
    check(column in names, f"{source} has no column {column}; there are {', '.join(names)} (--column)")
    check(len(table) > 0, f"{source} has a split without a single sequence")
    check(np.ndim(table[0][column]) == 1, f"column {column} holds single values; it must hold lists of ids")


def pieces(table: Any, column: str, seq_len: int, dtype: np.dtype, vocab_size: int) -> Iterator[Rows]:
    """A shard's rows at a time."""
    size = rows_of_shard(seq_len, dtype)
    table = table.with_format("numpy")
    for start in range(0, len(table), size):
        part = table[start : start + size]
        tokens = np.asarray(part[column])
        check(
            tokens.dtype.kind in "iu" and tokens.ndim == 2 and tokens.shape[1] == seq_len,
            f"column {column}: sequences {start} and following are not {seq_len} ids each",
        )
        low, top = int(tokens.min()), int(tokens.max())
        check(
            low >= 0 and top < vocab_size,
            f"column {column} holds ids from {low} to {top}, the tokenizer's are 0 to {vocab_size - 1}: another one?",
        )
        pivot = part.get("pivot", np.full(len(tokens), seq_len))
        same_document = part.get("same_document", np.zeros(len(tokens)))
        check(
            int(np.max(pivot)) <= seq_len, f"column pivot holds {int(np.max(pivot))}, beyond the sequence's {seq_len}"
        )
        yield Rows(tokens.astype(dtype), pivot.astype(np.uint16), same_document.astype(np.uint8))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser(
        "train.convert",
        "Turn shards into a data set that datasets.load_from_disk reads, or such a data set into shards.",
        examples=(
            "to-arrow data/mine arrow",
            "to-arrow s3://bucket/mine arrow",
            "from-arrow arrow data/again --tokenizer data/mine/tokenizer",
        ),
    )
    parser.add_argument("direction", choices=("to-arrow", "from-arrow"))
    parser.add_argument(
        "source", help="to-arrow: shards, a folder or s3://bucket/prefix; from-arrow: a data set's folder"
    )
    parser.add_argument("output", help="folder to write, new or empty; from-arrow: s3://bucket/prefix too")
    parser.add_argument("--tokenizer", help="from-arrow: Hub id or folder of the tokenizer that made the ids")
    parser.add_argument("--column", default="tokens", help="from-arrow: the one that holds the ids")
    add_s3_flags(parser)
    return run_flags(parser, arguments, convert)


def convert(options: argparse.Namespace, s3: S3Config) -> int:
    if options.direction == "to-arrow":
        data = PreparedData(ShardsConfig(path=options.source, cache_dir=options.cache_dir), s3)
        to_arrow(data, local_path(options.output))
        print(f"{options.output}: datasets.load_from_disk reads it")
        return DONE
    check(options.tokenizer is not None, "from-arrow needs --tokenizer, the one that made the ids")
    source = local_path(options.source)
    manifest = from_arrow(source, options.output, s3, tokenizer=options.tokenizer, column=options.column)
    print(f"{options.output}: {manifest.rows('train'):,} training sequences, id {manifest.id[:12]}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
