"""Labelled rows as tables, from CSV, JSON lines, Parquet, SQuAD and CoNLL files and data sets of the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import ColumnsConfig, InputError, RecordsConfig, check, plural
from train.config.data import FILE_FORMATS, SUFFIXES
from train.data.files.errors import LIBRARY_ERRORS, BadRow, naming
from train.data.files.rows import (
    BATCH_ROWS,
    Values,
    csv_dialect,
    csv_rows,
    holds_objects,
    json_rows,
    json_value,
    open_parquet,
)
from train.data.files.text import bounded_lines, bounded_text, line_end_of, open_text, start_of
from train.data.records.conll import conll_rows
from train.data.records.row import holds
from train.data.records.squad import is_squad, squad_rows
from train.storage.foreign import open_inside

if TYPE_CHECKING:
    import datasets
    import pyarrow

PARQUET_START = b"PAR1"
MAX_FIELD_CHARS = 2**20  # maximum in CSV; limits what an unclosed quote can swallow

LocatedRow = tuple[str, Values]  # the location of a row, such as file.csv:17, and its values
Read = Callable[[], Iterator[LocatedRow]]


@dataclass
class Lines:
    """A count of the lines of CSV read so far from a file, not counting blank lines and the header."""

    count: int = 0

    def counted(self, text: Iterable[str], header: int) -> Iterator[str]:
        self.count = -header
        for line in text:
            self.count += not line.isspace()
            yield line


@dataclass(frozen=True)
class Table:
    """The rows of one file or split, in order. Each call of `rows` starts over. Few rows are in memory at a time."""

    where: str  # the file or split, as errors name it
    rows: Read
    columns: list[str] | None = None  # None: the columns of the first rows
    # The names of labels by column, whose numbers index them.
    class_names: dict[str, list[str]] = field(default_factory=dict)
    keys: ColumnsConfig | None = None  # replaces data.columns if the format has fixed column names
    lines: Lines = field(default_factory=Lines)

    def names_of(self, column: str | tuple[str, ...]) -> Sequence[str] | None:
        """Return the labels that a column's numbers stand for, if known; for several columns, the columns' names."""
        if isinstance(column, tuple):
            return column
        return self.class_names.get(column)


# ---- files of text ---------------------------------------------------------------------------------------------------


def file_table(path: Path, name: str, cfg: RecordsConfig, wanted: Collection[str]) -> Table:
    """Return the table of one file, of which columnar formats read only the `wanted` columns. Errors call it `name`."""
    form = format_of(path, name, cfg)
    if form == "parquet":
        return parquet_table(path, name, wanted)
    start = start_of(path, cfg.encoding)
    if form == "squad":
        read = partial(read_document, path, name, cfg.encoding)
        return Table(name, lambda: squad_rows(read(), name), keys=ColumnsConfig(id="id"))
    if form == "jsonl" and is_document(start):
        return Table(name, partial(document_rows, path, name, cfg.encoding))
    lines = Lines()
    readers: dict[str, Callable[[Iterator[str]], Iterator[tuple[int, Values]]]] = {
        "csv": lambda text: rows_of_csv(lines.counted(text, int(cfg.header)), name, cfg),
        "conll": lambda text: conll_rows(text, name, cfg.encoding, cfg.columns),
        "jsonl": lambda text: json_rows(text, cfg.encoding),
    }

    def rows() -> Iterator[LocatedRow]:
        with open_text(path, cfg.encoding, newline=line_end_of(start)) as (file, _):
            for number, row in readers[form](bounded_lines(file, name)):
                yield f"{name}:{number}", row

    if form == "conll":
        keys = ColumnsConfig()
    else:
        keys = None
    return Table(name, rows, keys=keys, lines=lines)


def rows_of_csv(
    text: Iterator[str], name: str, cfg: RecordsConfig
) -> Iterator[tuple[int, Values]]:
    """Yield each row with its line number, in the dialect of the settings. By default, a .tsv has tabs."""
    delimiter, quotes = cfg.delimiter, cfg.quotes
    if delimiter == "," and name.lower().removesuffix(".gz").endswith(".tsv"):
        delimiter = "\t"
    if quotes == "auto" and delimiter == "\t":
        quotes = "none"
    dialect = csv_dialect(delimiter, quotes)
    options: dict[str, Any] = {"header": cfg.header, "max_field_chars": MAX_FIELD_CHARS}
    return csv_rows(text, name, cfg.encoding, dialect=dialect, **options)[1]


def format_of(path: Path, name: str, cfg: RecordsConfig) -> str:
    """Return a file's format, one of FILE_FORMATS. `data.format`, the suffix or, for .json, the content decides."""
    # Parquet is recognised whatever the settings are: read as text, it would have no rows.
    check(
        path.is_file(), f"{name} is no regular file (a pipe can be read only once): save it as one"
    )
    with naming(f"{name} cannot be read", (OSError,)), open_inside(path) as file:
        if file.read(len(PARQUET_START)) == PARQUET_START:
            return "parquet"
    if cfg.format in FILE_FORMATS:
        return cfg.format
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    known = f"set data.format to one of: {', '.join(FILE_FORMATS)}"
    check(suffix in SUFFIXES, f"{name}: the name does not say the format; {known}")
    if suffix == ".json" and is_squad(start_of(path, cfg.encoding)):
        return "squad"
    return {".tsv": "csv", ".json": "jsonl"}.get(suffix, suffix[1:])


