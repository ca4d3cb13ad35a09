"""Labelled examples as tables: each split, in whatever format, becomes a `datasets.Dataset` with the same columns.

The sources are CSV, JSON lines, Parquet, SQuAD and CoNLL files on disk or in S3, folders that save_to_disk wrote, and
the Hub. Rows are copied into Arrow files, with only a few in memory at a time. Unusable rows are counted, and the first
of them reported; more than `data.max_bad_rows` are an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets.arrow_writer import ArrowWriter

from train.config import RecordsConfig, S3Config, check, shortlist
from train.config.data import is_named
from train.data.files.errors import naming
from train.data.random_bits import draw_rows, text_uniform
from train.data.records.formats import Table, open_splits
from train.data.records.kinds import STRING, RowKind, names_in
from train.data.records.label_checks import check_column
from train.data.records.rows import Dropped, LabelNames, examples
from train.data.records.sources import FILE_FORMATS, MAX_LISTED, layout
from train.data.records.table_facts import column
from train.machine import progress
from train.machine.progress import Phase
from train.storage.folders import scratch_folder

BATCH_ROWS = 500  # rows gathered in memory before they are written


@dataclass(frozen=True)
class Raw:
    """Tables with a string column `id` and the RowKind's columns that data.columns sets. Labels are ClassLabels."""

    # "train", "validation", then the names of data.more_validation
    splits: dict[str, datasets.Dataset]
    labels: list[str]  # names by id; [] if the task has no labels
    dropped: dict[str, Dropped]  # the unused rows of each split
    remarks: list[str]  # what seems strange about the labels


def read_raw(cfg: RecordsConfig, kind: RowKind, s3: S3Config, *, seed: int, folder: Path) -> Raw:
    """Read all splits of the data into Arrow files in `folder`.

    Without `data.validation`, some of the training rows become the validation split, chosen by a hash of their
    kind.split_by text and the seed. If the settings limit a split's examples, a random sample is drawn with the seed;
    it keeps the order of the data. Raises InputError if the user has to fix the data.
    """
    tables = open_splits(cfg, kind.wanted(cfg.columns), s3, folder)
    has_labels = kind.read_target is None
    labels = given_labels(cfg, kind, next(iter(tables.values()))[0]) if has_labels else []
    splits: dict[str, datasets.Dataset] = {}
    dropped: dict[str, Dropped] = {}
    remarks: list[str] = []
    for number, (split, parts) in enumerate(tables.items()):
        progress.begin(Phase(f"reading {split} of data.path={cfg.path}"))
        dropped[split], names = Dropped(split, cfg.max_bad_rows), LabelNames(cfg, labels)
        rows = examples(parts, cfg, kind, names, dropped[split])
        table = write_table(rows, cfg, kind, folder / f"{number}.arrow")
        dropped[split].check()
        if has_labels and not labels:
            target = ", ".join(
                names_in(kind.columns_of(parts[0].keys or cfg.columns)[kind.target])
            )
            remarks += check_column(names.column(target, kind))
            labels = names.in_order()
        ok = bool(labels) or not has_labels or not len(table)
        check(
            ok,
            f"{split}: no row has a label, so there is nothing to learn; is data.columns.{kind.target} right?",
        )
        if split == "train" and names.unmapped and any(cfg.label_map.values()):
            some = shortlist(sorted(names.unmapped))
            remarks.append(f"data.label_map does not name {some}: these labels are left unchanged")
        if labels:
            label = datasets.ClassLabel(names=labels)
            table = table.cast_column(
                kind.target, datasets.List(label) if kind.has_lists else label
            )
        splits |= (
            hold_out(table, cfg, kind, seed)
            if split == "train" and cfg.validation is None
            else {split: table}
        )
    dropped = {split: dropped.get(split, Dropped(split, 0)) for split in splits}
    counts = {split: len(table) for split, table in splits.items()}
    is_learnt = "train" in splits
    # Validation splits have the same numbers with and without a training split, so that the same rows are drawn.
    for number, (split, table) in enumerate(splits.items(), start=0 if is_learnt else 1):
        check_size(
            cfg, split, counts, dropped[split], [table.where for table in tables.get(split, ())]
        )
        most = cfg.max_train_examples if split == "train" else cfg.max_validation_examples
        if most is not None and most < len(table):
            splits[split] = table.select(draw_rows(len(table), most, seed, number))
    if has_labels and is_learnt:
        num_rows, numbers = len(splits["train"]), column(splits["train"], kind.target)
        found = [labels[number] for number in np.unique(numbers)] or ["none"]
        # A single label can be learnt if some rows lack it.
        is_some = kind.has_lists and kind.check_each is None and 0 < len(numbers) < num_rows
        what = f"train: all {num_rows:,} rows have the label {found[0]}"
        ok = len(found) > 1 or is_some
        check(ok, f"{what}, so there is nothing to learn; is data.columns.{kind.target} right?")
    return Raw(splits, labels, dropped, remarks)


