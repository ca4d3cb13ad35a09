"""Readers of rows, one per format: CSV, JSON lines and Parquet. A row that cannot be read becomes a BadRow."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.config import InputError, check, plural, shortlist
from train.data.files.errors import LIBRARY_ERRORS, BadRow, delimiter_hint, naming, unreadable

Values = dict[str, Any] | BadRow  # a row's values by column, or why it is bad

BATCH_ROWS = 256  # Parquet rows decoded together
# bytes of a Parquet file read at a time; without a buffer, pyarrow reads whole row groups
BUFFER_BYTES = 2**20


def json_rows(
    lines: Iterable[str], encoding: str, settings: str = "data.encoding"
) -> Iterator[tuple[int, Values]]:
    """Yield the line number and the JSON object of each line that is not blank. `settings`: see `unreadable`."""
    for number, line in enumerate(lines, 1):
        if not line.isspace():
            yield number, unreadable(line, encoding, settings) or json_object(line)


def json_object(line: str) -> Values:
    row = json_value(line)
    is_row = isinstance(row, dict | BadRow)
    return row if is_row else BadRow(f"not a JSON object on one line but a {type(row).__name__}")


def json_value(line: str) -> Any:
    """Return the JSON value in a line, or a BadRow."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return BadRow(f"not a JSON object on one line: {error}")


def holds_objects(value: Any) -> bool:
    """Return whether a JSON value is a list of objects, as rows are."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def csv_dialect(
    delimiter: str = ",", quote: str | None = '"', escape: str | None = None
) -> dict[str, Any]:
    """Return arguments for `csv.reader`. `quote` None: quotes are plain text; `escape` None: quotes are doubled."""
    # With "strict", a quote that is never closed is an error, and so is text after a closing quote.
    quoting = csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL
    return {
        "delimiter": delimiter,
        "quotechar": quote,
        "escapechar": escape,
        "quoting": quoting,
        "strict": True,
    }


COMMAS = csv_dialect()
QUOTES = "quote fields that contain commas, quotes or line ends, and double the quotes in them"


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
    records = csv_records(lines, name, dialect, max_field_chars=max_field_chars)
    names: list[str] | None = None
    if header:
        line, fields = next(records, (1, []))
        broken = (
            fields
            if isinstance(fields, BadRow)
            else unreadable("".join(fields), encoding, settings)
        )
        if broken is not None or isinstance(fields, BadRow):
            raise InputError(f"{name}:{line}: no header: {broken}")
        names = fields
        twice = sorted({name for name in names if name and names.count(name) > 1})
        check(not twice, f"{name}:{line}: two columns are named {shortlist(twice)}; rename one")

    def rows() -> Iterator[tuple[int, Values]]:
        columns, first = names, "header" if header else "first row"
        for line, fields in records:
            if isinstance(fields, BadRow):
                yield line, fields
            elif broken := unreadable("".join(fields), encoding, settings):
                yield line, broken
            else:
                columns = columns or [str(number) for number in range(len(fields))]
                fits = len(fields) == len(columns)
                wrong = f"{plural(len(fields), 'field')} where the {first} has {len(columns)}{delimiter_hint(columns)}"
                if header and is_header(fields, columns):
                    same = f"{name}:{line}: a second header, whose columns are in another order: join by names"
                    check(folded(fields) == folded(columns), same)
                    fits, wrong = (
                        False,
                        "the header again, as if files had been joined; remove this line",
                    )
                yield line, dict(zip(columns, fields, strict=True)) if fits else BadRow(wrong)

    return names, rows()


def is_header(fields: list[str], columns: list[str]) -> bool:
    """Return whether fields are the names of the columns, in any order and in capitals or not."""
    return len(fields) == len(columns) and sorted(folded(fields)) == sorted(folded(columns))


def folded(names: list[str]) -> list[str]:
    return [name.strip("\ufeff \t").casefold() for name in names]


def csv_records(
    lines: Iterator[str], name: str, dialect: dict[str, Any], *, max_field_chars: int
) -> Iterator[tuple[int, list[str] | BadRow]]:
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
            if str(error).startswith("field larger"):
                limit = f"a field of more than {max_field_chars:,} characters"
                check(
                    reader.line_num == first_line,
                    f"{name}:{first_line}: {limit}, or an unclosed quote; {QUOTES}",
                )
                yield first_line, BadRow(limit)
                continue
            is_open = reader.line_num > first_line or str(error) == "unexpected end of data"
            check(
                not is_open,
                f"{name}:{first_line}: not CSV: {error}: the field's quote is not closed; {QUOTES}",
            )
            yield first_line, BadRow(f"not CSV: {error}")
        else:
            if fields:
                yield first_line, fields


@contextmanager
def open_parquet(path: Path, name: object = None) -> Iterator[Any]:
    """Open a pyarrow.parquet.ParquetFile. Raises InputError if opening it, or reading it in the `with` block, fails."""
    import pyarrow.parquet  # imported here: importing is slow, and few runs need it

    with (
        naming(
            f"{name or path} cannot be read as Parquet", (*LIBRARY_ERRORS, pyarrow.ArrowException)
        ),
        pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES) as file,
    ):
        yield file
