"""Labelled examples as tables: each split, in whatever format, becomes a `datasets.Dataset` with the same columns.

Rows are copied into Arrow files, with only a few in memory at a time. Unusable rows are counted, and the first of them
reported; more than `data.max_bad_rows` are an error.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from train.config import EvaluatedConfig, RecordsConfig, S3Config, check, shortlist
from train.data.random_bits import draw_rows, text_uniform
from train.data.records.content_checks import (
    LABEL_CHECKS,
    ROW_CHECKS,
    TRAIN_CHECKS,
    remarks_on,
)
from train.data.records.examples import Dropped, learnt_examples, new_examples
from train.data.records.formats import Table
from train.data.records.kinds import STRING, RowKind
from train.data.records.labels import LabelNames
from train.data.records.located import MAX_LISTED
from train.data.records.row import names_in
from train.data.records.sources import layout, of_new_rows, open_source, readable_columns
from train.machine import progress
from train.machine.console import say
from train.machine.progress import Phase
from train.storage.folders import disk_errors, scratch_folder

BATCH_ROWS = 500  # rows gathered in memory before they are written


@dataclass
class Raw:
    """Tables with a string column `id` and the RowKind's columns that data.columns sets. Labels are ClassLabels."""

    # "train", "validation", then the names of data.more_validation
    splits: dict[str, datasets.Dataset] = field(default_factory=dict)
    labels: list[str] = field(default_factory=list)  # names by id; [] if the task has no labels
    dropped: dict[str, Dropped] = field(default_factory=dict)  # the unused rows of each split
    remarks: list[str] = field(default_factory=list)  # what seems strange about the rows


def read_raw(cfg: RecordsConfig, kind: RowKind, s3: S3Config, *, seed: int, folder: Path) -> Raw:
    """Read all splits of the data into Arrow files in `folder`.

    Without `data.validation`, some of the training rows become the validation split, chosen by a hash of their
    kind.split_by text and the seed. If the settings limit a split's examples, a random sample is drawn with the seed;
    it keeps the order of the data. Raises InputError if the user has to fix the data.
    """
    tables = open_source(cfg, s3).tables(kind.wanted(cfg.columns), folder)
    raw = Raw()
    if kind.has_labels:
        raw.labels = given_labels(cfg, kind, next(iter(tables.values()))[0])
    for number, (split, parts) in enumerate(tables.items()):
        progress.begin(Phase(f"reading {split} of data.path={cfg.path}"))
        table = read_split(raw, split, parts, cfg, kind, folder / f"{number}.arrow")
        raw.splits[split] = table
        if split == "train" and cfg.validation is None:
            raw.splits |= hold_out(table, cfg, kind, seed, folder)
            raw.dropped["validation"] = Dropped("validation", 0)
    for split in raw.splits:
        check_size(raw, split, cfg, tables.get(split, []))
    if isinstance(cfg, EvaluatedConfig) and cfg.holds_out:
        del raw.splits["train"]
        raw.dropped["validation"] = raw.dropped.pop("train")
    draw_samples(raw, cfg, seed)
    return raw


def read_split(
    raw: Raw, split: str, parts: list[Table], cfg: RecordsConfig, kind: RowKind, path: Path
) -> datasets.Dataset:
    """Read a split into an Arrow file. The first split decides on the labels, unless they are given."""
    targets = names_in(kind.columns_of(parts[0].keys or cfg.columns)[kind.target])
    names = LabelNames(cfg, kind, ", ".join(targets), raw.labels)
    dropped = Dropped(split, cfg.max_bad_rows)
    table = write_table(learnt_examples(parts, cfg, kind, names, dropped), cfg, kind, path)
    dropped.check()
    raw.dropped[split] = dropped
    is_first = kind.has_labels and not raw.labels
    checks = ROW_CHECKS
    if split == "train":
        checks = (*TRAIN_CHECKS, *checks)
    if is_first:
        checks = (*LABEL_CHECKS, *checks)
    said = remarks_on(names.facts, checks)
    raw.remarks += [remark for remark in said if remark not in raw.remarks]
    if is_first:
        raw.labels = names.in_order()
    if raw.labels:
        label: Any = datasets.ClassLabel(names=raw.labels)
        if kind.takes_lists or kind.takes_words:
            label = datasets.List(label)
        table = table.cast_column(kind.target, label)
    return table


def write_table(
    rows: Iterable[dict[str, Any]], cfg: RecordsConfig, kind: RowKind, path: Path
) -> datasets.Dataset:
    """Write examples to an Arrow file and return it as a memory-mapped table."""
    used = kind.columns_of(cfg.columns)
    types = {key: type_ for key, type_ in kind.columns.items() if key in used}

    def batches() -> Iterator[dict[str, list[Any]]]:
        left = iter(rows)
        while batch := list(islice(left, BATCH_ROWS)):
            yield {name: [row[name] for row in batch] for name in ("id", *types)}
            progress.advance(len(batch))

    return write_arrow(batches(), datasets.Features({"id": STRING, **types}), path)


