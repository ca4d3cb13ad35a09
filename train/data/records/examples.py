"""Examples from rows of any format: columns and labels mapped, texts and targets checked, bad rows counted."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from train.config import InputError, RecordsConfig, check, plural
from train.data.files.errors import BadRow, columns_shown
from train.data.files.rows import holds_objects
from train.data.records.content_checks import TableFacts, lines_in_rows
from train.data.records.formats import LocatedRow, Table
from train.data.records.labels import LabelNames, label_of_row
from train.data.records.row import Columns, Row, holds, names_in

if TYPE_CHECKING:
    from train.data.records.kinds import RowKind

logger = logging.getLogger("train")

MAX_NAMED, MAX_SHOWN = 10, 2  # maximum bad rows recorded per split, and shown in an error
COLUMN_ROWS = 100  # the keys of so many first JSON lines are the columns; a row may lack some


@dataclass
class Dropped:
    """Counts of a split's unused rows. `limit`: how many bad rows are allowed."""

    split: str
    limit: int
    bad_rows: int = 0
    bad_examples: list[str] = field(default_factory=list)
    left_out: int = 0  # rows whose label data.label_map maps to null

    def add(self, where: str, bad: BadRow) -> None:
        self.bad_rows += 1
        if len(self.bad_examples) < MAX_NAMED:
            self.bad_examples.append(f"{where}: {bad}")

    def check(self) -> None:
        """Raise InputError if there are more bad rows than allowed."""
        what = f"{self.split}: {plural(self.bad_rows, 'bad row')}"
        shown = "; ".join(self.bad_examples[:MAX_SHOWN])
        if self.bad_rows > MAX_SHOWN:
            shown += "; ..."
        allowed = f"more than data.max_bad_rows={self.limit} allows"
        check(self.bad_rows <= self.limit, f"{what}, {allowed}: {shown}")

    def facts(self) -> dict[str, Any]:
        return {
            "bad_rows": self.bad_rows,
            "bad_examples": self.bad_examples,
            "left_out": self.left_out,
        }


def learnt_examples(
    tables: Iterable[Table],
    cfg: RecordsConfig,
    kind: RowKind,
    labels: LabelNames,
    dropped: Dropped,
) -> Iterator[dict[str, Any]]:
    """Yield each row with the columns of `kind`. Labels are names. Unusable rows are counted in `dropped`.

    Raises InputError if a column is missing.
    """
    ids: set[str] = set()
    for number, (where, values) in enumerate(rows_of(tables, cfg, kind, labels.facts)):
        try:
            row = usable(values)
            example = texts_of(row, number, kind)
            if kind.read_target is None:
                target = label_of_row(row, example, kind, labels)
            else:
                target = kind.read_target(row.value(kind.target), example, True)
            name = example["id"]
            if kind.has_unique_ids and name in ids:
                raise BadRow(f"an earlier row also has the id {name:.40}; ids must differ")
        except BadRow as bad:
            dropped.add(where, bad)
            continue
        if kind.has_unique_ids:
            ids.add(name)
        if target is None:
            dropped.left_out += 1
        else:
            yield {**example, kind.target: target}


def new_examples(
    tables: Iterable[Table],
    cfg: RecordsConfig,
    kind: RowKind,
    labels: LabelNames,
    named: Collection[str],
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each row with the columns of `kind`, and with those of the data. An unknown label is None.

    The data may lack the target unless its key is in `named`. Raises InputError if another column is missing, or if a
    row is bad.
    """
    optional = {kind.target} - set(named)
    rows = rows_of(tables, cfg, kind, labels.facts, optional)
    for number, (where, values) in enumerate(rows):
        try:
            row = usable(values)
            example = texts_of(row, number, kind)
            if row.has(kind.target):
                example |= known_target(row, example, kind, labels)
        except BadRow as bad:
            raise InputError(f"{where}: {bad}") from None
        yield example, row.values
    said = lines_in_rows(labels.facts)
    if said is not None:
        logger.warning(said)


def rows_of(
    tables: Iterable[Table],
    cfg: RecordsConfig,
    kind: RowKind,
    facts: TableFacts,
    optional: Collection[str] = (),
) -> Iterator[tuple[str, Row | BadRow]]:
    """Yield the location of each row, and the row. Its lines and the rows are counted in `facts`.

    Raises InputError if the column of a key is missing that is not in `optional`.
    """
    for table in tables:
        columns = kind.columns_of(table.keys or cfg.columns)
        names = table.names_of(columns[kind.target])
        needed = {key: column for key, column in columns.items() if key not in optional}
        for where, values in with_columns(needed, table):
            facts.rows += 1
            if isinstance(values, BadRow):
                yield where, values
            else:
                yield where, Row(values, columns, cfg.encoding, names)
        facts.lines += table.lines.count


def usable(row: Row | BadRow) -> Row:
    if isinstance(row, BadRow):
        raise row
    return row


def texts_of(row: Row, number: int, kind: RowKind) -> dict[str, Any]:
    """Return the id and the texts of a row. Raises BadRow if it lacks one."""
    name = str(number)
    if "id" in row.columns:
        name = row.id()
    return {"id": name, **kind.read(row)}


def known_target(
    row: Row, example: dict[str, Any], kind: RowKind, labels: LabelNames
) -> dict[str, Any]:
    """Return the target of a new row, under its key: None for an unknown label, nothing for a target that is null."""
    if kind.read_target is not None:
        value = row.value(kind.target)
        if value is None:
            return {}
        return {kind.target: kind.read_target(value, example, False)}
    try:
        return {kind.target: label_of_row(row, example, kind, labels)}
    except BadRow:
        return {kind.target: None}


def with_columns(needed: Columns, table: Table) -> Iterator[LocatedRow]:
    """Return the rows of a table. Raises InputError if it lacks a column that is `needed`."""
    rows = table.rows()
    if table.columns is not None:
        check_columns(needed, table.columns, table.where)
        return rows
    first = list(islice(rows, COLUMN_ROWS))
    good = [(where, values) for where, values in first if not isinstance(values, BadRow)]
    if good:
        where, row = good[0]
        columns = dict.fromkeys(name for _, values in good for name in values)
        check_columns(needed, list(columns), where, hint_on(row, needed))
    return chain(first, rows)


def hint_on(row: dict[str, Any], needed: Columns) -> str:
    """Return a hint for a message that a row lacks a column."""
    if "text" in row and "tokens" in needed:
        return (
            "; if entities are spans of a text: data.columns.tokens=text data.columns.tags=SPANS"
        )
    for name, value in row.items():
        if name.isidentifier() and holds_objects(value):
            return f"; are the rows in {name}? Write one per line, as jq -c '.{name}[]' does"
    return ""


def check_columns(needed: Columns, columns: Sequence[str], where: str, hint: str = "") -> None:
    for key, names in needed.items():
        for column in names_in(names):
            lacks = f"no column {column} (data.columns.{key})"
            have = f"the columns are: {columns_shown(columns)}"
            check(holds(columns, column), f"{where}: {lacks}; {have}{hint}")
