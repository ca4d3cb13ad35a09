"""Examples from rows of any format: columns and labels mapped, texts and targets checked, bad rows counted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from train.config import InputError, RecordsConfig, check, plural, shortlist
from train.data.files.errors import BadRow, listed
from train.data.files.rows import holds_objects
from train.data.records.formats import LocatedRow, Table
from train.data.records.kinds import Row, RowKind, names_in, plain, plain_label
from train.data.records.label_checks import BITS, PLAIN_NUMBER, TRUTHS, LabelColumn, items_of

logger = logging.getLogger("train")

MAX_NAMED, MAX_SHOWN = 10, 2  # maximum bad rows recorded per split, and shown in an error
# distinct labels in the data; more are texts or ids, and would fill the memory
MOST_LABELS = 20_000
# number of first JSON lines whose keys are the columns; a single row may lack some
COLUMN_ROWS = 100


@dataclass
class Dropped:
    """Counts of a split's unused rows. `limit`: how many bad rows are allowed."""

    split: str
    limit: int
    bad_rows: int = 0
    bad_examples: list[str] = field(default_factory=list)
    left_out: int = 0  # rows whose label data.label_map maps to null
    read_lines: int = 0  # lines of CSV, whose fields may contain line ends
    read_rows: int = 0  # rows parsed from these lines

    def add(self, where: str, bad: BadRow) -> None:
        self.bad_rows += 1
        if len(self.bad_examples) < MAX_NAMED:
            self.bad_examples.append(f"{where}: {bad}")

    def check(self) -> None:
        """Raise InputError if there are more bad rows than allowed."""
        what = f"{self.split}: {plural(self.bad_rows, 'bad row')}, more than data.max_bad_rows={self.limit} allows"
        shown = "; ".join(self.bad_examples[:MAX_SHOWN]) + (
            "; ..." if self.bad_rows > MAX_SHOWN else ""
        )
        check(self.bad_rows <= self.limit, f"{what}: {shown}")

    def facts(self) -> dict[str, Any]:
        lines = {"read_lines": self.read_lines, "read_rows": self.read_rows}
        return {
            "bad_rows": self.bad_rows,
            "bad_examples": self.bad_examples,
            "left_out": self.left_out,
            **lines,
        }


class LabelNames:
    """The mapping from labels in the data to their names. `known`: the only valid names; if empty, all are valid."""

    def __init__(self, cfg: RecordsConfig, known: Sequence[str] = ()) -> None:
        self.map = {plain_label(value): name for value, name in cfg.label_map.items()}
        self.known = list(known or cfg.labels)
        self.separator = cfg.label_separator
        self.spellings = {plain_label(name): name for name in self.known}
        self.counts: Counter[str] = Counter()  # how often each label was seen
        self.widths: set[int] = set()  # the numbers of values in the rows' lists
        self.unmapped: set[str] = set()

    def look_up(self, value: Any, names: Sequence[str] | None) -> tuple[str, str | None]:
        """Return a value's name in the data, and the label that data.label_map maps it to (None: leave the row out).

        `names`: the names that numbers in the data stand for, if any.
        """
        key = plain_label(value)
        if names is not None and type(value) is int and 0 <= value < len(names):
            by_number = key in self.map and plain_label(names[value]) not in self.map
            key = key if by_number else names[value]
        return key, self.map.get(plain_label(key), key)

    def of(self, value: Any, names: Sequence[str] | None) -> str | None:
        """Return the label for a value; None if the row is left out. `names`: see `look_up`.

        Raises BadRow if the label is unknown, and InputError if too many distinct labels have been seen.
        """
        key, name = self.look_up(value, names)
        if name is None:
            return None
        if name == "":
            raise BadRow("an empty label")
        name = name if name in self.known else self.spellings.get(plain_label(name), name)
        if self.known and name not in self.known:
            raise BadRow(f"unknown label {key[:40]}; the labels are {shortlist(self.known)}")
        self.counts[name] += 1
        if plain_label(key) not in self.map:
            self.unmapped.add(name)
        if not self.known and len(self.counts) > MOST_LABELS:
            many = f"more than {MOST_LABELS:,} different labels, such as {name[:40]}; is data.columns right?"
            raise InputError(f"the data has {many}")
        return name

    def column(self, name: str, kind: RowKind) -> LabelColumn:
        """Return the facts about the labels seen so far. `name`: the column or columns in the data."""
        is_words = kind.check_each is not None
        return LabelColumn(
            name,
            kind.target,
            self.counts,
            takes_lists=kind.has_lists and not is_words,
            takes_words=is_words,
            widths=self.widths,
        )

    def in_order(self) -> list[str]:
        """Return the names seen so far, sorted.

        If all names are numbers, or data.label_map maps only numbers to them, they are sorted by these numbers;
        otherwise alphabetically.
        """
        names = sorted(self.counts)
        numbers = {
            name: [key for key, to in self.map.items() if to == name] or [name] for name in names
        }
        if all(map(PLAIN_NUMBER.fullmatch, names)):
            return sorted(names, key=float)
        if all(PLAIN_NUMBER.fullmatch(key) for keys in numbers.values() for key in keys):
            return sorted(names, key=lambda name: min(map(float, numbers[name])))
        return names


