"""Parts of all backends: the timer of work, seeds, flat collectives, files of tensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from train.backend.graphs import Compilers
from train.backend.nonfinite import Skips
from train.config import InputError
from train.ranks import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from train.backend import State

RANK_STRIDE = 1_000_003  # a prime: the seeds of neighbouring runs and ranks differ


class Work:
    """Seconds of this rank's own work, timed on the host."""

    def __init__(self) -> None:
        self.taken_s = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.taken_s += time.perf_counter() - began_s

    def take_s(self) -> float:
        taken_s, self.taken_s = self.taken_s, 0.0
        return taken_s


class Base:
    """See `train.backend.Backend`."""

    name: str
    to_host: Callable[[Sequence[Tensor]], list[Tensor]]
    may_compile = False
    skips: Skips  # made when the model moves: made later, it would give the first step another graph on XLA

    def __init__(self) -> None:
        self.world, self.work, self.span, self.compilers = World(), Work(), Work(), Compilers()
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def copy_to_host(self, tensors: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        for buffer, copy in zip(buffers, self.to_host(tensors), strict=True):
            buffer.copy_(copy)

    def mesh(self) -> DeviceMesh:
        raise InputError(
            f"backend={self.name} has no collectives of torch.distributed that could split a model's state over ranks; "
            "choose parallel=data without shard_optimizer"
        )

    def subgroup(self, ranks: list[int]) -> dist.ProcessGroup:
        raise InputError(f"parallel=pipeline runs with backend=ddp, not backend={self.name}; set parallel=data")

    def mark_step(self) -> None: ...

    def profile_text(self) -> str:
        return ""

    def close(self) -> None:
        """Leave the group. The model and optimizer must be out of scope: DDP's wrapper sits in a reference cycle, and
        gloo threads that still hold its tensors at exit abort the process (https://github.com/pytorch/pytorch/pull/179291).
        """
        if self.world.is_distributed:
            gc.collect()
            self.world.barrier()
            dist.destroy_process_group()


def peak_device_bytes() -> int | None:
    """The most bytes that PyTorch's allocator had handed out on this process's device; None where there is none."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of one flat tensor in the shapes of others that were concatenated to it."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def all_reduce_flat(tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """The sums of tensors over the ranks of a group, in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    return split_like(flat, tensors)


def load(path: Path) -> State:
    """Tensors and plain containers that a backend has saved, on the host. The file is mapped: the ranks of a machine
    share its pages, and none of them copies what it only reads.
    """
    state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return state
