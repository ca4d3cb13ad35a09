"""Local SGD, for slow links: each rank steps by its own gradients, and the weights of all are averaged every few steps.

See Stich 2019, https://arxiv.org/abs/1805.09767. As in post-local SGD (https://arxiv.org/abs/1808.07217) and DiLoCo
(https://arxiv.org/abs/2311.08105) the optimizer's moments stay those of each rank; averaged as often as the weights
they would triple the bytes. A checkpoint has one state for all ranks, so a save averages them too, in the run that goes
on as in the one that resumes. An average of whatever cause begins a new period, which makes both the same run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from train.config import LocalSGDConfig, ParallelConfig, check
from train.parallel.data import DataParallel

if TYPE_CHECKING:
    from train.backend import Backend
    from train.data.batches.loader import Batch
    from train.parallel import State, Statistics

logger = logging.getLogger("train")


def build(cfg: ParallelConfig, optim: Any, backend: Backend, *args: Any, **options: Any) -> LocalSGD:
    assert isinstance(cfg, LocalSGDConfig)
    check(
        not backend.scaler.is_enabled(),
        "parallel=local_sgd does not go with backend.precision=fp16: ranks would scale their losses apart; set bf16 or "
        "fp32",
    )
    if backend.world.rank == 0:
        logger.warning(
            "parallel=local_sgd: each rank steps by itself and weights are averaged every %d steps, which is not the "
            "mathematics of one big batch; compare the final loss with that of parallel=data",
            cfg.sync_every,
        )
    return LocalSGD(optim, backend, *args, sync_every=cfg.sync_every, **options)


class LocalSGD(DataParallel):
    """See `train.parallel.Engine`."""

    alone = True

    def __init__(self, *args: Any, sync_every: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sync_every = sync_every
        self.steps_apart = 0  # since the weights of all ranks were the same
        self.moments_differ = False

    def step(self, micro_batches: list[Batch], lr: float) -> Tensor:
        norm = super().step(micro_batches, lr)
        self.steps_apart += 1
        self.moments_differ = True
        if self.steps_apart >= self.sync_every:
            self._average_weights()
        return norm

    def clip(self, divisor: Tensor) -> Tensor:
        """Clip the gradients of this rank by their own norm. Returns the mean norm of all ranks, which is not finite if
        one of them is not: then all ranks skip the step, and go on deciding alike. It is one number a step.
        """
        norm = super().clip(divisor).reshape(1)
        self._add_up(norm)
        return norm.reshape(()) / self.data_size

    def evaluate(self, statistics: Statistics, inputs: dict[str, Tensor]) -> Tensor:
        self._average_weights()
        return super().evaluate(statistics, inputs)

    def assemble(self) -> None:
        self._average_weights()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def check_replicas(self) -> None:
        self._average_weights()
        super().check_replicas()

    def state(self) -> dict[str, State]:
        self._average_weights()
        if self.moments_differ:
            states = self.optimizer.state.values()
            self._average([value for state in states for value in state.values() if value.ndim > 0])
            self.moments_differ = False
        return super().state()

    def load(self, model: Mapping[str, Tensor], optimizer: State) -> None:
        super().load(model, optimizer)
        self.steps_apart, self.moments_differ = 0, False

    # ---- averages --------------------------------------------------------------------------------------------------

    def _average_weights(self) -> None:
        if self.steps_apart:
            self._average(self.parameters)
            self.steps_apart = 0

    @torch.no_grad()
    def _average(self, tensors: list[Any]) -> None:
        """The mean over the ranks, in place and in one message."""
        if not tensors:  # plain SGD has no moments
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._add_up(flat)
        flat.div_(self.data_size)
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    def _add_up(self, tensor: Tensor) -> None:
        if self.backend.world.is_distributed:
            self.backend.all_reduce([tensor])
