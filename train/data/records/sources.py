"""The location and version of labelled data: files on disk or in S3, a folder that save_to_disk wrote, or the Hub."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import InputError, RecordsConfig, S3Config, check, shortlist
from train.config.data import FILE_FORMATS, is_named
from train.data.records.formats import Table, file_table
from train.data.records.located import (
    MARKS,
    MAX_LISTED,
    File,
    find,
    local_copy,
    split_names,
    stamp,
)
from train.storage.folders import at_once, is_s3, local_path, sha256_json
from train.storage.hub_access import is_at_hub

if TYPE_CHECKING:
    from train.data.records.data_sets import HubSource, SavedSource

# These settings do not change which rows are read.
NOT_READING = ("path", "num_workers", "verify", "cache_dir", "lengths", "max_bad_rows")


def open_source(cfg: RecordsConfig, s3: S3Config) -> FileSource | SavedSource | HubSource:
    """Return the source of the data. Raises InputError if files are missing, or in training and in validation."""
    kind = layout(cfg, s3)
    if kind == "files":
        return FileSource(cfg, s3)
    from train.data.records.data_sets import LIBRARY_SOURCES  # imports `datasets`

    return LIBRARY_SOURCES[kind](cfg, s3)


def layout(cfg: RecordsConfig, s3: S3Config) -> str:
    """Return how `data.path` stores its splits: "files", "saved" or "hub".

    Raises InputError if the format is that of a data set but the path is a file.
    """
    if cfg.format in FILE_FORMATS:
        return "files"
    if cfg.format != "auto":
        check(
            is_s3(cfg.path) or not local_path(cfg.path).is_file(),
            f"data.path={cfg.path} is a file, which data.format={cfg.format} does not read; set data=records",
        )
        return cfg.format
    if is_named(cfg.path) or is_s3(cfg.path):
        return "files"
    path = local_path(cfg.path)
    if any((path / name).exists() for name in MARKS):
        return "saved"
    if is_at_hub(cfg.path):
        return "hub"
    return "files"


def version(cfg: RecordsConfig, s3: S3Config) -> str:
    """Return a sha256 that changes when the data or the settings for reading it change.

    It covers the names, sizes and times of files, the ETags in S3, or the commit on the Hub. Raises InputError in the
    same cases as `open_source`.
    """
    source = open_source(cfg, s3)
    return sha256_json([settings_of(cfg), layout(cfg, s3), source.version()])


def settings_of(cfg: RecordsConfig) -> dict[str, Any]:
    """Return the settings that decide which rows are read, and from where."""
    used = {key: value for key, value in asdict(cfg).items() if key not in NOT_READING}
    used["label_map"] = list(cfg.label_map.items())  # the order decides on that of the labels
    where = cfg.path
    if not is_s3(where):
        where = str(local_path(where).absolute())
    return {"path": where, **used}


def readable_columns(source: FileSource | SavedSource | HubSource, scratch: Path) -> list[str]:
    """Return the columns of the training data whose types can be read; [] if the format is text, which has no types."""
    names = source.tables((), scratch)["train"][0].columns or []
    with suppress(InputError):
        source.tables(names, scratch)
        return names
    found = []
    for name in names:
        with suppress(InputError):
            source.tables([name], scratch)
            found.append(name)
    return found


class FileSource:
    """Files of rows, on disk or in S3."""

    def __init__(self, cfg: RecordsConfig, s3: S3Config) -> None:
        self.cfg = cfg
        self.files: dict[str, list[File]] = {}
        for split, pattern in split_names(cfg).items():
            key = f"data.{split}"
            if split in cfg.more_validation:
                key = f"data.more_validation.{split}"
            self.files[split] = find(cfg.path, key, pattern, s3)
        for split, files in self.files.items():
            both = set(files) & set(self.files.get("train", ()))
            some = shortlist(sorted(map(str, both)), MAX_LISTED)
            ok = split == "train" or not both
            check(ok, f"{some}: both in train and in {split}; name other files")

    def version(self) -> Any:
        """Return a value that changes when the data does. No data is read."""
        return {split: list(at_once(stamp, files)) for split, files in self.files.items()}

    def tables(self, wanted: Collection[str], scratch: Path) -> dict[str, list[Table]]:
        """Open the tables of each split. Columnar formats read only the `wanted` columns.

        Files in S3 are copied to `scratch`.
        """
        return {
            split: [
                file_table(local_copy(file, scratch), str(file), self.cfg, wanted)
                for file in files
            ]
            for split, files in self.files.items()
        }


def of_new_rows(cfg: RecordsConfig, path: str) -> RecordsConfig:
    """Return the settings that read a file of new rows like the training data."""
    new = replace(cfg, path=path, train=None, validation=None, more_validation={}, format="auto")
    says_format = is_named(path) and not path.endswith(".json")
    if cfg.format in FILE_FORMATS and not says_format:
        new.format = cfg.format
    return new
