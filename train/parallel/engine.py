"""The base of all engines: the owner of a model, its optimizer, a step and their state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.parallel import guards
from train.parallel.optimizers import load_state, set_learning_rate

if TYPE_CHECKING:
    from train.data.batches.loader import Batch
    from train.parallel.backends import Backend
    from train.parallel.grad_sync import GradSync
    from train.parallel.pieces import Tensors

State = dict[str, Any]  # tensors and plain containers
LossFunction = Callable[[nn.Module, dict[str, Tensor]], Tensor]
Statistics = LossFunction


class Engine:
    """A model, its optimizer and its steps. All ranks call each method, in the same order.

    The state is that of a model which every rank holds whole; engines that split it override the methods. A step is
    `begin_step`, `forward_backward` for each micro batch, `reduce_and_clip`, `optimizer_step`.
    """

    parameters: list[nn.Parameter]  # parameters that this rank trains
    sync: GradSync  # adds gradients up over the ranks; train/parallel/grad_sync.py has the table of all ways
    data_rank: int  # ranks with the same data_rank see the same rows
    data_size: int  # the number of different data_ranks
    loss_sum: Tensor  # [1], on the device: this rank's sum since it was last read; a resumed run restores it

    def __init__(self, backend: Backend, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take a `model` that the task has built, with its head and its sizes."""
        self.backend, self.model, self.optimizer = backend, model, optimizer

    def ready(self) -> None:
        """Prepare the first step, once weights and optimizer are final."""
        self.backend.ready(self.optimizer, self.parameters)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, count: float, lr: float) -> None:
        """Begin a step at this learning rate, whose micro batches have `count` labels in the rows of this data rank."""
        set_learning_rate(self.optimizer, lr)
        self.sync.begin(count)

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        """Add the gradients and the loss sum of a micro batch. `is_last`: it is the last of this step."""
        raise NotImplementedError

    def reduce_and_clip(self) -> Tensor:
        """Add gradients up over ranks, divide once by all labels, clip. Returns the global norm [] before clipping."""
        divisor = self.sync.reduce()
        self.backend.unscale(self.optimizer, self.parameters)
        return self.clip(divisor)

    def clip(self, divisor: Tensor) -> Tensor:
        """Divide the reduced gradients by `divisor` [1] and clip them. Returns their global norm [] before clipping."""
        raise NotImplementedError

    def optimizer_step(self, norm: Tensor) -> None:
        """Update by the clipped gradients and clear them. If their norm is not finite, nothing changes anywhere."""
        self.backend.optimizer_step(self.optimizer, self.parameters, norm)

    def take_loss(self) -> float:
        """Return this rank's loss sum since the last call. The sum is on the device, so this waits for it."""
        taken = float(self.backend.to_host([self.loss_sum])[0])
        # The tensor is kept and filled from the host: a new one, or zeros made on the device, would change the graph.
        self.loss_sum.copy_(torch.zeros(1))
        return taken

    def evaluate(self, statistics: Statistics, inputs: dict[str, Tensor]) -> Tensor | None:
        """Return the statistics [batch, n] of a batch of this data rank, on the device; None on ranks without them."""
        raise NotImplementedError

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        """Raise RuntimeError if a few small weights differ between ranks that should hold the same ones."""
        weights = guards.smallest(self.model.parameters())
        sums = [float(copy.double().sum()) for copy in self.backend.to_host(weights)]
        guards.check_same(self.backend.world.gather(sums))

    def state(self) -> dict[str, State]:
        """Return this rank's part of the state for a checkpoint, empty if other ranks have all of it.

        It has "model" by parameter names and "optimizer" without settings. No tensor is in two parts, unless as a
        `piece` in each. The part of rank 0 has everything outside "model" and the optimizer's "state".
        """
        state = self.local_state_dict()
        return state if self.backend.world.rank == 0 else {}

    def local_state_dict(self) -> dict[str, State]:
        """Return the part of the state that this rank holds."""
        moments = self.optimizer.state_dict()
        groups = [{"params": group["params"]} for group in moments["param_groups"]]
        scaler = self.backend.scaler
        scale = {"loss_scale": scaler.state_dict()} if scaler.is_enabled() else {}
        # With keep_vars these are the parameters themselves: tied names share one.
        return {
            "model": self.model.state_dict(keep_vars=True),
            "optimizer": {**moments, "param_groups": groups, **scale},
        }

    def sources(self, rank: int, num_ranks: int, settings: Mapping[str, Any]) -> set[int] | None:
        """Return the ranks other than 0 whose parts of a state `rank` loads; None: all.

        They follow from the number of ranks and the settings of the run that saved it, so that no rank asks another
        one.
        """
        return None

    def load(self, model: Tensors, optimizer: State) -> None:
        """Restore this rank's share of the saved parts, from any device and number of ranks.

        A tensor is read only when it is asked for. Raises InputError if the optimizer's state has another number of
        parameters.
        """
        self.model.load_state_dict(model)
        load_state(self.optimizer, optimizer)
        if "loss_scale" in optimizer:
            self.backend.scaler.load_state_dict(optimizer["loss_scale"])

    def gather_full_model(self) -> None:
        """Put the trained weights of all ranks into the model of rank 0, to be exported."""
