"""The sources of labelled data that the library `datasets` reads, whose import takes half a second."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from train.config import InputError, RecordsConfig, S3Config, check
from train.data.files.data_sets import open_builder
from train.data.files.errors import LIBRARY_ERRORS
from train.data.records.formats import Table, dataset_table
from train.data.records.located import all_files, split_names, stamp
from train.data.records.saved import saved_splits
from train.storage.folders import at_once, is_s3, local_path
from train.storage.hub_access import asking_hub, why_missing


def named_tables(
    splits: dict[str, datasets.Dataset], cfg: RecordsConfig, wanted: Collection[str]
) -> dict[str, list[Table]]:
    tables = {}
    for split, name in split_names(cfg).items():
        where = f"data set {cfg.path}, split {name or split}"
        tables[split] = [dataset_table(splits[split], where, wanted)]
    return tables


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


LIBRARY_SOURCES: dict[str, type[SavedSource | HubSource]] = {
    "saved": SavedSource,
    "hub": HubSource,
}
