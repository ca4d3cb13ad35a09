"""The kind of rows that a task learns from, and access to the values of a row."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import List, Value

from train.config import ColumnsConfig, check
from train.data.files.errors import BadRow, unreadable

STRING = Value("string")
NUMBER = Value("int32")
NUMBERS = List(Value("int32"))
TOKENS = {  # columns of every token row
    "input_ids": NUMBERS,  # at most seq_len ids, including special tokens, without padding
    "second_at": NUMBER,  # index of segment 1's first token; the length if there is no segment 1
    "length": NUMBER,
    "row": NUMBER,  # index of the row that the token row was made from
}
WHOLE = re.compile(r"\+?(-?\d+)(\.0*)?")
BOOLEANS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}


Columns = dict[str, str | tuple[str, ...]]  # the data's column or columns by key of data.columns


@dataclass(frozen=True)
class RowKind:
    """The kind of rows that a task learns from."""

    name: str  # the task's name
    # keys of data.columns that the task reads, with their types in a table
    columns: dict[str, Any]
    read: Callable[[Row], dict[str, Any]]  # returns a row's texts by key; raises BadRow
    target: str  # the key of the value to predict, which new rows may lack
    split_by: str  # the key of the text whose hash chooses a row's split
    tokens: dict[str, Any]  # columns of a token row in addition to TOKENS, with their types
    # A function that returns the target, given its value, the texts, and whether the row is for training. None: the
    # target is the name of a label, or a list of names if its type is a list.
    read_target: Callable[[Any, dict[str, Any], bool], Any] | None = None
    # A function that checks the label of each item of split_by, and raises BadRow.
    check_each: Callable[[str], None] | None = None
    has_unique_ids: bool = False
    takes_columns: bool = False  # a key may name several columns

    @property
    def has_labels(self) -> bool:
        return self.read_target is None

    @property
    def takes_words(self) -> bool:
        """Return whether each word has a label."""
        return self.check_each is not None

    @property
    def takes_lists(self) -> bool:
        """Return whether a row may have any number of labels."""
        is_list = isinstance(self.columns[self.target], List)
        return self.has_labels and is_list and not self.takes_words

    def columns_of(self, columns: ColumnsConfig) -> Columns:
        """Return the data's column or columns for each key. Raises InputError if a key may not name several."""
        found: Columns = {}
        for key in ("id", *self.columns):
            column = getattr(columns, key)
            if isinstance(column, list):
                many = f"data.columns.{key}=[{','.join(column)}] names several columns"
                check(self.takes_columns, f"{many}; task={self.name} reads one")
                found[key] = tuple(column)
            elif column is not None:
                found[key] = column
        return found

    def wanted(self, columns: ColumnsConfig) -> list[str]:
        """Return the names of all columns that are read."""
        return [name for names in self.columns_of(columns).values() for name in names_in(names)]


def names_in(columns: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(columns, str):
        return (columns,)
    return tuple(columns)


def holds(columns: Container[str], name: str) -> bool:
    """Return whether a column is among `columns`; a dot in its name selects a value in an object."""
    return name in columns or name.split(".")[0] in columns


@dataclass
class Row:
    """The values of one row by the keys of data.columns."""

    values: dict[str, Any]
    columns: Columns
    encoding: str
    names: Sequence[str] | None = None  # what the numbers in the column of labels stand for

    def has(self, key: str) -> bool:
        return all(holds(self.values, name) for name in names_in(self.columns[key]))

    def value(self, key: str) -> Any:
        """Return the value of a key, or a list if it names several columns. Raises BadRow if there is none."""
        column = self.columns[key]
        if isinstance(column, tuple):
            return [self.value_in(name) for name in column]
        return self.value_in(column)

    def value_in(self, column: str) -> Any:
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for name in column.split("."):  # a dot selects a value in an object
            if not isinstance(value, dict) or name not in value:
                raise BadRow(f"no {column}")
            value = value[name]
        return value

    def text(self, key: str) -> str:
        """Return a key's value as text. Raises BadRow if it is not a string, or has invalid characters."""
        value = self.value(key)
        column = self.columns[key]
        if not isinstance(value, str):
            raise BadRow(f"{column} holds {value!r:.40} ({type(value).__name__}), not a string")
        return self.checked(value)

    def texts(self, key: str) -> list[str]:
        """Return a key's list of texts. Raises BadRow if the value is not a list of strings, or if one is blank."""
        values = self.value(key)
        column = self.columns[key]
        ok = isinstance(values, list) and all(isinstance(text, str) for text in values)
        if not ok or not values:
            raise BadRow(f"{column} holds {values!r:.40}, not a list of strings")
        for number, text in enumerate(values, 1):
            if not text.strip():
                raise BadRow(f"{column}: item {number} is empty")
        return [self.checked(text) for text in values]

    def id(self) -> str:
        name = plain(self.value("id"))
        if not name:
            raise BadRow(f"an empty {self.columns['id']}")
        return self.checked(name)

    def checked(self, text: str) -> str:
        bad = unreadable(text, self.encoding)
        if bad is not None:
            raise bad
        return text


def plain(value: Any) -> str:
    """Return an id as a string: 1 and 1.0 become "1", None and NaN become ""."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


def plain_label(value: Any) -> str:
    """Return a label as a string that is the same in all file formats and in settings."""
    # Characters are composed (NFC). 1, 1.0 and "+1" become "1", True and "TRUE" become "true", None and NaN become "".
    text = unicodedata.normalize("NFC", plain(value))
    whole = WHOLE.fullmatch(text)
    if whole is None:
        return BOOLEANS.get(text, text)
    if whole[1] == "-0":
        return "0"
    return whole[1]
