"""The kind of rows that a task learns from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import List, Value

from train.config import ColumnsConfig, check
from train.data.records.row import Columns, Row, names_in

STRING = Value("string")
NUMBER = Value("int32")
NUMBERS = List(Value("int32"))
TOKENS = {  # columns of every token row
    "input_ids": NUMBERS,  # at most seq_len ids, including special tokens, without padding
    "second_at": NUMBER,  # index of segment 1's first token; the length if there is no segment 1
    "length": NUMBER,
    "row": NUMBER,  # index of the row that the token row was made from
}


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
