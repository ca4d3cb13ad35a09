"""Access to the values of a row, which needs no library of data sets."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from train.data.files.errors import BadRow, unreadable

WHOLE = re.compile(r"\+?(-?\d+)(\.0*)?")
LABELS_KEPT = 4096  # rows have few different labels
BOOLEANS = {"True": "true", "TRUE": "true", "False": "false", "FALSE": "false"}


Columns = dict[str, str | tuple[str, ...]]  # the data's column or columns by key of data.columns


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


@lru_cache(LABELS_KEPT, typed=True)
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
