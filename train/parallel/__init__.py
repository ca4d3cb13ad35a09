"""How a model and a step are split over ranks: the interface of engines, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from train.config import OptimConfig, ParallelConfig, check_choice

if TYPE_CHECKING:
    from train.backend import Backend
    from train.data.batches.loader import Batch
    from train.parallel.pieces import Tensors

State = dict[str, Any]  # tensors and plain containers
LossFunction = Callable[[nn.Module, dict[str, Tensor]], Tensor]
Statistics = LossFunction


class Checkpointed(Protocol):
    """What checkpoints see of an engine. All ranks call each method, in the same order."""

    model: nn.Module  # as the task has built it: its head, its sizes

    def check_replicas(self) -> None:
        """Raise RuntimeError if ranks that should hold the same weights do not."""

    def state(self) -> dict[str, State]:
        """This rank's part of the state for a checkpoint, empty if other ranks have all of it: "model" by parameter
        names, "optimizer" without settings. No tensor is in two parts, unless as a `piece` in each. The part of rank 0
        has all that belongs neither to "model" nor to the optimizer's "state".
        """

    def sources(self, rank: int, num_ranks: int, settings: Mapping[str, Any]) -> set[int] | None:
        """The ranks, rank 0 left out, whose parts of a state `rank` loads, by the number of ranks and the settings of
        the run that saved it; None: all of them. No rank asks another one.
        """

    def load(self, model: Tensors, optimizer: State) -> None:
        """Restore what this rank holds of what the ranks' `state` returned, on any device and number of ranks. A tensor
        is read only when it is asked for. InputError if the optimizer's state is for another number of parameters.
        """


class Engine(Checkpointed, Protocol):
    """The owner of model, optimizer, a step and a checkpoint's state. All ranks call each method, in one order."""

    parameters: list[nn.Parameter]  # that this rank trains
    optimizer: torch.optim.Optimizer
    data_rank: int  # ranks with the same data_rank see the same rows
    data_size: int  # the number of different data_ranks
    loss_sum: Tensor  # [1], on the device: this rank's sum since it was last taken; a resumed run fills it

    def ready(self) -> None:
        """Called once weights and optimizer are as the first step finds them."""

    def begin_step(self, count: float, lr: float) -> None:
        """Begin a step at this learning rate, whose micro batches have `count` labels in the rows of this data rank."""

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        """Add the gradients and the loss sum of a micro batch. `is_last`: of this step."""

    def reduce_and_clip(self) -> Tensor:
        """Sum gradients over ranks, divide once by all labels, clip. Returns the global norm before clipping."""

    def optimizer_step(self, norm: Tensor) -> None:
        """Update by the clipped gradients and clear them. If their norm is not finite, nothing changes anywhere."""

    def take_loss(self) -> float:
        """This rank's loss sum since it was last taken. The sum is on the device, so this waits for it."""

    def evaluate(self, statistics: Statistics, inputs: dict[str, Tensor]) -> Tensor | None:
        """The statistics [batch, n] of a batch of this data rank, on the device; None on ranks without them."""

    def gather_full_model(self) -> None:
        """Put the trained weights of all ranks into the model of rank 0, to be exported."""


def build_engine(
    cfg: ParallelConfig,
    optim: OptimConfig,
    backend: Backend,
    model: nn.Module,
    loss: LossFunction,
    *,
    accumulation: int,
    lengths: int = 1,
) -> Engine:
    """`accumulation`: micro batches of a step on each rank; `lengths`: how many shapes batches have."""
    check_choice("parallel.name", cfg.name, tuple(ENGINES))
    module: Any = import_module(ENGINES[cfg.name])  # only runs that use an engine import it
    engine: Engine = module.build(cfg, optim, backend, model, loss, accumulation=accumulation, lengths=lengths)
    return engine


ENGINES = {
    "data": "train.parallel.data",
    "fsdp": "train.parallel.fsdp",
    "pipeline": "train.parallel.pipeline",
}
