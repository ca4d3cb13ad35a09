"""How a step is split over ranks: the door between the loop and the engines, and the table of engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from train.config import ParallelConfig, check_choice

if TYPE_CHECKING:
    from train.backend import Backend
    from train.data.batches import Batch

LossFunction = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Engine(Protocol):
    model: nn.Module  # the bare one: its parameters are trained, saved and exported
    parameters: list[nn.Parameter]
    loss_sum: Tensor  # [1], this rank's since it was last taken, on the device; a resumed run fills it

    def forward_backward(self, micro_batches: list[Batch], loss: LossFunction, count: float) -> None:
        """Gradients of the mean loss over `count` labels of all ranks and micro batches."""

    def take_loss(self) -> float:
        """This rank's loss sum since it was last taken. It is kept on the device: this waits for it."""


def build_engine(
    cfg: ParallelConfig, backend: Backend, model: nn.Module, *, accumulation: int, lengths: int = 1
) -> Engine:
    """`lengths`: how many shapes batches have."""
    from train.parallel import data

    table = {"data": data.DataParallel}
    check_choice("parallel.name", cfg.name, tuple(table))
    return table[cfg.name](backend, model, accumulation=accumulation, lengths=lengths)
