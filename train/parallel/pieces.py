"""Tensors that are saved in pieces, some rows by each rank, and `Tensors`, which reads them.

In its part of a checkpoint, an engine replaces such a tensor with `piece(...)`. The files of a checkpoint may come from
an untrusted source, so all pieces of a tensor are checked against each other before any is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from train.storage.schema import BadContent, record, shown


class Piece(TypedDict):
    """Some rows of a tensor that has `num_rows` rows in total, as saved in a checkpoint."""

    rows: Any
    first_row: int
    num_rows: int


def piece(rows: Tensor, first_row: int, num_rows: int) -> Piece:
    return {"rows": rows, "first_row": first_row, "num_rows": num_rows}


class Tensors(Mapping[Any, Tensor]):
    """The tensors of several files, by name.

    A tensor in pieces is assembled at each access and not kept, so that the caller controls the memory.
    """

    def __init__(self, files: Mapping[str, Any], *, are_all: bool = True) -> None:
        """Index the tensors of `files`, by tensor name. Raises BadContent unless `check_covered` accepts all."""
        self.found: dict[Any, list[tuple[str, Any]]] = {}
        for file, content in files.items():
            if not isinstance(content, dict):
                raise BadContent(f"{file}: it holds {shown(content)}, not an object")
            for name, value in content.items():
                self.found.setdefault(name, []).append((file, value))
        for name, values in self.found.items():
            check_covered(shown(name), values, are_all=are_all)

    def __getitem__(self, name: Any) -> Tensor:
        return self.rows(name, slice(None))

    def shape(self, name: Any) -> torch.Size:
        """Return the shape of the whole tensor."""
        _, value = self.found[name][0]
        if isinstance(value, Tensor):
            return value.shape
        return torch.Size([value["num_rows"], *value["rows"].shape[1:]])

    def rows(self, name: Any, wanted: slice) -> Tensor:
        """Return rows of a tensor, reading only the files that have them. Raises BadContent if a row is in no file."""
        values = [value for _, value in self.found[name]]
        if isinstance(values[0], Tensor):
            if wanted == slice(None):
                return values[0]
            return values[0][wanted]
        start, stop, _ = wanted.indices(values[0]["num_rows"])
        rows = []
        for value in sorted(values, key=lambda value: value["first_row"]):
            first = value["first_row"]
            own = value["rows"][max(0, start - first) : max(0, stop - first)]
            if len(own):
                rows.append(own)
        if sum(map(len, rows)) != max(0, stop - start):
            raise BadContent(
                f"rows {start} to {stop} of {shown(name)} are not in the files that should have them"
            )
        if len(rows) == 1:
            return rows[0]
        return torch.cat(rows or [values[0]["rows"][:0]])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def check_covered(name: str, values: list[tuple[str, Any]], *, are_all: bool) -> None:
    """Raise BadContent unless the files have either one whole tensor or pieces that do not overlap.

    The pieces must cover all rows, unless `are_all` is False.
    """
    whole = [file for file, value in values if isinstance(value, Tensor)]
    if whole:
        if len(values) > 1:
            raise BadContent(f"{values[-1][0]}: {name} is also in {values[0][0]}")
        return
    for file, value in values:
        rows = record(Piece, value, f"{file}: {name}")["rows"]
        if not isinstance(rows, Tensor) or rows.ndim == 0:
            raise BadContent(f"{file}: {name} holds {shown(rows)}, not rows of a tensor")
    values = sorted(values, key=lambda item: item[1]["first_row"])
    file, first = values[0]
    kind = kind_of(first)
    end = 0
    for file, value in values:
        if kind_of(value) != kind:
            raise BadContent(
                f"{file}: {name} differs in shape or dtype from that in {values[0][0]}"
            )
        if value["first_row"] < end or (are_all and value["first_row"] > end):
            raise BadContent(
                f"{file}: {name} has rows from {value['first_row']}, but the previous rows end at {end}"
            )
        end = value["first_row"] + len(value["rows"])
    if end > first["num_rows"] or (are_all and end < first["num_rows"]):
        raise BadContent(f"{file}: {name} ends at row {end} of {first['num_rows']}")


def kind_of(value: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties that all pieces of a tensor have in common."""
    return value["rows"].shape[1:], value["rows"].dtype, value["rows"].layout, value["num_rows"]
