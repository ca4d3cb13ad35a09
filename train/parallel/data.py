"""Data parallelism: every rank holds the whole model and trains it on a share of each batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.config import OptimConfig, ParallelConfig, check
from train.parallel.captured import Graphs, Inputs
from train.parallel.engines import Engine
from train.parallel.grad_sync import gradients_of
from train.parallel.optim import build_optimizer, set_learning_rate
from train.parallel.proof import Proof

if TYPE_CHECKING:
    from train.data.batches.loader import Batch
    from train.parallel.backend import Backend, State
    from train.parallel.ddp import DDP
    from train.parallel.engines import LossFunction, Statistics
    from train.parallel.grad_sync import GradSync
    from train.parallel.pieces import Tensors


EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def build(
    cfg: ParallelConfig, optim: OptimConfig, backend: Backend, *args: Any, **options: Any
) -> DataParallel:
    if backend.captures:
        return Captured(optim, backend, *args, **options)
    return DataParallel(optim, backend, *args, **options)


class DataParallel(Engine):
    """The engine in which every rank holds the whole model and trains it on a share of each batch."""

    def __init__(
        self,
        optim: OptimConfig,
        backend: Backend,
        model: Any,
        loss: LossFunction,
        *,
        accumulation: int,
        lengths: int = 1,
    ) -> None:
        self.backend = backend
        self.model = model
        self.loss = loss
        self.data_rank = backend.world.rank
        self.data_size = backend.world.size
        self.max_grad_norm = optim.max_grad_norm
        backend.setup_model(model, accumulation=accumulation, lengths=lengths)
        backend.leave_out_padding(model)  # stages of a pipeline hand on rows
        self.sync = self.build_sync(accumulation)
        self.parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self.optimizer = build_optimizer(
            optim, self.parameters, adamw=backend.adamw, head=model.head_parameters()
        )
        self.loss_sum = torch.zeros(1).to(backend.device)

    def build_sync(self, accumulation: int) -> GradSync:
        return self.backend.grad_sync(self.model, accumulation=accumulation)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        self.backend.try_graphs(lambda: self._gradients(batch))
        with self.sync.micro_batch(is_last=is_last):  # XLA may end a graph when this context exits
            self._add_gradients(batch)

    def _gradients(self, batch: Batch) -> object:
        """Return the gradients of a micro batch, without accumulating them in the parameters."""
        with self.backend.autocast():
            loss_sum = self.loss(self.model, batch["inputs"])
        return torch.autograd.grad(loss_sum, self.parameters, allow_unused=True)

    def _add_gradients(self, batch: Batch) -> None:
        # This is a separate function so that its tensors are freed before XLA ends a graph: otherwise graphs differ.
        with self.backend.work.timed(), self.backend.autocast():
            loss_sum = self.loss(self.sync.module, batch["inputs"])
        self.backend.scaler.scale(loss_sum).backward()
        self.loss_sum += loss_sum.detach()

    def clip(self, divisor: Tensor) -> Tensor:
        return divide_and_clip(self.parameters, divisor, self.max_grad_norm)

    def evaluate(self, statistics: Statistics, inputs: dict[str, Tensor]) -> Tensor:
        # one context per batch: casts cached from another batch would change XLA's graph
        with self.backend.autocast():
            return statistics(self.model, inputs)


class Captured(DataParallel):
    """The engine whose steps are CUDA graphs.

    With one rank and one micro batch per step, the whole step is one graph, which `forward_backward` runs. Otherwise a
    micro batch is one graph, and the update is another. With several ranks, the last micro batch is a row of graphs
    between which gradients are sent. Weights, moments, counts and the learning rate must keep their addresses.
    """

    backend: DDP

    def __init__(
        self, optim: OptimConfig, backend: Backend, *args: Any, accumulation: int, **options: Any
    ) -> None:
        backend.adamw = {**backend.adamw, "capturable": True}
        super().__init__(optim, backend, *args, accumulation=accumulation, **options)
        check(
            all(isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups),
            f"optim.name={optim.name}: its learning rate is a Python number, which a CUDA graph would not "
            "update; set backend.cuda_graphs=false",
        )
        self.is_whole = accumulation == 1 and self.data_size == 1
        self.norm = torch.zeros((), device=self.backend.device)
        self.graphs = Graphs(Proof(self), must=self.backend.must_capture)
        # These let a step begin again when it runs out of memory.
        self.earlier_loss = torch.zeros_like(self.loss_sum)
        self.rng: State = {}
        self.begun: list[tuple[bool, Inputs]] = []
        self.is_updating = False
        self.sync.outside = self.graphs.outside
        self.sync.count = torch.zeros_like(self.loss_sum)

    def begin_step(self, count: float, lr: float) -> None:
        self.lr = lr
        set_learning_rate(self.optimizer, lr)
        self.sync.count.copy_(torch.tensor([float(count)]), non_blocking=True)
        self.sync.add_counts()
        self.earlier_loss.copy_(self.loss_sum)
        self.rng = self.backend.rng_state()
        self.begun.clear()

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        self.backend.try_graphs(lambda: self._gradients(batch))
        self.begun.append((is_last, batch["inputs"]))
        with self.backend.work.timed():
            self._run(self._part(is_last), batch["inputs"])

    def reduce_and_clip(self) -> Tensor:
        if not self.is_whole:
            self.sync.reduce()
            self._run(self._update, {})
        return self.norm

    def optimizer_step(self, norm: Tensor) -> None:
        self.backend.end_step()  # the graph has already updated the weights

    def take_loss(self) -> float:
        self.graphs.report()
        return super().take_loss()

    def evaluate(self, statistics: Statistics, inputs: Inputs) -> Tensor:
        try:
            return super().evaluate(statistics, inputs)
        except torch.OutOfMemoryError:
            if not self.graphs.can_give_up:
                raise
        # the error, and the tensors that it refers to, are freed by now
        self.graphs.give_up()
        return super().evaluate(statistics, inputs)

    def _run(self, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run a part of a step, or replay its graph. If memory runs out, drop all graphs and begin the step again."""
        if not self.sync.is_built:
            function(inputs)
            return
        try:
            self.graphs.run(function, inputs)
            return
        except torch.OutOfMemoryError:
            if not self._can_begin_again:
                raise
        # the error, and the tensors that it refers to, are freed by now
        self.graphs.give_up()
        self._begin_again()
        if function == self._update:
            self._update({})

    @property
    def _can_begin_again(self) -> bool:
        """True if this step has changed no weight and sent no gradient, and graphs hold memory that can be freed."""
        is_too_late = self.is_updating or self.sync.num_sent
        return self.graphs.can_give_up and not is_too_late

    def _begin_again(self) -> None:
        """Restore the state before the step, and run its micro batches so far without graphs."""
        self.backend.set_rng_state(self.rng)
        self.loss_sum.copy_(self.earlier_loss)
        self.optimizer.zero_grad(set_to_none=self.is_whole)
        for is_last, inputs in self.begun:
            self._part(is_last)(inputs)

    def _part(self, is_last: bool) -> Callable[[Inputs], None]:
        """Return what `forward_backward` runs."""
        if self.is_whole:
            return self._step
        if is_last and self.data_size > 1:
            return self._last_micro_batch
        return self._micro_batch

    def _step(self, inputs: Inputs) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # a failed recording leaves gradients behind
        self._micro_batch(inputs)
        self._update({})

    def _last_micro_batch(self, inputs: Inputs) -> None:
        self._micro_batch(inputs, is_last=True)

    def _micro_batch(self, inputs: Inputs, *, is_last: bool = False) -> None:
        self.is_updating = False
        with self.backend.autocast(), self._unread_masks():
            loss_sum = self.loss(self.model, inputs)
        with self.sync.micro_batch(is_last=is_last):
            loss_sum.backward()
        self.loss_sum += loss_sum.detach()

    def _unread_masks(self) -> AbstractContextManager[None]:
        from train.models.network import Network, with_unread_masks  # late: slow

        is_made = isinstance(self.model, Network) and self.model.makes_masks
        return with_unread_masks(given=is_made)

    def _update(self, _: Inputs) -> None:
        self.is_updating = False
        norm = self.clip(self.sync.count)
        self.norm.copy_(norm)
        self.is_updating = True
        # The graph of a micro batch adds to gradients at fixed addresses, so these gradients must not be freed.
        self.backend.update(self.optimizer, norm, keeps_gradients=not self.is_whole)
        self.is_updating = False

    def load(self, model: Tensors, optimizer: State) -> None:
        super().load(model, optimizer)
        self.graphs.forget()  # the moments may have moved


@torch.no_grad()
def divide_and_clip(
    parameters: Sequence[nn.Parameter], divisor: Tensor, max_norm: float | None
) -> Tensor:
    """Divide the gradients by `divisor` [1] and clip their norm to `max_norm`, in one pass over the gradients.

    A divisor of 0, from a step without labels, counts as 1. Returns the norm [] after division and before clipping.
    Does not wait for the device.
    """
    gradients = gradients_of(parameters)
    return scale(gradients, nn.utils.get_total_norm(gradients), divisor, max_norm)


@torch.no_grad()
def scale(
    gradients: list[Tensor], norm: Tensor, divisor: Tensor, max_norm: float | None
) -> Tensor:
    """Divide and clip gradients as `divide_and_clip` does, given their norm [] before the division.

    If weights are split over ranks, the norm must be that of all ranks. It may be float64.
    """
    divisor = divisor.reshape(())
    factor = 1 / torch.where(divisor > 0, divisor, torch.ones_like(divisor))
    norm = norm * factor
    if max_norm is not None:
        factor = factor * (max_norm / (norm + EPSILON)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor.float())
    return norm