def write_arrow(
    batches: Iterable[Mapping[str, Any]], features: datasets.Features, path: Path
) -> datasets.Dataset:
    """Write columns, some rows at a time, to an Arrow file and return it as a memory-mapped table."""
    schema = features.arrow_schema
    with (
        disk_errors("write", path),
        pyarrow.OSFile(str(path), "wb") as file,
        pyarrow.ipc.new_stream(file, schema) as stream,
    ):
        for batch in batches:
            columns = [pyarrow.array(batch[field.name], field.type) for field in schema]
            stream.write_batch(pyarrow.record_batch(columns, schema=schema))
    return datasets.Dataset.from_file(str(path))


def hold_out(
    table: datasets.Dataset, cfg: RecordsConfig, kind: RowKind, seed: int, folder: Path
) -> dict[str, datasets.Dataset]:
    """Split a table into files of training rows and of held-out rows. Rows with the same text are in the same split."""
    rows = table.with_format("arrow")

    def part(*, is_held_out: bool) -> Iterator[dict[str, list[Any]]]:
        for batch in rows.iter(BATCH_ROWS):
            chosen = []
            for text in batch.column(kind.split_by).to_pylist():
                if not isinstance(text, str):
                    text = " ".join(text)
                number = text_uniform(text, seed)[0]
                chosen.append((number < cfg.validation_fraction) == is_held_out)
            yield batch.filter(pyarrow.array(chosen)).to_pydict()

    # A selection of the table would be slower to read: one slice for each row.
    return {
        split: write_arrow(part(is_held_out=held), table.features, folder / f"{split}.arrow")
        for split, held in (("train", False), ("validation", True))
    }


def given_labels(cfg: RecordsConfig, kind: RowKind, table: Table) -> list[str]:
    """Return the label names from the settings or from the data's description; [] if they must be found in the rows."""
    names = table.names_of(kind.columns_of(cfg.columns)[kind.target])
    if cfg.labels or names is None:
        return list(cfg.labels)
    labels = LabelNames(cfg, kind)
    mapped = [labels.look_up(number, names)[1] for number in range(len(names))]
    return list(dict.fromkeys(filter(None, mapped)))


def check_size(raw: Raw, split: str, cfg: RecordsConfig, tables: list[Table]) -> None:
    """Raise InputError, with the reason, if a split has no rows. `tables`: where it was read from."""
    dropped = raw.dropped[split]
    where = shortlist([table.where for table in tables], MAX_LISTED)
    reason = (
        f"of {where}, read as data.format={cfg.format}, {dropped.bad_rows:,} rows are bad and "
        f"{dropped.left_out:,} are left out by data.label_map"
    )
    total = sum(len(raw.splits.get(name, ())) for name in ("train", "validation"))
    if cfg.validation is None and total:
        reason = (
            f"data.validation_fraction={cfg.validation_fraction} of {total:,} rows leaves none, because rows with the "
            "same text stay together; change it, or set data.validation"
        )
    check(len(raw.splits[split]) > 0, f"{split}: no row is left: {reason}")


def draw_samples(raw: Raw, cfg: RecordsConfig, seed: int) -> None:
    """Keep at most data.max_train_examples training examples, in the order of the data."""
    table, most = raw.splits.get("train"), cfg.max_train_examples
    if table is not None and most is not None and most < len(table):
        raw.splits["train"] = table.select(draw_rows(len(table), most, seed, 0))


def read_texts(
    cfg: RecordsConfig,
    kind: RowKind,
    path: str,
    s3: S3Config,
    *,
    labels: Sequence[str] = (),
    named: Collection[str] = (),
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield new examples from a file or a saved data set, in order, read like the training data, and their rows.

    The columns are as in `Raw`, but a label is a name: one of `labels`, if they are given, or None if it is unknown.
    The target is missing if the data lacks it. A row has all columns whose types can be read; a warning names others.
    Raises InputError if a row cannot be read (the message names it), or if the data lacks the column for a key in
    `named`.
    """
    new = of_new_rows(cfg, path)
    check(layout(new, s3) != "hub", f"{path}: there is no such file or folder")
    names = LabelNames(new, kind, known=labels)
    with scratch_folder() as scratch:
        source = open_source(new, s3)
        read = readable_columns(source, scratch)
        wanted = [*kind.wanted(new.columns), *read]
        tables = source.tables(wanted, scratch)["train"]
        left_out = [name for name in tables[0].columns or () if name not in read]
        if left_out:
            said = f"{path}: columns left out, whose types cannot be read: {shortlist(left_out)}"
            say(f"warning: {said}", file=sys.stderr)
        yield from new_examples(tables, new, kind, names, named)
