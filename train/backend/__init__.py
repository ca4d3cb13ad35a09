"""On what device a run runs: the door between the loop and the hardware, and the table of backends.

Values between ranks go two ways: gradients over the device's own collectives inside `wrap`, and a few plain numbers a
step over the hosts (gloo), so that no decision of the loop has to wait for a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from train.config import BackendConfig, check_choice

if TYPE_CHECKING:
    from train.data.batches import Batch

State = dict[str, Any]  # tensors and plain containers


class Backend(Protocol):
    """Every verb that takes part in a collective is called by all ranks, in the same order."""

    name: str
    device: torch.device
    device_name: str
    precision: str  # fp32 | bf16
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    pin_memory: bool  # host batches in page-locked memory, so that copies to the device overlap with work

    def wrap(self, model: nn.Module, *, accumulates: bool) -> nn.Module:
        """Put the model on the device and reduce its gradients over the ranks in backward."""

    def feed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches with their inputs on the device."""

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes run in the run's precision inside."""

    def accumulate(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients stay local in backward passes inside, but for the last of a step."""

    def step(self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        """Clip, update, clear the gradients. Gives the gradients' global norm before clipping, left on the device."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Numbers added over all ranks, on the hosts."""

    def gather(self, value: State) -> list[State]:
        """Every rank's value in rank order, on rank 0; an empty list elsewhere."""

    def broadcast(self, value: int) -> int:
        """Rank 0's value, on all ranks."""

    def seed(self, seed: int) -> None:
        """Random numbers of this rank (dropout): a function of seed and rank."""

    def rng_state(self) -> State: ...

    def set_rng_state(self, state: State) -> None: ...

    def save(self, state: State, path: Path) -> None:
        """Write tensors and plain containers, all on the CPU, readable by every backend. Rank 0 calls it."""

    def load(self, path: Path) -> State: ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def open_backend(cfg: BackendConfig) -> Backend:
    """Open the device and join the other ranks. Raises InputError if this machine has no such device."""
    from train.backend import ddp  # here: each backend's imports are paid by its own runs

    table = {"auto": ddp.DDP, "ddp": ddp.DDP}
    check_choice("backend.name", cfg.name, tuple(table))
    return table[cfg.name](cfg)