# ---- JSON that fills a file ------------------------------------------------------------------------------------------


def is_document(start: str) -> bool:
    """Return whether a file that begins so is one JSON value, such as a list of rows, and has no row per line."""
    first, *more = start.strip().splitlines() or [""]
    if first.startswith("["):
        return not more or isinstance(json_value(first), BadRow)
    is_open = first.rstrip().endswith(("{", "[", ",", ":"))
    return bool(more) and first.startswith("{") and is_open


def read_document(path: Path, name: str, encoding: str) -> Any:
    """Return a JSON value that fills a file. Raises InputError if the file is too long, or is not JSON."""
    cure = "split its list into several files in one folder, or write JSON lines"
    with open_text(path, encoding) as (text, _):
        content = bounded_text(text, name, cure)
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: not JSON: {error.msg}") from error
    except RecursionError:
        raise InputError(f"{name}: not JSON: it is nested too deeply") from None


def document_rows(path: Path, name: str, encoding: str) -> Iterator[LocatedRow]:
    """Yield the rows of a file that is one JSON list of objects, or one object with such a list in it."""
    document = read_document(path, name, encoding)
    lists = [document]
    if isinstance(document, dict):
        lists = list(filter(holds_objects, document.values()))
    cure = "write one row per line, as jq -c does, or pandas' to_json(FILE, orient='records', lines=True)"
    found = f"one JSON object, with {plural(len(lists), 'list')} of rows"
    check(len(lists) == 1, f"{name}: {found}; {cure}")
    for number, row in enumerate(lists[0], 1):
        if not isinstance(row, dict):
            row = BadRow(f"{row!r:.40} where an object should be")
        yield f"{name}, row {number}", row


# ---- columns of Arrow ------------------------------------------------------------------------------------------------


def parquet_table(path: Path, name: str, wanted: Collection[str]) -> Table:
    """Return the table of a Parquet file, with the names of labels if `datasets` wrote them into the file."""
    with open_parquet(path, name) as file:
        schema = file.schema_arrow
        names = present(wanted, schema.names)
        labels = {}
        if names:
            labels = class_names_in(schema, names)

    def rows() -> Iterator[LocatedRow]:
        with open_parquet(path, name) as file:
            yield from numbered(file.iter_batches(BATCH_ROWS, columns=names), name)

    return Table(name, rows, schema.names, labels)


def dataset_table(dataset: datasets.Dataset, where: str, wanted: Collection[str]) -> Table:
    columns = list(dataset.column_names)

    def rows() -> Iterator[LocatedRow]:
        with naming(f"{where} cannot be read completely", LIBRARY_ERRORS):
            arrow = dataset.select_columns(present(wanted, columns)).with_format("arrow")
            yield from numbered(arrow.iter(BATCH_ROWS), where)

    return Table(where, rows, columns, class_names(dataset.features))


def present(wanted: Collection[str], columns: list[str]) -> list[str]:
    """Return the columns of a table that are wanted; a wanted name with a dot means the column before the dot."""
    return [name for name in columns if any(holds([name], item) for item in wanted)]


def class_names_in(schema: pyarrow.Schema, columns: Collection[str]) -> dict[str, list[str]]:
    """Return the names of labels in these columns of a schema, which `datasets` may have written into it."""
    import datasets  # imported here: the first rows of a file are looked at without it
    import pyarrow

    # Other columns may have types that `datasets` lacks.
    read = pyarrow.schema([field for field in schema if field.name in columns], schema.metadata)
    return class_names(datasets.Features.from_arrow_schema(read))


def class_names(features: Mapping[str, Any]) -> dict[str, list[str]]:
    import datasets

    names = {}
    for column, kind in features.items():
        kind = getattr(kind, "feature", kind)  # of a list, the type of its items
        if isinstance(kind, datasets.ClassLabel):
            names[column] = kind.names
    return names


def numbered(batches: Any, where: str) -> Iterator[LocatedRow]:
    number = 0
    for batch in batches:
        # Arrow does not check offsets while it reads, and a wrong one ends the process.
        batch.validate(full=True)
        for row in batch.to_pylist():
            number += 1
            yield f"{where}, row {number}", row
