"""Tensors of which each rank saves its rows, and whole tensors put together from such pieces again.

An engine puts `piece(...)` in place of a tensor into its part of the state. A file of a checkpoint may come from
elsewhere: pieces are compared with one another before any is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from train.storage.schema import BadContent, shown

KEYS = {"rows", "first_row", "num_rows"}


def piece(rows: Tensor, first_row: int, num_rows: int) -> dict[str, Any]:
    """Some rows of a tensor that has `num_rows`, as a checkpoint holds them."""
    return {"rows": rows, "first_row": first_row, "num_rows": num_rows}


class Tensors(Mapping[Any, Tensor]):
    """The tensors of several files, by name. One that is in pieces is put together whenever it is asked for, so that
    the caller decides how many are in memory at once.
    """

    def __init__(self, files: Mapping[str, Any]) -> None:
        """`files`: the content of each, by its name. Raises BadContent unless every tensor is there once: whole in one
        of them, or all of its rows.
        """
        self.rows: dict[Any, list[tuple[str, Any]]] = {}
        for file, content in files.items():
            for name, value in of_type(content, dict, file, "it").items():
                self.rows.setdefault(name, []).append((file, value))
        for name, values in self.rows.items():
            check_covered(shown(name), values)

    def __getitem__(self, name: Any) -> Tensor:
        values = [value for _, value in self.rows[name]]
        if isinstance(values[0], Tensor):
            return values[0]
        rows = [value["rows"] for value in sorted(values, key=lambda value: value["first_row"])]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def check_covered(name: str, values: list[tuple[str, Any]]) -> None:
    """Raises BadContent unless the values that files have for a tensor are the whole one, once, or all its rows."""
    whole = [file for file, value in values if isinstance(value, Tensor)]
    if whole:
        if len(values) > 1:
            raise BadContent(f"{values[-1][0]}: {name} is in {values[0][0]} as well")
        return
    for file, value in values:
        check_piece(name, file, value)
    values = sorted(values, key=lambda item: item[1]["first_row"])
    file, first = values[0]
    kind, end = kind_of(first), 0
    for file, value in values:
        if kind_of(value) != kind:
            raise BadContent(f"{file}: {name} has another shape or type than in {values[0][0]}")
        if value["first_row"] != end:
            raise BadContent(f"{file}: {name} has rows from {value['first_row']} on, the others end at {end}")
        end += len(value["rows"])
    if end != first["num_rows"]:
        raise BadContent(f"{file}: {name} ends at row {end} of {first['num_rows']}")


def check_piece(name: str, file: str, value: Any) -> None:
    of_type(value, dict, file, name)
    if value.keys() != KEYS:
        raise BadContent(f"{file}: {name} holds {shown(sorted(map(str, value)))}, not {shown(sorted(KEYS))}")
    if not len(of_type(value["rows"], Tensor, file, name).shape):
        raise BadContent(f"{file}: {name} is one number, which has no rows")
    for key in ("first_row", "num_rows"):
        of_type(value[key], int, file, f"{name}.{key}")


def kind_of(value: dict[str, Any]) -> tuple[Any, ...]:
    """What all pieces of a tensor have in common."""
    return value["rows"].shape[1:], value["rows"].dtype, value["rows"].layout, value["num_rows"]


def of_type(value: Any, kind: type, file: str, name: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):  # which is an int
        raise BadContent(f"{file}: {name} holds {shown(value)}, not {kind.__name__}")
    return value
