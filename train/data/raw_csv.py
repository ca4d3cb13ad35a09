"""Labelled rows of CSV and TSV files, in the dialect that the settings describe. See raw.py."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config import InputError, RecordsConfig, check
from train.data.raw_files import BadRow, Found, Table, text_lines, unreadable

MAX_FIELD_CHARS = 2**20  # of a field; an open quote swallows no more than this


def csv_table(path: Path, cfg: RecordsConfig) -> Table:
    """A file whose rows are named by the line that they begin on. Names that end in .tsv have tabs by themselves."""
    is_tsv = path.name.lower().removesuffix(".gz").endswith(".tsv")
    return Table(str(path), lambda: csv_rows(path, cfg, "\t" if is_tsv and cfg.delimiter == "," else cfg.delimiter))


def csv_rows(path: Path, cfg: RecordsConfig, delimiter: str) -> Iterator[Found]:
    quoting = csv.QUOTE_NONE if cfg.quote is None else csv.QUOTE_MINIMAL
    marks = [mark for mark in (delimiter, cfg.quote, cfg.escape) if mark is not None]
    usable = len(set(marks)) == len(marks) and not set(marks) & set("\r\n")
    check(usable, f"data.delimiter, data.quote and data.escape are {marks}: they must differ, and be no line ends")
    dialect = {"delimiter": delimiter, "quoting": quoting, "quotechar": cfg.quote, "escapechar": cfg.escape}
    with text_lines(path, cfg.encoding) as lines:
        names: list[str] | None = None
        for line, fields in records(lines, dialect):
            place = f"{path}:{line}"
            broken = fields if isinstance(fields, BadRow) else unreadable("".join(fields), cfg.encoding)
            if names is None and cfg.header:
                if broken is not None or isinstance(fields, BadRow):
                    raise InputError(f"{place}: no header: {broken}")
                names = fields
                twice = sorted({name for name in names if name and names.count(name) > 1})
                check(not twice, f"{place}: two columns are named {', '.join(twice)}; rename one")
            elif broken is not None or isinstance(fields, BadRow):
                yield place, broken or BadRow("")
            else:
                names = names or [str(number) for number in range(len(fields))]
                yield place, named(fields, names, cfg.header)


def named(fields: list[str], names: list[str], header: bool) -> dict[str, Any] | BadRow:
    if len(fields) == len(names):
        return dict(zip(names, fields, strict=True))
    return BadRow(f"{len(fields)} fields where the {'header' if header else 'first row'} has {len(names)}")


class Feed:
    """Lines for csv.reader, with those of the record that it is in, to go back to."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.lines = lines
        self.waiting: deque[str] = deque()
        self.record: list[str] = []
        self.number = 0  # of the last line given, from 1 on

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.waiting.popleft() if self.waiting else next(self.lines)
        self.record.append(line)
        self.number += 1
        return line

    def back(self) -> None:
        """The second line of the record comes next: an open quote takes one row along, not all that follow."""
        self.waiting.extendleft(reversed(self.record[1:]))
        self.number -= len(self.record) - 1


def records(lines: Iterator[str], dialect: dict[str, Any]) -> Iterator[tuple[int, list[str] | BadRow]]:
    """Number of the first line of each record, and its fields. Blank lines are none."""
    csv.field_size_limit(MAX_FIELD_CHARS)
    feed = Feed(lines)
    reader = csv.reader(feed, strict=True, **dialect)  # strict: a quote that stays open or ends early is an error
    while True:
        feed.record = []
        first = feed.number + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield first, BadRow(f"not CSV: {error}")
            feed.back()
        else:
            if fields:
                yield first, fields
