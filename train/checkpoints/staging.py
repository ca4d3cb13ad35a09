"""The copy of the state in host memory, which a save writes while training continues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

if TYPE_CHECKING:
    from train.parallel.backends import Backend

State = dict[str, Any]  # tensors and plain containers
ALIGNMENT = 64  # bytes


class Staging:
    """Host memory that all saves reuse: first touching a page takes far longer than a copy (benchmarks/notes.md).

    It is as large as the state. Only one save at a time may use it.
    """

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []  # one for each tensor of the state, in the same order

    def copy(self, state: State, backend: Backend) -> State:
        """Return the state with its tensors copied to the host. Waits for the device."""
        tensors = self.laid_out(state, backend)
        backend.copy_to_host([tensor.detach() for tensor in tensors], self.buffers)
        copies = {}
        for tensor, buffer in zip(tensors, self.buffers, strict=True):
            copies[id(tensor)] = buffer
        return tree_map_only(Tensor, lambda tensor: copies[id(tensor)], state)

    def laid_out(self, state: State, backend: Backend) -> list[Tensor]:
        """Return the state's tensors, after allocating a buffer for each if needed. Tied weights share a buffer."""
        tensors = list({id(tensor): tensor for _, tensor in named(state)}.values())
        if list(map(form_of, self.buffers)) != list(map(form_of, tensors)):
            self.buffers = buffers_like(tensors, page_locked=backend.pin_memory)
        return tensors


def form_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype


def buffers_like(tensors: list[Tensor], *, page_locked: bool) -> list[Tensor]:
    """Return an uninitialised host tensor for each tensor, with its shape and dtype.

    Their memory is one piece, because PyTorch would round each page-locked piece up to a power of two.
    """
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    memory = torch.empty(sum(sizes), dtype=torch.uint8)
    if page_locked:
        lock_pages(memory)
    buffers = []
    start = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        buffers.append(buffer_like(tensor, memory, start))
        start += size
    return buffers


def buffer_like(tensor: Tensor, memory: Tensor, start: int) -> Tensor:
    """Return a tensor with the shape and dtype of `tensor`, whose storage is a part of `memory`."""
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    # a storage of its own, because torch.save writes whole storages
    buffer = torch.frombuffer(
        memory.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=start
    )
    return buffer.view(tensor.shape)


def lock_pages(memory: Tensor) -> None:
    """Page-lock a host tensor until it is freed, so that copies from the device do not wait."""
    cudart = torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())


def first_not_finite(state: State) -> str | None:
    """Return the name of a floating-point tensor that contains NaN or infinity; None if there is no such tensor."""
    for name, tensor in named(state):
        is_number = tensor.is_floating_point() and tensor.numel()
        # many times faster than a norm
        if is_number and not all(map(torch.isfinite, torch.aminmax(tensor))):
            return name
    return None


def named(value: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    """List all tensors of a state with their names, such as "model.embeddings.weight"."""
    if isinstance(value, Tensor):
        return [(prefix, value)]
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        items = ()
    found = []
    for key, item in items:
        name = str(key)
        if prefix:
            name = f"{prefix}.{key}"
        found += named(item, name)
    return found


def num_bytes_of(state: Any) -> int:
    return sum(tensor.nbytes for _, tensor in named(state))
