"""The first rows of labelled data, and what its files show: their splits and their delimiter."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from train.config import RecordsConfig, S3Config, check
from train.config.data import is_named
from train.data.files.errors import BadRow
from train.data.files.text import start_of
from train.data.records.columns import Column, columns_of
from train.data.records.formats import format_of
from train.data.records.located import local_copy
from train.data.records.sources import FileSource, layout, open_source, readable_columns
from train.storage.folders import is_s3, local_path, open_folder, scratch_folder

ROWS_LOOKED_AT = 2_000
TRAIN_WORDS = {"train", "training"}
VALIDATION_WORDS = {"validation", "valid", "val", "dev", "development"}
DELIMITERS = (",", ";", "\t", "|")


@dataclass(frozen=True)
class TableSample:
    """The first rows of training data, and settings that their files show, by key."""

    columns: list[Column]
    num_rows: int  # of all training data
    settings: dict[str, Any]
    has_fixed_columns: bool  # the format names the columns


def read_sample(cfg: RecordsConfig, s3: S3Config, typed: Mapping[str, Any]) -> TableSample:
    """Read the first rows of the training data, and count all. `typed`: as for `reading_of`.

    Raises InputError if the data cannot be read.
    """
    found: dict[str, Any] = {}
    with scratch_folder() as scratch:
        if not typed.keys() & {"data.train", "data.validation"}:
            found = splits_among(names_in(cfg, s3, scratch))
        source = open_source(replace(cfg, **found), s3)
        if isinstance(source, FileSource):
            found |= form_of(source, typed, s3, scratch)
            source = FileSource(replace(cfg, **found), s3)
        table = source.tables(readable_columns(source, scratch), scratch)["train"][0]
        values = (row for _, row in table.rows())
        first = list(islice(values, ROWS_LOOKED_AT))
        num_rows = len(first) + sum(1 for _ in values)
    rows = [row for row in first if isinstance(row, dict)]
    bad = next((row for row in first if not isinstance(row, dict)), "it has no rows")
    check(bool(rows), f"data.path={cfg.path} cannot be read: {bad}")
    settings = {f"data.{key}": value for key, value in found.items()}
    return TableSample(
        columns_of(rows, table.class_names), num_rows, settings, table.keys is not None
    )


def names_in(cfg: RecordsConfig, s3: S3Config, scratch: Path) -> list[str]:
    """Return the names of the files of rows in a folder, or of the splits of a data set that is saved or on the Hub."""
    if layout(cfg, s3) == "hub":
        from train.data.records.data_sets import HubSource  # imports `datasets`

        return HubSource(cfg, s3).splits(scratch)
    if is_named(cfg.path) or not (is_s3(cfg.path) or local_path(cfg.path).is_dir()):
        return []
    names = open_folder(cfg.path, s3).names_here()
    if layout(cfg, s3) == "files":
        return sorted(filter(is_named, names))
    return sorted(names)


def splits_among(names: Sequence[str]) -> dict[str, str]:
    """Return which name is that of the training data, and which of the validation data, if their words say so."""
    found = {}
    for split, words in (("train", TRAIN_WORDS), ("validation", VALIDATION_WORDS)):
        of_split = [name for name in names if words & set(re.findall("[a-z]+", name.lower()))]
        if len(of_split) == 1:
            found[split] = of_split[0]
    if "train" in found:
        return found
    return {}


def form_of(
    source: FileSource, typed: Mapping[str, Any], s3: S3Config, scratch: Path
) -> dict[str, str]:
    """Return the settings for the form of a CSV file: its delimiter, and quotation marks escaped by backslashes."""
    file = source.files["train"][0]
    path = local_copy(file, scratch)
    if format_of(path, str(file), source.cfg) != "csv":
        return {}
    found = {}
    if "data.delimiter" not in typed:
        found = delimiter_in(start_of(path, source.cfg.encoding), str(file))
    if "data.quotes" in typed:
        return found
    escaped = {**found, "quotes": "escaped"}
    if bad_rows(source, found, s3, scratch) and not bad_rows(source, escaped, s3, scratch):
        return escaped
    return found


def bad_rows(source: FileSource, form: Mapping[str, Any], s3: S3Config, scratch: Path) -> int:
    """Return how many of the first rows are bad in such a form."""
    table = FileSource(replace(source.cfg, **form), s3).tables((), scratch)["train"][0]
    return sum(isinstance(row, BadRow) for _, row in islice(table.rows(), ROWS_LOOKED_AT))


def delimiter_in(start: str, name: str) -> dict[str, str]:
    """Return the setting for the delimiter of a CSV file, if its first line has something else than commas."""
    header = next(iter(start.splitlines()), "")
    mark = max(DELIMITERS, key=header.count)
    is_tsv = name.lower().removesuffix(".gz").endswith(".tsv")
    if header.count(mark) <= header.count(",") or is_tsv:
        return {}
    return {"delimiter": mark}
