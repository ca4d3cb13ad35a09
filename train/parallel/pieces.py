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

    def __init__(self, files: Mapping[str, Any]) -> None:
        """Index the tensors of `files`, by tensor name. Raises BadContent unless `in_order` accepts all."""
        found: dict[Any, dict[str, Any]] = {}
        for file, content in files.items():
            if not isinstance(content, dict):
                raise BadContent(f"{file}: it holds {shown(content)}, not an object")
            for name, value in content.items():
                found.setdefault(name, {})[file] = value
        self.found = {name: in_order(shown(name), values) for name, values in found.items()}

    def __getitem__(self, name: Any) -> Tensor:
        return self.rows(name, slice(None))

    def shape(self, name: Any) -> torch.Size:
        """Return the shape of the whole tensor."""
        found = self.found[name]
        if isinstance(found, Tensor):
            return found.shape
        first = found[0]
        of_row = first["rows"].shape[1:]
        return torch.Size([first["num_rows"], *of_row])

    def rows(self, name: Any, wanted: slice) -> Tensor:
        """Return rows of a tensor, reading only the files that have them."""
        found = self.found[name]
        if isinstance(found, Tensor):
            if wanted == slice(None):
                return found
            return found[wanted]
        start, stop, _ = wanted.indices(found[0]["num_rows"])
        rows = []
        for piece in found:
            begin = max(0, start - piece["first_row"])
            end = max(0, stop - piece["first_row"])
            own = piece["rows"][begin:end]
            if len(own):
                rows.append(own)
        if len(rows) == 1:
            return rows[0]
        none = found[0]["rows"][:0]
        return torch.cat(rows or [none])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def in_order(name: str, values: dict[str, Any]) -> Tensor | list[Piece]:
    """Return a whole tensor, or the pieces of one in the order of their rows, from the values by file.

    Raises BadContent unless the files have either one whole tensor, or pieces that have each row once.
    """
    whole, *others = values.values()
    if isinstance(whole, Tensor) and not others:
        return whole
    pieces = {file: piece_of(f"{file}: {name}", value) for file, value in values.items()}
    files = sorted(pieces, key=lambda file: pieces[file]["first_row"])
    first = pieces[files[0]]
    kind = kind_of(first)
    end = 0
    for file in files:
        where = f"{file}: {name}"
        piece = pieces[file]
        if kind_of(piece) != kind:
            raise BadContent(f"{where} differs in shape or dtype from that in another file")
        begin = piece["first_row"]
        if begin != end:
            raise BadContent(f"{where} has rows from {begin}, but the previous rows end at {end}")
        end += len(piece["rows"])
    if end != first["num_rows"]:
        raise BadContent(f"{where} ends at row {end} of {first['num_rows']}")
    return [pieces[file] for file in files]


def piece_of(where: str, value: Any) -> Piece:
    """Return the piece in a file. Raises BadContent if it is anything else."""
    if isinstance(value, Tensor):
        raise BadContent(f"{where} is also in another file")
    piece = record(Piece, value, where)
    rows = piece["rows"]
    if not isinstance(rows, Tensor) or rows.ndim == 0:
        raise BadContent(f"{where} holds {shown(rows)}, not rows of a tensor")
    return piece


def kind_of(value: Piece) -> tuple[Any, ...]:
    """Return the properties that all pieces of a tensor have in common."""
    rows = value["rows"]
    return rows.shape[1:], rows.dtype, value["num_rows"]
