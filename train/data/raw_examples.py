"""From rows of any format to examples: columns and labels mapped, texts and answers checked, bad rows counted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from train.config import ColumnsConfig, InputError, RecordsConfig, check
from train.data.raw_files import BadRow, Table, unreadable
from train.data.raw_squad import answers_of

MAX_NAMED = 10  # bad rows of a split that are named
COUNTED = 10_000  # bad rows beyond the limit that are counted before reading stops
MAX_LABELS = 1000  # found in the data; more are another column
SHOWN_LABELS = 10
COLUMN_ROWS = 100  # of JSON lines, which tell the columns: one row may lack some
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
OPTIONAL = {"classify": ("label",), "qa": ("answers",)}  # keys of columns that new data need not have


@dataclass
class Dropped:
    """Rows of a split that are not used. `limit`: bad ones that are put up with."""

    split: str
    limit: int
    bad_rows: int = 0
    examples: list[str] = field(default_factory=list)
    left_out: int = 0

    def add(self, place: str, bad: BadRow) -> None:
        self.bad_rows += 1
        if len(self.examples) < MAX_NAMED:
            self.examples.append(f"{place}: {bad}")
        if self.bad_rows > self.limit + COUNTED:
            self.check(" or more")

    def check(self, more: str = "") -> None:
        """InputError if there are too many."""
        what = f"{self.split}: {self.bad_rows:,}{more} bad rows, data.max_bad_rows={self.limit} are allowed"
        hint = "" if self.bad_rows <= len(self.examples) else "; ..."
        check(self.bad_rows <= self.limit, f"{what}: {'; '.join(self.examples)}{hint}")

    def facts(self) -> dict[str, Any]:
        return {"bad_rows": self.bad_rows, "examples": self.examples, "left_out": self.left_out}


class NoneDropped(Dropped):
    """Every row counts: the first bad one is an InputError."""

    def add(self, place: str, bad: BadRow) -> None:
        raise InputError(f"{place}: {bad}")


class LabelNames:
    """From what the data holds to names of labels. `known`: the only ones that are right; empty: any is."""

    def __init__(self, cfg: RecordsConfig, known: Sequence[str] = ()) -> None:
        self.map = cfg.label_map
        targets = dict.fromkeys(name for name in cfg.label_map.values() if name is not None)
        self.known = list(known or cfg.labels or targets)
        self.found: set[str] = set()

    def of(self, value: Any, names: Sequence[str] | None) -> str | None:
        """The name for a value, which is a number of `names` if they are given; None: the row is left out."""
        key = label_key(value)
        if names is not None and isinstance(value, int) and 0 <= value < len(names):
            key = names[value]
        name = self.map.get(key, key)
        if name is None:
            return None
        if name == "":
            raise BadRow("an empty label")
        if self.known and name not in self.known:
            some = ", ".join(self.known[:SHOWN_LABELS]) + (", ..." if len(self.known) > SHOWN_LABELS else "")
            raise BadRow(f"unknown label {key[:40]}; the labels are {some}")
        self.found.add(name)
        count = len(self.found)
        hint = f"is data.columns.label right? as {name[:40]}"
        check(
            bool(self.known) or count <= MAX_LABELS, f"the data holds more than {MAX_LABELS} different labels, {hint}"
        )
        return name


def label_key(value: Any) -> str:
    """How settings write a label: 1, 1.0 and "1" are 1; nothing and not-a-number are empty."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def in_order(names: Iterable[str]) -> list[str]:
    """Numbers by their value, anything else by the alphabet."""
    found = sorted(names)
    return sorted(found, key=float) if all(map(NUMBER.fullmatch, found)) else found


def wanted_columns(columns: ColumnsConfig, kind: str) -> dict[str, str]:
    """Column of each key that a kind of task reads."""
    keys = {"classify": ("id", "text", "text_pair", "label"), "qa": ("id", "question", "context", "answers")}[kind]
    return {key: column for key in keys if (column := getattr(columns, key)) is not None}


