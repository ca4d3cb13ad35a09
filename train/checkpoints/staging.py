"""The copy on the host that a save is written from, while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from train.backend import Backend

State = dict[str, Any]  # tensors and plain containers


class Staging:
    """Host memory that stays from save to save: the first touch of a page costs many times what copying to it does
    (benchmarks/README.md). It is as large as the state, and one save uses it at a time.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []  # one for each tensor of the state, in its order

    def copy(self, state: State, backend: Backend) -> State:
        """The same state, its tensors copied to the host. Waits for the device."""
        tensors, numbered = self.laid_out(state, backend)
        backend.copy_to_host([tensor.detach() for tensor in tensors], self.buffers)
        return put_back(numbered, self.buffers)

    def warm(self, state: State, backend: Backend) -> None:
        """Make the memory that `copy` will need, and touch it."""
        self.laid_out(state, backend)
        for buffer in self.buffers:
            buffer.zero_()

    def laid_out(self, state: State, backend: Backend) -> tuple[list[Tensor], Any]:
        """The tensors, each with its buffer, and the state with their places in them."""
        places: dict[int, int] = {}  # by identity: tied weights are one parameter, and stay one
        tensors: list[Tensor] = []

        def number(tensor: Tensor) -> int:
            if id(tensor) not in places:
                places[id(tensor)] = len(tensors)
                tensors.append(tensor)
            return places[id(tensor)]

        numbered = replace_tensors(state, number)
        alike = len(tensors) == len(self.buffers) and all(map(is_alike, self.buffers, tensors))
        if not alike:
            self.buffers = [
                torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=backend.pin_memory) for tensor in tensors
            ]
        return tensors, numbered


class Place(int):
    """Where a tensor was."""


def is_alike(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def replace_tensors(value: Any, number: Callable[[Tensor], int]) -> Any:
    if isinstance(value, Tensor):
        return Place(number(value))
    if isinstance(value, dict):
        return {key: replace_tensors(item, number) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_tensors(item, number) for item in value]
    return value


def put_back(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: put_back(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [put_back(item, tensors) for item in value]
    return value


def first_not_finite(state: State) -> str | None:
    """The name of a floating tensor that holds NaN or infinity, in `model` or in the optimizer's moments."""
    for name, tensor in named(state):
        is_number = tensor.is_floating_point() and tensor.numel()
        if is_number and not all(map(torch.isfinite, torch.aminmax(tensor))):  # many times faster than a norm
            return name
    return None


def named(value: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(prefix, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in items for found in named(item, f"{prefix}.{key}" if prefix else str(key))]


def num_bytes_of(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    items = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return sum(num_bytes_of(item) for item in items)


def state_of(model: nn.Module, moments: State) -> State:
    # The parameters themselves: of those that are tied, both names have the same.
    return {"model": model.state_dict(keep_vars=True), "optimizer": moments}
