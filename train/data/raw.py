"""Labelled examples as tables: whatever holds them, each split becomes a `datasets.Dataset` with the same columns.

CSV, JSON lines, Parquet and SQuAD files, here or in S3, what save_to_disk wrote, and the Hub. Rows go through memory a
few at a time into Arrow files. A row that cannot be used is named, counted, and refused beyond `data.max_bad_rows`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute

from train import progress
from train.config import RecordsConfig, S3Config, check
from train.data.documents import naming
from train.data.preparation import digest
from train.data.random_bits import hash_uniform
from train.data.raw_examples import (
    Dropped,
    LabelNames,
    NoneDropped,
    examples,
    in_order,
    wanted_columns,
)
from train.data.raw_files import FILE_FORMATS, MAX_LISTED, Table, is_named, layout, saved_folder, split_files
from train.data.raw_formats import (
    dataset_table,
    file_table,
    hub_splits,
    saved_splits,
)
from train.progress import Stage
from train.storage import make_folder, scratch_folder

BATCH_ROWS = 500  # of an Arrow file, gathered in memory
STRING = datasets.Value("string")
ANSWERS = {"text": [STRING], "answer_start": [datasets.Value("int64")]}


@dataclass(frozen=True)
class Raw:
    """Columns: `id`, `text`, `text_pair` (if columns.text_pair is set) strings and `label` int64 (a ClassLabel), or
    `id`, `question`, `context` strings and `answers` {"text": [str], "answer_start": [int]}, empty if there is none."""

    splits: dict[str, datasets.Dataset]  # "train", "validation", then the names of more_validation
    labels: list[str]  # classify: names in the order of their numbers; qa: []
    dropped: dict[str, dict[str, Any]]  # of each split: bad_rows, examples (at most 10 places and reasons), left_out


def read_raw(
    cfg: RecordsConfig, kind: str, s3: S3Config, *, seed: int, scratch: Path, unanswerable: bool = True
) -> Raw:
    """All splits of the data for a "classify" or "qa" task, as Arrow files in a new folder below `scratch`.

    Without `unanswerable`, a question that has no answer is a bad row. Without `data.validation`, rows of the
    training data are held out by a hash of their text (qa: of the context) and the seed. Subsets are drawn with the
    seed and keep the order of the data. Raises InputError for what the user has to mend.
    """
    tables = open_tables(cfg, kind, s3, scratch)
    folder = Path(tempfile.mkdtemp(prefix="raw-", dir=make_folder(scratch)))
    try:
        return convert(tables, cfg, kind, seed, folder, unanswerable)
    except BaseException:
        shutil.rmtree(folder)
        raise


def convert(
    tables: dict[str, list[Table]], cfg: RecordsConfig, kind: str, seed: int, folder: Path, unanswerable: bool
) -> Raw:
    labels = given_labels(cfg, tables["train"][0]) if kind == "classify" else []
    files: dict[str, ArrowFile] = {}
    lost = {split: Dropped(split, cfg.max_bad_rows) for split in tables}
    for number, (split, found) in enumerate(tables.items()):
        progress.begin(Stage(f"reading {split} of data.path={cfg.path}"))
        names = LabelNames(cfg, labels)
        rows = examples(found, cfg, kind, names, lost[split], labelled=True, unanswerable=unanswerable)
        with naming(f"{folder} cannot be written", (OSError,)):
            new = {split: ArrowFile(folder / f"{number}.arrow", cfg, kind)}
            if split == "train" and cfg.validation is None:
                new["validation"] = ArrowFile(folder / "held_out.arrow", cfg, kind)
            write(rows, cfg, kind, seed, list(new.values()))
        lost[split].check()
        files |= new
        labels = labels or in_order(names.found)
    dropped = {split: lost.get(split, Dropped(split, 0)).facts() for split in files}
    rows_of, splits = {split: file.rows for split, file in files.items()}, {}
    for number, (split, file) in enumerate(files.items()):
        check_size(cfg, split, rows_of, dropped[split], [table.place for table in tables.get(split, ())])
        most = cfg.max_train_examples if split == "train" else cfg.max_validation_examples
        splits[split] = sample(file.table(labels), most, seed, number)
    if kind == "classify":
        check_classes(splits["train"], labels)
    return Raw(splits, labels, dropped)


def open_tables(cfg: RecordsConfig, kind: str, s3: S3Config, scratch: Path) -> dict[str, list[Table]]:
    """What each split is read from."""
    wanted = list(wanted_columns(cfg.columns, kind).values())
    held = layout(cfg, s3)
    if held == "files":
        files = split_files(cfg, s3, scratch)
        return {split: [file_table(path, cfg, wanted) for path in paths] for split, paths in files.items()}
    names = {"train": cfg.train} | ({} if cfg.validation is None else {"validation": cfg.validation})
    names |= cfg.more_validation
    if held == "saved":
        found = saved_splits(saved_folder(cfg, s3, scratch), cfg.path, names)
    else:
        found = hub_splits(cfg, names, scratch)
    places = {split: f"data set {cfg.path}, split {name or 'train'}" for split, name in names.items()}
    return {split: [dataset_table(found[split], place, wanted)] for split, place in places.items()}


def given_labels(cfg: RecordsConfig, table: Table) -> list[str]:
    """The labels as far as they are known before reading: of the settings, or else of the data's own description."""
    names = table.class_names.get(cfg.columns.label)
    if names is None:
        return list(cfg.labels)
    if not cfg.labels:
        return [] if cfg.label_map else list(names)
    mapped = {cfg.label_map.get(name, name) for name in names} - {None}
    agree = mapped <= set(cfg.labels)
    have = f"{table.place}: its labels are {', '.join(names)}, data.labels are {', '.join(cfg.labels)}"
    check(agree, f"{have}; name the same ones, or lead from one to the other with data.label_map")
    return list(cfg.labels)


