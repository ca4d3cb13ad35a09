"""Rows of CSV and TSV files in the dialect that the settings choose, with a warning if data.quote looks wrong."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from train.config import RecordsConfig, check
from train.data.files.errors import BadRow
from train.data.files.rows import Values, csv_dialect, csv_rows

logger = logging.getLogger("train")

MAX_FIELD_CHARS = 2**20  # maximum; limits what an unclosed quote can swallow
QUOTED = re.compile(r'"[^"]*"')
# a field with this many line ends may be several rows that a quotation mark swallowed
FEW_LINES = 5


@dataclass
class Lines:
    """A count of the lines read so far from a file, not counting blank lines and the header."""

    count: int = 0

    def counted(self, text: Iterable[str], header: int) -> Iterator[str]:
        self.count = -header
        for line in text:
            self.count += not line.isspace()
            yield line


def csv_lines(text: Iterator[str], name: str, cfg: RecordsConfig) -> Iterator[tuple[int, Values]]:
    """Yield each row with its line number. By default, a .tsv has tabs. Raises InputError if cfg is inconsistent."""
    is_tsv = name.lower().removesuffix(".gz").endswith(".tsv")
    delimiter = "\t" if is_tsv and cfg.delimiter == "," else cfg.delimiter
    quote = cfg.quote
    if quote == "auto":
        quote = None if delimiter == "\t" else '"'
    marks = [mark for mark in (delimiter, quote, cfg.escape) if mark is not None]
    usable = len(set(marks)) == len(marks) and not set(marks) & set("\r\n")
    check(
        usable,
        f"data.delimiter, data.quote and data.escape are {marks}: they must differ, and cannot be line ends",
    )
    dialect = csv_dialect(delimiter, quote, cfg.escape)
    rows = csv_rows(
        text,
        name,
        cfg.encoding,
        header=cfg.header,
        max_field_chars=MAX_FIELD_CHARS,
        dialect=dialect,
    )[1]
    return report_quotes(rows, name, delimiter, quote)


def report_quotes(
    rows: Iterable[tuple[int, Values]], name: str, delimiter: str, quote: str | None
) -> Iterator[tuple[int, Values]]:
    """Yield the rows, then log the first one that suggests that data.quote is wrong."""
    first, others = "", 0
    for number, values in rows:
        yield number, values
        fields = [] if isinstance(values, BadRow) else list(values.values())
        if quote is None:
            strange = any(map(is_quoted, fields)) or (
                bool(fields) and all(map(QUOTED.fullmatch, fields))
            )
        else:
            strange = any(
                "\n" in field and holds_rows(field, delimiter, len(fields)) for field in fields
            )
        if strange:
            others += bool(first)
            first = first or f"{name}:{number}"
    if first and quote is None:
        logger.warning(
            "%s and %d more rows: quotation marks around fields are kept; data.quote='\"' removes them",
            first,
            others,
        )
    elif first:
        hint = (
            "if a quotation mark there is plain text, it has swallowed rows: set data.quote=null"
        )
        logger.warning(
            "%s and %d more rows: a field has lines that look like rows, or very many lines; %s",
            first,
            others,
            hint,
        )


def is_quoted(field: str) -> bool:
    """Return whether a field looks quoted by a CSV writer: it contains quotation marks, and all inside are doubled."""
    inner = field[1:-1]
    return (
        len(field) > 1
        and field[0] == field[-1] == '"'
        and '""' in inner
        and '"' not in inner.replace('""', "")
    )


def holds_rows(field: str, delimiter: str, num_columns: int) -> bool:
    """Return whether a field has many lines, or a line with the same number of delimiters as a row."""
    *lines, _ = field.split("\n")
    return len(lines) >= FEW_LINES or any(
        line.count(delimiter) == num_columns - 1 > 0 for line in lines
    )
