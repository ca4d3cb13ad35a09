"""Batches of static shapes from a table of prepared examples. Rows are padded when they are drawn.

The token ids are in memory-mapped Arrow files; a row's ids are a slice of one Arrow chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from train.config import check, shortlist
from train.data.batches.buckets import without_bucket
from train.data.batches.loader import Batch
from train.data.batches.masking import IGNORE_INDEX
from train.data.shards.order import PADDING

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import ChunkedArray, DataType

# numpy's dtypes by Arrow's names
FLOATS: dict[str, type] = {"halffloat": np.float16, "float": np.float32, "double": np.float64}
NUMBERS = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", *FLOATS}
LABELS = "labels"  # the input with the class of each row or of each token; not every table has it


class Lists:
    """A column of lists of numbers, read chunk by chunk without a copy."""

    def __init__(self, column: ChunkedArray) -> None:
        self.offsets = [chunk.offsets.to_numpy() for chunk in column.chunks]
        self.values = [chunk.values.to_numpy() for chunk in column.chunks]
        # The first row of each chunk, then the row count.
        self.firsts = np.cumsum([0, *map(len, column.chunks)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def take(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the lists of these rows, as views."""
        chunks = np.searchsorted(self.firsts, rows, side="right") - 1
        rows_in_chunk = rows - self.firsts[chunks]
        lists = []
        for chunk, row in zip(chunks.tolist(), rows_in_chunk.tolist(), strict=True):
            offsets = self.offsets[chunk]
            lists.append(self.values[chunk][offsets[row] : offsets[row + 1]])
        return lists


def is_list(kind: DataType) -> bool:
    """Return whether a column has lists of variable length, such as token ids."""
    return hasattr(kind, "value_type") and not hasattr(kind, "list_size")


def input_dtype(column: ChunkedArray, name: str) -> np.dtype:
    """Return int64 for integers and booleans, else the column's float dtype. Raises InputError if it is not numeric."""
    parts = [chunk.values if hasattr(chunk, "values") else chunk for chunk in column.chunks]
    kinds = {str(part.type) for part in parts}
    found = f"column {name} has type {', '.join(sorted(kinds))}"
    check(kinds <= NUMBERS, f"{found}: model inputs must be numbers")
    has_nulls = any(part.null_count for part in (column, *parts))
    check(not has_nulls, f"column {name} has empty values")
    for kind in kinds & FLOATS.keys():
        return np.dtype(FLOATS[kind])
    return np.dtype(np.int64)


def values_of(column: ChunkedArray) -> np.ndarray:
    """Return a column of numbers as [rows], or a column of lists of a fixed size C as [rows, C]."""
    if not hasattr(column.type, "list_size"):
        return column.to_numpy()
    parts = [chunk.flatten().to_numpy() for chunk in column.chunks]
    return np.concatenate(parts).reshape(-1, column.type.list_size)