class ArrowFile:
    """Examples on disk: written one by one, then read as a table that is mapped into memory."""

    def __init__(self, path: Path, cfg: RecordsConfig, kind: str) -> None:
        self.path, self.kind = path, kind
        keys = ["id", *[key for key in wanted_columns(cfg.columns, kind) if key != "id"]]
        self.features = datasets.Features({key: ANSWERS if key == "answers" else STRING for key in keys})
        self.waiting: list[dict[str, Any]] = []
        self.rows = 0
        self.sink = pa.OSFile(str(path), "wb")
        self.writer = pa.ipc.new_stream(self.sink, self.features.arrow_schema)

    def write(self, example: dict[str, Any]) -> None:
        self.waiting.append(example)
        self.rows += 1
        if len(self.waiting) == BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        self.writer.write_batch(pa.RecordBatch.from_pylist(self.waiting, self.features.arrow_schema))
        progress.advance(len(self.waiting))
        self.waiting = []

    def close(self) -> None:
        self.flush()
        self.writer.close()
        self.sink.close()

    def table(self, labels: list[str]) -> datasets.Dataset:
        """Names of labels become their numbers, in a second file that takes the place of the first."""
        if self.kind == "classify":
            features = datasets.Features({**self.features, "label": datasets.ClassLabel(names=labels)})
            schema, second = features.arrow_schema, self.path.with_suffix(".numbered.arrow")
            place, values = schema.get_field_index("label"), pa.array(labels, pa.string())
            with (
                naming(f"{second} cannot be written", (OSError,)),
                pa.memory_map(str(self.path)) as source,
                pa.ipc.open_stream(source) as batches,
                pa.OSFile(str(second), "wb") as sink,
                pa.ipc.new_stream(sink, schema) as writer,
            ):
                for batch in batches:
                    columns = batch.columns
                    columns[place] = pa.compute.index_in(columns[place], value_set=values).cast(pa.int64())
                    writer.write_batch(pa.record_batch(columns, schema=schema))
            second.replace(self.path)
        return datasets.Dataset.from_file(str(self.path))


def write(rows: Iterable[dict[str, Any]], cfg: RecordsConfig, kind: str, seed: int, files: list[ArrowFile]) -> None:
    """Rows into the first file, or those to hold out into the second if there is one."""
    text = {"classify": "text", "qa": "context"}[kind]
    seen: set[str] = set()
    for example in rows:
        if kind == "qa":  # predictions and answers are matched by it
            check(example["id"] not in seen, f"two questions have the id {example['id']}; each needs its own")
            seen.add(example["id"])
        is_held_out = len(files) > 1 and digest(example[text], seed)[0] < cfg.validation_fraction
        files[is_held_out].write(example)
    for file in files:
        file.close()


def check_size(
    cfg: RecordsConfig, split: str, rows: dict[str, int], dropped: dict[str, Any], places: list[str]
) -> None:
    """InputError if a split has no row, with the reason. `places`: the files that it was read from."""
    held_out = f"data.validation_fraction={cfg.validation_fraction} of {rows['train'] + rows['validation']:,} rows"
    if split == "validation" and cfg.validation is None:
        hint = f"{held_out} comes to none; raise it or set data.validation"
    elif split == "train" and cfg.validation is None and rows["validation"]:
        hint = f"{held_out} comes to all, as rows with the same text stay together; set data.validation"
    elif dropped["bad_rows"] or dropped["left_out"]:
        hint = f"{dropped['bad_rows']:,} bad ones and {dropped['left_out']:,} that data.label_map leads to null"
    else:
        hint = f"none is in {', '.join(places[:MAX_LISTED])}{', ...' if len(places) > MAX_LISTED else ''}"
    check(rows[split] > 0, f"{split}: no row is left: {hint}")


def check_classes(table: datasets.Dataset, labels: list[str]) -> None:
    numbers = np.unique(table.with_format("numpy", columns=["label"])[:]["label"])
    what = f"train: all {len(table):,} rows have the label {labels[numbers[0]]}"
    check(len(numbers) > 1, f"{what}, there is nothing to tell apart; is data.columns.label right?")


def sample(table: datasets.Dataset, most: int | None, seed: int, stream: int) -> datasets.Dataset:
    """`most` rows drawn with the seed, in the order of the table; all, if they are not more."""
    if most is None or most >= len(table):
        return table
    drawn = np.argsort(hash_uniform(seed, stream, np.arange(len(table))), kind="stable")[:most]
    return table.select(np.sort(drawn))


def read_texts(
    cfg: RecordsConfig, kind: str, path: str, s3: S3Config, *, labels: Sequence[str] = (), scratch: Path | None = None
) -> Iterator[dict[str, Any]]:
    """New examples of a file, or of a saved data set, in its order, read like the training data was.

    Rows as in `Raw`, each one of the file; `label` (a name, one of `labels` if they are given, or None) and `answers`
    only where the data has them. A row that cannot be read is an InputError with its place.
    """
    if scratch is None:
        with scratch_folder() as folder:
            yield from read_texts(cfg, kind, path, s3, labels=labels, scratch=folder)
        return
    new = replace(cfg, path=path, train=None, validation=None, more_validation={})
    tells = is_named(path) and not path.endswith(".json")
    new.format = cfg.format if cfg.format in FILE_FORMATS and not tells else "auto"
    held = layout(new, s3)
    check(held != "hub", f"{path}: there is no such file or folder")
    tables = open_tables(new, kind, s3, scratch)["train"]
    yield from examples(tables, new, kind, LabelNames(new, labels), NoneDropped("new", 0), labelled=False)
