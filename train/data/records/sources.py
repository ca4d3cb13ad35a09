"""The location and version of labelled data: files on disk or in S3, a folder that save_to_disk wrote, or the Hub."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from train.config import EvaluatedConfig, InputError, RecordsConfig, S3Config, check, shortlist
from train.config.data import FILE_FORMATS, is_named
from train.data.files.data_sets import open_builder
from train.data.files.errors import LIBRARY_ERRORS
from train.data.records.formats import Table, dataset_table, file_table
from train.data.records.located import (
    MAX_LISTED,
    File,
    all_files,
    find,
    local_copy,
    stamp,
)
from train.data.records.saved import MARKS, saved_splits
from train.storage.folders import at_once, is_s3, local_path, sha256_json
from train.storage.hub_access import asking_hub, is_at_hub, why_missing

# These settings do not change which rows are read.
NOT_READING = ("path", "num_workers", "verify", "cache_dir", "lengths", "max_bad_rows")


def open_source(cfg: RecordsConfig, s3: S3Config) -> Source:
    """Return the source of the data. Raises InputError if files are missing, or in training and in validation."""
    return SOURCES[layout(cfg, s3)](cfg, s3)


def layout(cfg: RecordsConfig, s3: S3Config) -> str:
    """Return how `data.path` stores its splits, a key of SOURCES."""
    if cfg.format in FILE_FORMATS:
        return "files"
    if cfg.format != "auto":
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


def split_names(cfg: RecordsConfig) -> dict[str, str | None]:
    """Return each split's file, glob or name in the settings; None: the only file, or the split of the same name."""
    names: dict[str, str | None] = {}
    reads_train = not isinstance(cfg, EvaluatedConfig) or cfg.holds_out
    if reads_train:
        names["train"] = cfg.train
    if cfg.validation is not None or not reads_train:
        names["validation"] = cfg.validation
    return {**names, **cfg.more_validation}


def named_tables(
    splits: dict[str, datasets.Dataset], cfg: RecordsConfig, wanted: Collection[str]
) -> dict[str, list[Table]]:
    tables = {}
    for split, name in split_names(cfg).items():
        where = f"data set {cfg.path}, split {name or split}"
        tables[split] = [dataset_table(splits[split], where, wanted)]
    return tables


def readable_columns(source: Source, scratch: Path) -> list[str]:
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


@dataclass(frozen=True)
class SavedSource:
    """A folder on disk that save_to_disk wrote."""

    cfg: RecordsConfig
    s3: S3Config

    def version(self) -> Any:
        return list(at_once(stamp, all_files(self.cfg.path)))

    def tables(self, wanted: Collection[str], scratch: Path) -> dict[str, list[Table]]:
        path = self.cfg.path
        splits = saved_splits(local_path(path), path, split_names(self.cfg))
        return named_tables(splits, self.cfg, wanted)


@dataclass(frozen=True)
class HubSource:
    """A data set on the Hub, or a folder that is laid out like one, such as a cloned repository.

    A Hub data set is kept in the library's cache (HF_HOME), from which offline machines can read it. Nothing is cached
    there for a folder.
    """

    cfg: RecordsConfig
    s3: S3Config

    @property
    def is_folder(self) -> bool:
        return not is_s3(self.cfg.path) and local_path(self.cfg.path).is_dir()

    def version(self) -> Any:
        """Return the commit that `datasets` reports (offline: the commit in its cache), or the folder's files."""
        if self.is_folder:
            return list(at_once(stamp, all_files(self.cfg.path)))
        with self.naming():
            commit = open_builder(
                self.cfg.path, name=self.cfg.name, revision=self.cfg.revision
            ).hash
        none = "datasets reports no commit for it; set data.revision to a commit"
        check(isinstance(commit, str), f"data.path={self.cfg.path}: {none}")
        return commit

    def tables(self, wanted: Collection[str], scratch: Path) -> dict[str, list[Table]]:
        names = split_names(self.cfg)
        with self.naming():
            builder = self.prepared(scratch)
            splits = {
                split: builder.as_dataset(split=name or split) for split, name in names.items()
            }
        return named_tables(splits, self.cfg, wanted)

    def splits(self, scratch: Path) -> list[str]:
        """Return the names of all splits."""
        with self.naming():
            return list(self.prepared(scratch).info.splits)

    def prepared(self, scratch: Path) -> Any:
        where = {"path": self.cfg.path}
        if self.is_folder:
            where = {"path": str(local_path(self.cfg.path)), "cache_dir": str(scratch / "hub")}
        builder = open_builder(**where, name=self.cfg.name, revision=self.cfg.revision)
        builder.download_and_prepare()
        return builder

    @contextmanager
    def naming(self) -> Iterator[None]:
        path = self.cfg.path
        hint = "; without the Hub, use a file or folder: data.path=FOLDER"
        if self.is_folder:
            hint = ""
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        try:
            with asking_hub(path):
                yield
        except (*LIBRARY_ERRORS, DatasetsError) as error:
            reason = why_missing(path, error)
            raise InputError(f"data.path={path} cannot be read: {reason}{hint}") from error


Source = FileSource | SavedSource | HubSource
SOURCES: dict[str, type[Source]] = {
    "files": FileSource,
    "saved": SavedSource,
    "hub": HubSource,
}
