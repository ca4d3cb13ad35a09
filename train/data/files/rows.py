"""Readers of rows, one per format: CSV, JSON lines and Parquet. A row that cannot be read becomes a BadRow."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.config import InputError, check, plural, shortlist
from train.data.files.errors import LIBRARY_ERRORS, BadRow, delimiter_hint, naming, unreadable

Values = dict[str, Any] | BadRow  # a row's values by column, or why it is bad
Records = Iterator[tuple[int, list[str] | BadRow]]  # first line number and fields of each record

BATCH_ROWS = 256  # Parquet rows decoded together
# read at a time of a Parquet file; by default, pyarrow reads whole row groups
BUFFER_BYTES = 2**20
SECOND_HEADER = "a second header, as if files had been joined: join them by the names of columns"
QUOTES = "quote fields that contain commas, quotes or line ends, and double the quotes in them"


def json_rows(
    lines: Iterable[str], encoding: str, settings: str = "data.encoding"
) -> Iterator[tuple[int, Values]]:
    """Yield the line number and the JSON object of each line that is not blank. `settings`: see `unreadable`."""
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            yield number, unreadable(line, encoding, settings) or json_object(line)


def json_object(line: str) -> Values:
    row = json_value(line)
    if isinstance(row, dict | BadRow):
        return row
    return BadRow(f"not a JSON object on one line but a {type(row).__name__}")


def json_value(line: str) -> Any:
    """Return the JSON value in a line, or a BadRow."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(f"not a JSON object on one line: {error}")


def holds_objects(value: Any) -> bool:
    """Return whether a JSON value is a list of objects, as rows are."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def csv_dialect(delimiter: str, quotes: str) -> dict[str, Any]:
    """Return arguments for `csv.reader`. `quotes`: "doubled", "escaped" (by a backslash) or "none" (they are text)."""
    # With "strict", a quote that is never closed is an error, and so is text after a closing quote.
    dialect: dict[str, Any] = {"delimiter": delimiter, "strict": True}
    if quotes == "none":
        dialect |= {"quotechar": None, "quoting": csv.QUOTE_NONE}
    if quotes == "escaped":
        dialect["escapechar"] = "\\"
    return dialect


COMMAS = csv_dialect(",", "doubled")


def csv_rows(
    lines: Iterator[str],
    name: str,
    encoding: str,
    settings: str = "data.encoding",
    *,
    header: bool = True,
    max_field_chars: int,
    dialect: dict[str, Any] = COMMAS,
) -> tuple[list[str] | None, Iterator[tuple[int, Values]]]:
    """Return the column names in the header, and an iterator over the first line number and the values of each row.

    `name`: the file's name in errors; `settings`: see `unreadable`; `dialect`: from `csv_dialect`. Without a header,
    the returned names are None, and rows use 0, 1, ... as names. Raises InputError if the header cannot be used.
    """
    records = csv_records(lines, name, dialect, max_field_chars)
    names: list[str] | None = None
    if header:
        names = header_of(records, name, encoding, settings)

    def rows() -> Iterator[tuple[int, Values]]:
        columns = names or []
        again = sorted(folded(columns))
        for line, fields in records:
            if isinstance(fields, BadRow):
                yield line, fields
                continue
            columns = columns or [str(number) for number in range(len(fields))]
            bad = unreadable("".join(fields), encoding, settings)
            if bad is None and len(fields) != len(columns):
                first = "header" if header else "first row"
                found = plural(len(fields), "field")
                hint = delimiter_hint(columns)
                bad = BadRow(f"{found} where the {first} has {len(columns)}{hint}")
            if bad is None and len(again) > 1:
                is_header = sorted(folded(fields)) == again
                check(not is_header, f"{name}:{line}: {SECOND_HEADER}")
            yield line, bad or dict(zip(columns, fields, strict=True))

    return names, rows()


def header_of(records: Records, name: str, encoding: str, settings: str) -> list[str]:
    """Return the fields of the first record. Raises InputError if they cannot be the names of columns."""
    line, names = next(records, (1, []))
    if isinstance(names, BadRow):
        raise InputError(f"{name}:{line}: no header: {names}")
    bad = unreadable("".join(names), encoding, settings)
    check(bad is None, f"{name}:{line}: no header: {bad}")
    counts = Counter(filter(None, names))
    twice = sorted(column for column, times in counts.items() if times > 1)
    check(not twice, f"{name}:{line}: two columns are named {shortlist(twice)}; rename one")
    return names


def folded(names: list[str]) -> list[str]:
    return [name.strip("\ufeff \t").casefold() for name in names]


def csv_records(
    lines: Iterator[str], name: str, dialect: dict[str, Any], max_field_chars: int
) -> Records:
    """Yield each record's first line number and fields. Raises InputError if a quote is never closed."""
    csv.field_size_limit(max_field_chars)
    reader = csv.reader(lines, **dialect)
    while True:
        first_line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"not CSV: {error}"
            if str(error).startswith("field larger"):
                reason = f"a field of more than {max_field_chars:,} characters"
            is_open = reader.line_num > first_line or str(error) == "unexpected end of data"
            check(
                not is_open,
                f"{name}:{first_line}: {reason}: the field's quote is not closed; {QUOTES}",
            )
            yield first_line, BadRow(reason)
        else:
            if fields:
                yield first_line, fields


@contextmanager
def open_parquet(path: Path, name: object = None) -> Iterator[Any]:
    """Open a pyarrow.parquet.ParquetFile. Raises InputError if opening it, or reading it in the `with` block, fails."""
    import pyarrow.parquet  # imported here: importing is slow, and few runs need it

    errors = (*LIBRARY_ERRORS, pyarrow.ArrowException)
    with (
        naming(f"{name or path} cannot be read as Parquet", errors),
        pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES) as file,
    ):
        yield file