class TokenRows:
    """A Drawable (batches/loader.py) over a table with the columns `input_ids` (lists), `second_at` and `length`."""

    def __init__(
        self,
        table: Dataset,
        *,
        pad_id: int,
        lengths: Sequence[int],
        columns: Mapping[str, str],
        weights: np.ndarray | None = None,
    ) -> None:
        """Map the table. `lengths`: the padded lengths, ascending; each row gets the first one that it fits into.

        `columns`: a numeric column for each additional input; the input `labels` has the classes. `weights` [labels]:
        the weight of each class's rows; None: 1. Raises InputError if a column is missing or not numeric, or
        a row is longer than the last of `lengths`.
        """
        needed = {"input_ids", "second_at", "length", *columns.values()}
        missing = ", ".join(sorted(needed - set(table.column_names)))
        known = f"there are {shortlist(table.column_names)}"
        check(not missing, f"the data has no column {missing}; {known}")
        self.pad_id = pad_id
        self.lengths = tuple(lengths)
        self.weights = weights
        # Rows are mapped from disk. They are copied only if the table is a selection.
        arrow = table.with_format("arrow")[:]
        self.tokens = Lists(arrow.column("input_ids"))
        self.row_lengths = arrow.column("length").to_numpy()  # copied: a few bytes per row
        self.second_at = arrow.column("second_at").to_numpy()
        self.dtypes: dict[str, np.dtype] = {}
        self.lists: dict[str, Lists] = {}
        self.values: dict[str, np.ndarray] = {}
        for name, column in columns.items():
            self.add_input(name, arrow.column(column), column)
        longest = int(self.row_lengths.max(initial=0))
        most = self.lengths[-1]
        check(longest <= most, f"the data has a row of {longest} tokens, longer than {most}")
        self.shortest_row = 0
        if len(self):
            self.shortest_row = int(self.row_lengths.argmin())
        self.bucket_of = np.searchsorted(self.lengths, self.row_lengths).astype(np.uint8)  # [rows]

    def add_input(self, name: str, values: ChunkedArray, column: str) -> None:
        """Map a column of numbers or of lists of them. Raises InputError if it has others."""
        self.dtypes[name] = input_dtype(values, column)
        if is_list(values.type):
            self.lists[name] = Lists(values)
        else:
            self.values[name] = values_of(values)

    def check_ids(self, vocab_size: int) -> None:
        """Raise InputError if a token is not among those of the model; a tokenizer may skip ids."""
        largest = max((int(values.max(initial=0)) for values in self.tokens.values), default=0)
        what = f"the data has the token id {largest}, but the model has {vocab_size} tokens"
        cure = "set model.vocab_size above it, or choose the tokenizer of the model"
        check(largest < vocab_size, f"{what}; {cure}")

    def __len__(self) -> int:
        return len(self.tokens)

    def draw(self, items: np.ndarray) -> Batch:
        """Return the batch of `items` [K, B], which must be of one bucket. See buckets.py for their form.

        For rows of S tokens the inputs are input_ids, attention_mask and token_type_ids [K, B, S], and one for each of
        `columns`: numbers [K, B], lists [K, B, S], or lists of a fixed size C [K, B, C]. All are int64, except that a
        column of floats keeps its dtype.

        PADDING becomes another row of the batch (the shortest row, if the batch has none), which is never cut: some
        models reject a row that is not whole. "count" is the number of labels (of rows, if there are no `labels`) or
        the sum of their weights; "tokens" is the number of tokens without padding.
        """
        plain, bucket = without_bucket(items)
        is_padding = (plain == PADDING).ravel()
        rows = plain.ravel() % len(self)
        if is_padding.all():
            rows[:] = self.shortest_row
            bucket = self.bucket_of[self.shortest_row]
        rows[is_padding] = rows[is_padding.argmin()]
        seq_len = self.lengths[bucket]
        inputs, lengths = self._tokens(rows, seq_len)
        inputs |= self._columns(rows, is_padding, seq_len)
        shape = items.shape
        counts = self._counts(is_padding, inputs.get(LABELS)).reshape(shape).sum(1)
        tokens_each = np.where(is_padding, 0, lengths).reshape(shape).sum(1)
        tensors = {
            name: torch.from_numpy(value.reshape(*shape, *value.shape[1:]))
            for name, value in inputs.items()
        }
        return {"inputs": tensors, "count": counts.tolist(), "tokens": tokens_each.tolist()}

    def _tokens(self, rows: np.ndarray, seq_len: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the inputs [B, S] that every model has, and the length of each row [B]."""
        tokens = self.tokens.take(rows)
        lengths = np.array(list(map(len, tokens)))
        longest = lengths.max(initial=0)
        if longest > seq_len:
            raise ValueError(f"a row of {longest} tokens in a batch of {seq_len}")
        input_ids = np.full((len(rows), seq_len), self.pad_id, np.int64)
        for number, (row_tokens, length) in enumerate(zip(tokens, lengths.tolist(), strict=True)):
            input_ids[number, :length] = row_tokens
        positions = np.arange(seq_len)
        is_token = positions < lengths[:, None]
        is_second = is_token & (positions >= self.second_at[rows][:, None])
        token_types = is_second.astype(np.int64)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": is_token.astype(np.int64),
            "token_type_ids": token_types,
        }
        return inputs, lengths

    def _columns(
        self, rows: np.ndarray, is_padding: np.ndarray, seq_len: int
    ) -> dict[str, np.ndarray]:
        """Return the additional inputs. Those of padding are IGNORE_INDEX, or NaN in columns of floats."""
        inputs: dict[str, np.ndarray] = {}
        for name, dtype in self.dtypes.items():
            fill: float = IGNORE_INDEX
            if dtype.kind == "f":
                fill = np.nan  # any number may be a target
            if name in self.values:
                inputs[name] = self.values[name][rows].astype(dtype, copy=False)
                inputs[name][is_padding] = fill
                continue
            inputs[name] = np.full((len(rows), seq_len), fill, dtype)
            for number, values in enumerate(self.lists[name].take(rows)):
                if not is_padding[number]:
                    inputs[name][number, : len(values)] = values
        return inputs

    def _counts(self, is_padding: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
        """Return the number (or weight) of each row's labels, [rows] float64. Without labels, it is 1 for each row."""
        if labels is None:
            return (~is_padding).astype(np.float64)
        has_label = labels != IGNORE_INDEX
        if labels.dtype.kind == "f":
            has_label = ~np.isnan(labels)
        if self.weights is None:
            return has_label.reshape(len(labels), -1).sum(1).astype(np.float64)
        weights = np.asarray(self.weights, np.float64)[np.where(has_label, labels, 0)]
        return np.where(has_label, weights, 0.0)