def examples(
    tables: Iterable[Table],
    cfg: RecordsConfig,
    kind: str,
    labels: LabelNames,
    dropped: Dropped,
    *,
    labelled: bool,
    unanswerable: bool = True,
) -> Iterator[dict[str, Any]]:
    """Rows with the columns that raw.py promises, the label by its name. Without `labelled`, labels and answers are
    only there if the data has them. Bad rows go to `dropped`; a column that is missing is an InputError."""
    number = -1
    for table in tables:
        wanted = wanted_columns(table.keys or cfg.columns, kind)
        needed = {key: column for key, column in wanted.items() if labelled or key not in OPTIONAL[kind]}
        rows = table.rows()
        if table.columns is not None:
            check_columns(needed, table.columns, table.place)
        else:
            first = list(islice(rows, COLUMN_ROWS))
            good = [(place, row) for place, row in first if not isinstance(row, BadRow)]
            if good:
                check_columns(needed, list(dict.fromkeys(name for _, row in good for name in row)), good[0][0])
            rows = chain(first, rows)
        for place, row in rows:
            number += 1
            try:
                if isinstance(row, BadRow):
                    raise row
                example = Reader(row, wanted, cfg.encoding).example(kind, number, labelled)
                if kind == "qa" and not unanswerable and not example["answers"]["text"]:
                    raise BadRow("no answer; for SQuAD v2 set task.unanswerable=true")
                if labelled or "label" in example:
                    set_label(example, labels, table.class_names.get(cfg.columns.label), labelled)
            except BadRow as bad:
                dropped.add(place, bad)
                continue
            if labelled and kind == "classify" and example["label"] is None:
                dropped.left_out += 1
            else:
                yield example


def set_label(example: dict[str, Any], labels: LabelNames, names: Sequence[str] | None, labelled: bool) -> None:
    """Put a label's name in its value's place, None where there is none; new data may hold unknown ones."""
    if "label" not in example:
        return
    try:
        example["label"] = labels.of(example["label"], names)
    except BadRow:
        if labelled:
            raise
        example["label"] = None


def check_columns(needed: dict[str, str], columns: Sequence[str], place: str) -> None:
    for key, column in needed.items():
        there = column in columns or column.split(".")[0] in columns
        have = ", ".join(columns) or "(none)"
        check(there, f"{place}: no column {column} (data.columns.{key}); the columns are: {have}")


class Reader:
    """The values of one row by the keys of ColumnsConfig."""

    def __init__(self, row: dict[str, Any], columns: dict[str, str], encoding: str) -> None:
        self.row, self.columns, self.encoding = row, columns, encoding

    def example(self, kind: str, number: int, labelled: bool) -> dict[str, Any]:
        example: dict[str, Any] = {"id": self.id() if "id" in self.columns else str(number)}
        if kind == "classify":
            texts = {key: self.text(key) for key in ("text", "text_pair") if key in self.columns}
            if not any(text.strip() for text in texts.values()):
                raise BadRow(f"an empty {self.columns['text']}")
            return example | texts | ({"label": self.value("label")} if labelled or self.has("label") else {})
        for key in ("question", "context"):
            example[key] = self.text(key)
            if not example[key].strip():
                raise BadRow(f"an empty {self.columns[key]}")
        answers = self.value("answers") if labelled or self.has("answers") else None
        if answers is not None or labelled:
            example["answers"] = answers_of(answers, example["context"])
        return example

    def has(self, key: str) -> bool:
        return self.columns[key] in self.row or self.columns[key].split(".")[0] in self.row

    def value(self, key: str) -> Any:
        """A column, or where its name has dots, what is in an object there."""
        column = self.columns[key]
        if column in self.row:
            return self.row[column]
        value: Any = self.row
        for name in column.split("."):
            if not isinstance(value, dict) or name not in value:
                raise BadRow(f"no {column}")
            value = value[name]
        return value

    def text(self, key: str) -> str:
        value, column = self.value(key), self.columns[key]
        if not isinstance(value, str):
            raise BadRow(f"{column} holds {value!r:.40} ({type(value).__name__}), not a string")
        bad = unreadable(value, self.encoding)
        if bad is not None:
            raise bad
        return value

    def id(self) -> str:
        name = label_key(self.value("id"))
        if not name:
            raise BadRow(f"an empty {self.columns['id']}")
        bad = unreadable(name, self.encoding)
        if bad is not None:
            raise bad
        return name