def examples(
    tables: Iterable[Table],
    cfg: RecordsConfig,
    kind: RowKind,
    labels: LabelNames,
    dropped: Dropped | None,
    *,
    named: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield each row with the columns of `kind`. Labels are names. Bad rows are counted in `dropped`.

    If `dropped` is None, the rows are new: the data may lack the target unless its key is in `named`, and an unknown
    label is None. Raises InputError if a column is missing, or if a new row is bad.
    """
    is_new, number = dropped is None, -1
    ids: set[str] = set()
    for table in tables:
        columns = kind.columns_of(table.keys or cfg.columns)
        rows = with_columns(
            {
                key: columns[key]
                for key in columns
                if not is_new or key != kind.target or key in named
            },
            table,
        )
        names, first = table.names_of(columns[kind.target]), number + 1
        for where, values in rows:
            number += 1
            try:
                if isinstance(values, BadRow):
                    raise values
                row = Row(values, columns, cfg.encoding)
                example = {"id": row.id() if "id" in columns else str(number), **kind.read(row)}
                if not is_new or row.has(kind.target):
                    example |= target_of(row, example, kind, labels, names, is_new=is_new)
                if kind.has_unique_ids and not is_new:
                    if example["id"] in ids:
                        raise BadRow(
                            f"an earlier row also has the id {example['id']:.40}; ids must differ"
                        )
                    ids.add(example["id"])
            except BadRow as bad:
                if dropped is None:
                    raise InputError(f"{where}: {bad}") from None
                dropped.add(where, bad)
                continue
            if dropped is not None and example[kind.target] is None:
                dropped.left_out += 1
            else:
                yield example
        num_lines, num_rows = table.lines.count, number + 1 - first
        if num_lines and dropped is not None:
            dropped.read_lines, dropped.read_rows = (
                dropped.read_lines + num_lines,
                dropped.read_rows + num_rows,
            )
        elif num_lines not in (0, num_rows):
            logger.warning("%s: %d lines were read as %d rows", table.where, num_lines, num_rows)


def target_of(
    row: Row,
    example: dict[str, Any],
    kind: RowKind,
    labels: LabelNames,
    names: Sequence[str] | None,
    *,
    is_new: bool,
) -> dict[str, Any]:
    """Return the target of a row, under its key; {} for a new row whose target is null."""
    value, column = row.value(kind.target), ", ".join(names_in(row.columns[kind.target]))
    if kind.read_target is not None:
        if is_new and value is None:
            return {}
        return {kind.target: kind.read_target(value, example, not is_new)}
    try:
        if kind.check_each is None and kind.has_lists:
            has_columns = isinstance(row.columns[kind.target], tuple)
            found = columns_with(value, names or ()) if has_columns else value
            return {kind.target: labels_of_row(found, column, labels, names)}
        if kind.check_each is None:
            if value not in labels.known:
                check_single(value, column, kind)
            return {kind.target: labels.of(value, names)}
        return {kind.target: labels_of_each(value, example[kind.split_by], kind, labels, names)}
    except BadRow:
        if not is_new:
            raise
        return {kind.target: None}


def check_single(value: Any, column: str, kind: RowKind) -> None:
    """Raise BadRow if a label is bytes, a list or an object."""
    if isinstance(value, bytes):
        raise BadRow(f"{column} holds bytes, {value!r:.40}; write the column as strings")
    if not isinstance(value, list | dict):
        return
    if isinstance(value, list):
        what = f"which is a list: task=multilabel learns several labels per row; task={kind.name} learns one"
    elif {"text", "answer_start"} <= value.keys():
        what = "which are answers: set task=qa"
    else:
        inner = next(filter(str.isidentifier, value), "...")
        what = f"which is an object, not a label; name a value inside it: data.columns.{kind.target}={column}.{inner}"
    raise BadRow(f"{column} holds {value!r:.40}, {what}")


def columns_with(values: Sequence[Any], names: Sequence[str]) -> list[int]:
    """Return the indices of the columns that hold 1 or true. Raises BadRow unless the others hold 0 or false."""
    found = [plain_label(value) for value in values]
    for name, value, text in zip(names, values, found, strict=True):
        if text not in TRUTHS | BITS:
            raise BadRow(f"{name} holds {value!r:.40}, not 0 or 1")
    return [number for number, text in enumerate(found) if text in ("1", "true")]


def labels_of_row(
    value: Any, column: str, labels: LabelNames, names: Sequence[str] | None
) -> list[str]:
    """Return the distinct labels of a row, without those that data.label_map maps to null."""
    if isinstance(value, str):
        value = split_labels(value, column, labels.separator)
    if not isinstance(value, list) or any(isinstance(each, list | dict) for each in value):
        raise BadRow(f"{column} holds {value!r:.40}, not a list of labels")
    labels.widths.add(len(value))
    if names is None and is_multi_hot(value, labels.known):
        value = [labels.known[number] for number in columns_with(value, labels.known)]
    found = dict.fromkeys(labels.of(each, names) for each in value)
    return [name for name in found if name is not None]


def split_labels(text: str, column: str, separator: str | None) -> list[str]:
    """Return the labels in a text: a list such as ['a', 'b'], or the parts between separators."""
    items = items_of(text)
    if items is not None:
        return items
    if separator is None:
        raise BadRow(
            f"{column} holds {text!r:.40}, not a list; data.label_separator splits a text into labels"
        )
    return [label for label in text.split(separator) if label.strip()]


def is_multi_hot(values: Sequence[Any], known: Sequence[str]) -> bool:
    """Return whether a list has a 0 or a 1 for each of the known labels, none of which has such a name."""
    bits = TRUTHS | BITS
    return (
        len(values) == len(known) > 1
        and not bits & {*known}
        and {*map(plain_label, values)} <= bits
    )


def labels_of_each(
    values: Any,
    items: Sequence[str],
    kind: RowKind,
    labels: LabelNames,
    names: Sequence[str] | None,
) -> list[str] | None:
    """Return the labels of all `items` of a row; None if data.label_map maps one of them to null."""
    assert kind.check_each is not None
    if not isinstance(values, list) or len(values) != len(items):
        raise BadRow(f"{len(items)} words need a list of {len(items)} tags, not {values!r:.40}")
    found: list[str] = []
    for number, (item, value) in enumerate(zip(items, values, strict=True), 1):
        try:
            if isinstance(value, list | dict):
                raise BadRow(
                    f"{value!r:.40} instead of a tag: task={kind.name} learns one for each word"
                )
            if not plain(value).isprintable():
                raise BadRow(f"the tag {value!r:.40} has control characters")
            label = labels.of(value, names)
            if label is None:
                return None
            kind.check_each(label)
        except BadRow as bad:
            raise BadRow(f"word {number}, {item!r:.40}: {bad}") from None
        found.append(label)
    return found


def with_columns(
    needed: Mapping[str, str | tuple[str, ...]], table: Table
) -> Iterator[LocatedRow]:
    """Return the rows of a table. Raises InputError if it lacks a column. `needed`: the columns for each key."""
    rows = table.rows()
    if table.columns is not None:
        check_columns(needed, table.columns, table.where)
        return rows
    first = list(islice(rows, COLUMN_ROWS))
    good = [(where, values) for where, values in first if not isinstance(values, BadRow)]
    if good:
        where, row = good[0]
        lists = [
            name for name, value in row.items() if name.isidentifier() and holds_objects(value)
        ]
        hint = (
            f"; are the rows in {lists[0]}? Write one per line, as jq -c '.{lists[0]}[]' does"
            if lists
            else ""
        )
        if "text" in row and "tokens" in needed and needed["tokens"] not in row:
            hint = "; if entities are spans of a text: data.columns.tokens=text data.columns.tags=SPANS"
        check_columns(
            needed, list(dict.fromkeys(name for _, row in good for name in row)), where, hint
        )
    return chain(first, rows)


def check_columns(
    needed: Mapping[str, str | tuple[str, ...]], columns: Sequence[str], where: str, hint: str = ""
) -> None:
    for key, column in ((key, name) for key, names in needed.items() for name in names_in(names)):
        is_there = column in columns or column.split(".")[0] in columns
        have = listed(columns, column)
        check(
            is_there,
            f"{where}: no column {column} (data.columns.{key}); the columns are: {have}{hint}",
        )