def write_table(
    rows: Iterable[dict[str, Any]], cfg: RecordsConfig, kind: RowKind, path: Path
) -> datasets.Dataset:
    """Write examples to an Arrow file and return it as a memory-mapped table."""
    used = kind.columns_of(cfg.columns)
    features = datasets.Features(
        {"id": STRING} | {key: type_ for key, type_ in kind.columns.items() if key in used}
    )
    with (
        naming(f"{path} cannot be written", (OSError,)),
        ArrowWriter(path=str(path), features=features, writer_batch_size=BATCH_ROWS) as writer,
    ):
        for example in rows:
            writer.write(example)
            progress.advance(1)
        writer.finalize()
    return datasets.Dataset.from_file(str(path))


def hold_out(
    table: datasets.Dataset, cfg: RecordsConfig, kind: RowKind, seed: int
) -> dict[str, datasets.Dataset]:
    """Split a table into training rows and held-out rows. Rows with the same text are in the same split."""
    values = (value for batch in table.iter(BATCH_ROWS) for value in batch[kind.split_by])
    texts = (value if isinstance(value, str) else " ".join(value) for value in values)
    is_held_out = np.array(
        [text_uniform(text, seed)[0] < cfg.validation_fraction for text in texts], bool
    )
    return {
        "train": table.select(np.flatnonzero(~is_held_out)),
        "validation": table.select(np.flatnonzero(is_held_out)),
    }


def given_labels(cfg: RecordsConfig, kind: RowKind, table: Table) -> list[str]:
    """Return the label names from the settings or from the data's description; [] if they must be found in the rows."""
    names = table.names_of(kind.columns_of(cfg.columns)[kind.target])
    if names is None:
        return list(cfg.labels)
    labels = LabelNames(cfg)
    mapped = dict.fromkeys(labels.look_up(number, names)[1] for number in range(len(names)))
    if not cfg.labels:
        return [name for name in mapped if name is not None]
    agree = mapped.keys() - {None} <= set(cfg.labels)
    have = f"{table.where}: its labels are {shortlist(names)}, but data.labels are {shortlist(cfg.labels)}"
    check(agree, f"{have}; use the same names, or map the data's with data.label_map")
    return list(cfg.labels)


def check_size(
    cfg: RecordsConfig, split: str, rows: dict[str, int], dropped: Dropped, names: list[str]
) -> None:
    """Raise InputError, with the reason, if a split has no rows. `names`: the files that it was read from."""
    total = rows.get("train", 0) + rows["validation"]
    if cfg.validation is None and total and split in ("train", "validation"):
        share = f"data.validation_fraction={cfg.validation_fraction} of {total:,} rows"
        hint = f"{share} leaves none, because rows with the same text stay together; change it, or set data.validation"
    elif dropped.bad_rows or dropped.left_out:
        hint = f"{dropped.bad_rows:,} are bad and data.label_map maps {dropped.left_out:,} to null"
    else:
        hint = f"there is none in {shortlist(names, MAX_LISTED)}"
        hint += "" if cfg.format == "auto" else f", read as data.format={cfg.format}"
    check(rows[split] > 0, f"{split}: no row is left: {hint}")


def read_texts(
    cfg: RecordsConfig,
    kind: RowKind,
    path: str,
    s3: S3Config,
    *,
    labels: Sequence[str] = (),
    named: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield new examples from a file or a saved data set, in order, read like the training data.

    The columns are as in `Raw`, but a label is a name: one of `labels`, if they are given, or None if it is unknown.
    The target is missing if the data lacks it. Raises InputError if a row cannot be read (the message names it), or if
    the data lacks the column for a key in `named`.
    """
    new = replace(cfg, path=path, train=None, validation=None, more_validation={})
    says_format = is_named(path) and not path.endswith(".json")
    new.format = cfg.format if cfg.format in FILE_FORMATS and not says_format else "auto"
    check(layout(new, s3) != "hub", f"{path}: there is no such file or folder")
    with scratch_folder() as scratch:
        tables = open_splits(new, kind.wanted(new.columns), s3, scratch)["train"]
        yield from examples(tables, new, kind, LabelNames(new, labels), None, named=named)
