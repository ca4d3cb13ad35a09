"""Types shared by all sources of text (documents, parts of a corpus), and the files from which a corpus is read."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config import InputError, check, plural, shortlist
from train.data.files.errors import columns_shown, naming
from train.data.files.find import matching, walk
from train.storage.folders import local_path


@dataclass(frozen=True)
class Reading:
    """One reading of one corpus. A corpus of weight 3 is read three times."""

    corpus: int = 0  # index of the corpus in the settings
    copy: int = 0  # number of earlier readings of the corpus
    is_validation: bool = False  # True for corpus.validation


ONCE = Reading()
OF_VALIDATION = Reading(is_validation=True)


def readings(weights: list[int] | None, sources: list[str]) -> list[Reading]:
    """Return the readings of each corpus according to corpus.weights. Raises InputError unless each has a weight."""
    given = weights or [1] * len(sources)
    check(
        len(given) == len(sources),
        f"corpus.weights={weights} has {len(given)} numbers, but {len(sources)} corpora are given: "
        f"{shortlist(sources)}; set one for each",
    )
    found = []
    for number, weight in enumerate(given):
        found += [Reading(number, copy) for copy in range(weight)]
    return found


@dataclass(frozen=True)
class Document:
    text: str  # stripped, not empty, lines end in \n
    source_bytes: int  # input consumed since the previous document, for progress
    reading: Reading = ONCE


@dataclass(frozen=True)
class CorpusPart:
    """One of `count` parts of a corpus. `index` counts from 0; in settings and messages, parts are counted from 1."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> CorpusPart:
        """Parse a text such as "3/64". PrepareConfig must have checked it."""
        number, count = map(int, text.split("/"))
        return cls(number - 1, count)

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    def span(self, total: int) -> tuple[int, int]:
        """Return this part's range [first, last) of `total` items. Each item is in exactly one part."""
        return total * self.index // self.count, total * (self.index + 1) // self.count

    def divided(self, count: int) -> list[CorpusPart]:
        """Divide this part into `count` smaller ones."""
        return [
            CorpusPart(self.index * count + index, self.count * count) for index in range(count)
        ]


WHOLE = CorpusPart()


def clean(text: str) -> str:
    if "\r" in text:
        text = re.sub(r"\r\n?", "\n", text)
    return text.strip()


def check_column(column: str, columns: Iterable[str], where: str) -> None:
    if column not in columns:
        raise InputError(f"{where}: no column={column}; the columns are: {columns_shown(columns)}")


def text_of(row: dict[str, Any], column: str, where: str) -> str:
    check_column(column, row, where)
    value = row[column]
    if not isinstance(value, str):
        raise InputError(
            f"{where}: column {column} holds {str(value)[:40]} ({type(value).__name__}), not a string"
        )
    return value


def find_files(location: str, suffixes: tuple[str, ...], key: str = "corpus.path") -> list[Path]:
    """Return the files at a location: a file, a folder's files with a suffix (.gz may follow), or a glob's matches.

    Raises InputError if there are none. `key`: the setting that names the location.
    """
    path = local_path(location)
    hint = ""
    with naming(f"{key}={location} cannot be read", (OSError,)):
        if path.is_dir():
            found = [(item, item.name.lower().removesuffix(".gz")) for item in walk(path)]
            paths = [item for item, name in found if name.endswith(suffixes)]
            hint = f" that ends in {', '.join(suffixes)} or one of these and .gz"
        elif path.is_file():
            paths = [path]
        else:
            paths = matching(str(path))
    check(bool(paths), f"{key}={location} matches no file{hint}; name a file, a folder or a glob")
    return paths


def files_line(location: str, paths: Iterable[Path]) -> str:
    """Return a line on how many files are read at a location, and how many of a folder's are left out, by ending."""
    read = set(paths)
    line = f"{location}: {plural(len(read), 'file')} to read"
    folder = local_path(location)
    if not folder.is_dir():
        return line
    others = [path for path in walk(folder) if path not in read]
    if not others:
        return line
    endings = Counter(Path(path.name.removesuffix(".gz")).suffix or "no ending" for path in others)
    counts = shortlist(f"{count} with {ending}" for ending, count in endings.most_common())
    return f"{line}; {plural(len(others), 'file')} left out ({counts})"


def listing(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Return the name, size and mtime (ns) of each file. Names are relative, so a moved corpus has the same list."""
    if paths:
        root = os.path.commonpath([path.parent for path in paths])
    else:
        root = ""
    rows = []
    for path in paths:
        check(path.is_file(), f"{path} is not a regular file, or is a broken link; remove it")
        check(os.access(path, os.R_OK), f"{path} cannot be read: permission denied")
        stat = path.stat()
        rows.append((path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns))
    return rows
