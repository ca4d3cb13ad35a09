"""Labelled rows of JSON lines, Parquet, saved data sets and the Hub, as tables. See raw.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet
from datasets.exceptions import DatasetsError

from train.config import InputError, RecordsConfig, check
from train.data.documents import LIBRARY_ERRORS, naming
from train.data.raw_csv import csv_table
from train.data.raw_files import BadRow, Found, Table, format_of, text_lines, unreadable
from train.data.raw_squad import squad_table
from train.hub_access import asking_hub, why_missing
from train.storage import local_path

BATCH_ROWS = 256  # decoded at once
BUFFER_BYTES = 2**20  # of Parquet, read at once; without it a whole row group is


def file_table(path: Path, cfg: RecordsConfig, wanted: Collection[str]) -> Table:
    """The rows of one file; of formats that have columns, `wanted` are read alone."""
    kind = format_of(path, cfg)
    if kind == "parquet":
        return parquet_table(path, wanted)
    return {"csv": csv_table, "jsonl": jsonl_table, "squad": squad_table}[kind](path, cfg)


def jsonl_table(path: Path, cfg: RecordsConfig) -> Table:
    return Table(str(path), lambda: jsonl_rows(path, cfg.encoding))


def jsonl_rows(path: Path, encoding: str) -> Iterator[Found]:
    with text_lines(path, encoding) as lines:
        for number, line in enumerate(lines, 1):
            if not line.isspace():
                yield f"{path}:{number}", unreadable(line, encoding) or json_object(line)


def json_object(line: str) -> dict[str, Any] | BadRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(f"not a JSON object on one line: {error}")
    return row if isinstance(row, dict) else BadRow(f"not a JSON object on one line but a {type(row).__name__}")


def parquet_table(path: Path, wanted: Collection[str]) -> Table:
    """Batches of a row group at a time. Label names that `datasets` wrote into the file count."""
    with naming(f"{path} cannot be read as Parquet", LIBRARY_ERRORS):
        schema = pyarrow.parquet.read_schema(path)
        features = datasets.Features.from_arrow_schema(schema)

    def rows() -> Iterator[Found]:
        with (
            naming(f"{path} cannot be read as Parquet", LIBRARY_ERRORS),
            pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES) as file,
        ):
            batches = file.iter_batches(BATCH_ROWS, columns=present(wanted, schema.names))
            yield from numbered(batches, str(path))

    return Table(str(path), rows, schema.names, class_names(features))


def dataset_table(dataset: datasets.Dataset, place: str, wanted: Collection[str]) -> Table:
    columns = list(dataset.column_names)

    def rows() -> Iterator[Found]:
        with naming(f"{place} cannot be read to its end", LIBRARY_ERRORS):
            arrow = dataset.select_columns(present(wanted, columns)).with_format("arrow")
            yield from numbered(arrow.iter(BATCH_ROWS), place)

    return Table(place, rows, columns, class_names(dataset.features))


def present(wanted: Collection[str], columns: list[str]) -> list[str]:
    """Those of a table's columns that are asked for, by themselves or with a dot into them."""
    return [name for name in columns if any(name == item or item.startswith(f"{name}.") for item in wanted)]


def class_names(features: datasets.Features) -> dict[str, list[str]]:
    return {name: item.names for name, item in features.items() if isinstance(item, datasets.ClassLabel)}


def numbered(batches: Any, place: str) -> Iterator[Found]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{place}, row {number}", row


def saved_splits(folder: Path, location: str, names: dict[str, str | None]) -> dict[str, datasets.Dataset]:
    """Of what save_to_disk wrote, the splits that the settings name; a single data set is the training split."""
    with naming(f"{location} cannot be read as a saved data set", LIBRARY_ERRORS):
        found = datasets.load_from_disk(str(folder))
    if isinstance(found, datasets.Dataset):
        given = [name for name in names.values() if name is not None]
        check(not given, f"data.path={location} holds one data set, not splits {', '.join(given)}; leave them out")
        return {"train": found}
    wanted = {split: name or "train" for split, name in names.items()}
    missing = sorted(set(wanted.values()) - set(found))
    check(not missing, f"data.path={location} has no split {', '.join(missing)}; there are {', '.join(found)}")
    return {split: found[name] for split, name in wanted.items()}


def hub_arguments(cfg: RecordsConfig, scratch: Path) -> dict[str, Any]:
    """For `datasets`. A Hub id uses the library's own cache (HF_HOME), which is how data gets to machines that are
    offline; a folder, as of a cloned repository, leaves no trace there."""
    path = local_path(cfg.path)
    here = path.is_dir()
    cache = str(scratch / "hub") if here else None
    return {"path": str(path) if here else cfg.path, "name": cfg.name, "revision": cfg.revision, "cache_dir": cache}


@contextmanager
def naming_hub(cfg: RecordsConfig) -> Iterator[None]:
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    errors = (*LIBRARY_ERRORS, DatasetsError)
    if local_path(cfg.path).is_dir():
        with naming(f"data.path={cfg.path} cannot be read as a data set", errors):
            yield
        return
    try:
        with asking_hub(cfg.path):
            yield
    except errors as error:
        hint = "without the Hub, give a file or folder: data.path=FOLDER"
        what = f"data.path={cfg.path} is no file or folder here, and as a Hub data set: {why_missing(cfg.path, error)}"
        raise InputError(f"{what}; {hint}") from error


def hub_splits(cfg: RecordsConfig, names: dict[str, str | None], scratch: Path) -> dict[str, datasets.Dataset]:
    """Splits of a Hub data set (or of a folder laid out like one), downloaded once by `datasets`."""
    found = {}
    for split, name in names.items():
        with naming_hub(cfg):
            found[split] = datasets.load_dataset(**hub_arguments(cfg, scratch), split=name or "train")
    return found


def hub_version(cfg: RecordsConfig, scratch: Path) -> str:
    """What changes when a Hub data set does: the commit, as `datasets` finds it (offline: that of its cache)."""
    with naming_hub(cfg):
        version = datasets.load_dataset_builder(**hub_arguments(cfg, scratch)).hash
    if not isinstance(version, str):
        raise InputError(f"data.path={cfg.path}: datasets tells no version of it; set data.revision to a commit")
    return version
