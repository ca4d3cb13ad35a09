"""Common parts of all sources of text: documents, parts of a corpus, and the files that a corpus is read from."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from train.config import InputError, check, shortlist
from train.data.files.errors import listed, naming
from train.data.files.find import matching, walk
from train.data.random_bits import text_uniform
from train.system.folders import local_path

WEIGHT_SEED = -1  # no seed of the settings, so that weights and validation choose by different hashes


@dataclass(frozen=True)
class Reading:
    """One of the times that one of several corpora is read."""

    corpus: int = 0  # in the order of the settings
    copy: int = 0  # the readings of the corpus before this one
    weight: float = 1.0  # of the corpus
    is_validation: bool = False  # of corpus.validation

    def has(self, text: str) -> bool:
        """Return whether a document of the corpus is read: the last reading may be of only a share."""
        left = self.weight - self.copy
        return left >= 1 or text_uniform(text, WEIGHT_SEED)[0] < left


ONCE, OF_VALIDATION = Reading(), Reading(is_validation=True)


def readings(weights: list[float] | None, sources: list[str]) -> list[Reading]:
    """Return the readings of each corpus by corpus.weights. Raises InputError unless each has a weight."""
    given = weights or [1.0] * len(sources)
    has = f"corpus.weights={weights} has {len(given)} numbers, and {len(sources)} corpora are given"
    check(len(given) == len(sources), f"{has}: {shortlist(sources)}; give a number for each")
    return [Reading(number, copy, each) for number, each in enumerate(given) for copy in range(ceil(each))]


@dataclass(frozen=True)
class Document:
    text: str  # stripped, not empty, lines end in \n
    source_bytes: int  # input consumed since the previous document, for progress
    reading: Reading = ONCE


@dataclass(frozen=True)
class CorpusPart:
    """One of `count` parts of a corpus; `index` counts from 0, users count from 1."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> CorpusPart:
        """Return the part that "3/64" means; PrepareConfig has checked the text."""
        number, count = map(int, text.split("/"))
        return cls(number - 1, count)

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    def span(self, total: int) -> tuple[int, int]:
        """Return the range [first, last) of `total` things that are this part's. Each is in one part."""
        return total * self.index // self.count, total * (self.index + 1) // self.count

    def divided(self, count: int) -> list[CorpusPart]:
        """Divide this part into `count` smaller ones."""
        return [CorpusPart(self.index * count + index, self.count * count) for index in range(count)]


WHOLE = CorpusPart()


def clean(text: str) -> str:
    return (re.sub(r"\r\n?", "\n", text) if "\r" in text else text).strip()


def check_column(column: str, columns: Iterable[str], where: str) -> None:
    if column not in columns:
        raise InputError(f"{where}: no column={column}; the columns are: {listed(columns, column)}")


def text_of(row: dict[str, Any], column: str, where: str) -> str:
    check_column(column, row, where)
    value = row[column]
    if not isinstance(value, str):
        raise InputError(f"{where}: column {column} holds {str(value)[:40]} ({type(value).__name__}), not a string")
    return value


def find_files(location: str, suffixes: tuple[str, ...], key: str = "corpus.path") -> list[Path]:
    """Return a file, the files of a folder with one of the suffixes (.gz may follow), or a glob's matches."""
    path = local_path(location)
    hint = ""
    with naming(f"{key}={location} cannot be read", (OSError,)):
        if path.is_dir():
            paths = [item for item in walk(path) if item.name.lower().removesuffix(".gz").endswith(suffixes)]
            hint = f" that ends in {', '.join(suffixes)} or one of these and .gz"
        elif path.is_file():
            paths = [path]
        else:
            paths = matching(str(path))
    check(bool(paths), f"{key}={location} matches no file{hint}; give a file, a folder or a glob")
    return paths


def listing(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Return name, size and time (ns) of each file, named from the common folder: a moved corpus is the same."""
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    rows = []
    for path in paths:
        check(path.is_file(), f"{path} is not a regular file, or a link to nowhere; remove it")
        check(os.access(path, os.R_OK), f"{path} cannot be read: permission denied")
        rows.append((path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns))
    return rows
