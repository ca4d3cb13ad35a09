"""The engines' base class.

An engine holds a model and its optimizer, runs steps, saves and loads state. Losses are sums over labels. Gradients are
reduced once per step: `GradSync.reduce` (train/parallel/grad_sync.py) returns the label count of all ranks, by which
the engine's `clip` divides the gradients in the pass that clips them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.config import OptimConfig, ParallelConfig
from train.parallel import guards
from train.parallel.optim import load_state, set_learning_rate

if TYPE_CHECKING:
    from train.data.batches.loader import Batch
    from train.parallel.backend import Backend, State
    from train.parallel.grad_sync import GradSync
    from train.parallel.pieces import Tensors

LossFunction = Callable[[nn.Module, dict[str, Tensor]], Tensor]
Statistics = LossFunction
ENGINES = {  # the engines' modules; each has a function `build`
    "data": "train.parallel.data",
    "fsdp": "train.parallel.fsdp",
    "pipeline": "train.parallel.pipeline",
}


class Engine:
    """A model with its optimizer and training steps. All ranks must call the methods in the same order.

    In a step, call `begin_step`, `forward_backward` for each micro batch, `reduce_and_clip` and `optimizer_step`. The
    methods for checkpoints assume that every rank holds the whole model. Engines that split the model override them.
    """

    parameters: list[nn.Parameter]  # parameters that this rank trains
    sync: GradSync  # reduces gradients over the ranks
    data_rank: int  # ranks with the same data_rank read the same rows
    data_size: int  # number of different data_ranks
    loss_sum: Tensor  # [1], on the device: sum of losses since the last `take_loss`; a resumed run restores it
    failure: Exception | None = None  # why this rank cannot continue; the ranks vote on it

    def __init__(
        self, backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Store the model, which must include the task's head, and its optimizer."""
        self.backend = backend
        self.model = model
        self.optimizer = optimizer

    def ready(self) -> None:
        """Prepare the first step. Call this after weights and optimizer state have been loaded."""
        self.backend.ready(self.optimizer, self.parameters)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, count: float, lr: float) -> None:
        """Begin a step at learning rate `lr`. Its micro batches have `count` labels in total on this data rank."""
        set_learning_rate(self.optimizer, lr)
        self.sync.begin(count)

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        """Accumulate a micro batch's gradients and loss sum. `is_last` marks the last micro batch of a step."""
        raise NotImplementedError

    def reduce_and_clip(self) -> Tensor:
        """Reduce gradients, divide by the label count, and clip them. Returns the global norm [] before clipping."""
        divisor = self.sync.reduce()
        self.backend.unscale(self.optimizer, self.parameters)
        return self.clip(divisor)

    def clip(self, divisor: Tensor) -> Tensor:
        """Divide the reduced gradients by `divisor` [1] and clip them. Returns their global norm [] before clipping."""
        raise NotImplementedError

    def optimizer_step(self, norm: Tensor) -> None:
        """Update the weights and clear the gradients. If `norm` is not finite, no rank updates anything."""
        self.backend.optimizer_step(self.optimizer, self.parameters, norm)

    def take_loss(self) -> float:
        """Return this rank's loss sum since the last call. Waits for the device."""
        taken = float(self.backend.to_host([self.loss_sum])[0])
        # Zeros are copied from the host into the same tensor, because a new tensor, or zeros created on the device,
        # would change XLA's graph.
        self.loss_sum.copy_(torch.zeros(1))
        return taken

    def evaluate(self, statistics: Statistics, inputs: dict[str, Tensor]) -> Tensor | None:
        """Return statistics [batch, n] of a batch, on the device; None on ranks that do not compute them."""
        raise NotImplementedError

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Raise RuntimeError if a few small weights, which should be equal on all ranks, differ."""
        guards.check_same(self.backend, self.model, guards.smallest(self.model.parameters()))

    def state(self) -> dict[str, State]:
        """Return this rank's part of a checkpoint; {} if other ranks save everything.

        A part has "model" (tensors by name) and "optimizer" (without its settings). A tensor is in one part only,
        unless it is split into `piece`s. Everything outside "model" and the optimizer's "state" is in rank 0's part.
        """
        if self.backend.world.rank > 0:
            return {}
        return self.local_state_dict()

    def local_state_dict(self) -> dict[str, State]:
        """Return all the state that this rank holds."""
        moments = self.optimizer.state_dict()
        groups = [{"params": group["params"]} for group in moments["param_groups"]]
        optimizer = {**moments, "param_groups": groups}
        if self.backend.scaler.is_enabled():
            optimizer["loss_scale"] = self.backend.scaler.state_dict()
        # keep_vars returns the parameters themselves, so tied names get the same object.
        return {"model": self.model.state_dict(keep_vars=True), "optimizer": optimizer}

    def load(self, model: Tensors, optimizer: State) -> None:
        """Restore this rank's share of a checkpoint, which any number of ranks on any device may have saved.

        Tensors are read only when accessed. Raises InputError if the saved optimizer has more or fewer parameters.
        """
        self.model.load_state_dict(model)
        load_state(self.optimizer, optimizer)
        if "loss_scale" in optimizer:
            self.backend.scaler.load_state_dict(optimizer["loss_scale"])

    def gather_full_model(self) -> None:
        """Collect the trained weights of all ranks in rank 0's model, so that it can be exported."""


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
    """Return the engine for these settings. See `Backend.setup_model` for `accumulation` and `lengths`."""
    module: Any = import_module(ENGINES[cfg.name])  # a run imports only the engine that it uses
    engine: Engine = module.build(
        cfg, optim, backend, model, loss, accumulation=accumulation, lengths=lengths
    )
    return engine
