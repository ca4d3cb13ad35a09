"""The columns of rows that a look sees, and what their values are by content."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from train.data.records.content_checks import BITS, NUMBER, TRUTHS, items_of
from train.data.records.row import plain_label

TEXT_SHARE = 0.5  # rows of several words, at least, in a column of texts
MOST_CLASSES = 50  # different values of a column that no name calls the label
ROWS_OF_A_CLASS = 4  # on average, at least, in such a column
TAG_PREFIX = re.compile("[BIESLU]-.")


def is_span(value: Any) -> bool:
    if isinstance(value, dict):
        return {"start", "end"} <= value.keys()
    return isinstance(value, list) and len(value) == 3 and type(value[0]) is type(value[1]) is int


@dataclass(frozen=True)
class Column:
    """The values of a column in the rows that were looked at, without empty ones."""

    name: str
    values: list[Any]
    label_names: Sequence[str] = ()  # the labels that its numbers stand for, if known

    @cached_property
    def distinct(self) -> set[str]:
        return {plain_label(value) for value in self.values if not isinstance(value, list | dict)}

    @cached_property
    def holds_lists(self) -> bool:
        """Return whether the values are lists, or lists written as text."""
        return bool(self.values) and all(
            isinstance(value, list) or (isinstance(value, str) and items_of(value) is not None)
            for value in self.values
        )

    @property
    def is_text(self) -> bool:
        several = [
            value for value in self.values if isinstance(value, str) and " " in value.strip()
        ]
        return len(several) > TEXT_SHARE * len(self.values) and not self.holds_lists

    @property
    def holds_spans(self) -> bool:
        """Return whether the values are lists of spans of a text: [first, last, type], or objects with these."""
        spans = [span for value in self.values if isinstance(value, list) for span in value]
        return bool(spans) and all(map(is_span, spans))

    @property
    def holds_plain_tags(self) -> bool:
        """Return whether the values are lists of tags without prefixes, such as parts of speech."""
        tags = [tag for value in self.values if isinstance(value, list) for tag in value]
        are_names = bool(tags) and all(isinstance(tag, str) for tag in tags)
        return are_names and not any(tag == "O" or TAG_PREFIX.match(tag) for tag in tags)

    @property
    def is_plain(self) -> bool:
        return not any(isinstance(value, list | dict) for value in self.values)

    @property
    def is_number(self) -> bool:
        return bool(self.distinct) and self.is_plain and all(map(NUMBER.fullmatch, self.distinct))

    @property
    def is_bit(self) -> bool:
        return bool(self.distinct) and self.is_plain and self.distinct <= BITS | TRUTHS

    @property
    def may_be_label(self) -> bool:
        """Return whether the content is that of labels: few values, each in several rows."""
        if self.is_text or not self.is_plain:
            return False
        most = min(MOST_CLASSES, len(self.values) / ROWS_OF_A_CLASS)
        return 2 <= len(self.distinct) <= most


def columns_of(
    rows: Iterable[Mapping[str, Any]], label_names: Mapping[str, Sequence[str]] | None = None
) -> list[Column]:
    """Return the columns of rows, in the order in which they appear. `label_names`: by column, if known."""
    values: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            found = values.setdefault(name, [])
            if value is not None and value != "":
                found.append(value)
    known = label_names or {}
    return [Column(name, found, known.get(name, ())) for name, found in values.items()]
