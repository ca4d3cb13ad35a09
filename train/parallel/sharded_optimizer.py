"""Data parallelism whose optimizer is split over the ranks: each keeps the moments of its share of the weights, updates
them, and sends them to the others. Stage 1 of ZeRO, https://arxiv.org/abs/1910.02054.

Weights are shared out whole, so that every optimizer of the table computes what it would alone, the trust ratios of
LAMB as well. torch's ZeroRedundancyOptimizer does the same by a wrapper, behind which a fused optimizer no longer sees
that a step is to be skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import OptimConfig, check
from train.optim import build_optimizer, parameter_groups, part_of
from train.parallel.data import DataParallel

if TYPE_CHECKING:
    from train.backend import Backend
    from train.parallel import State


class ShardedOptimizer(DataParallel):
    """See `train.parallel.Engine`."""

    def build_optimizer(self, optim: OptimConfig, backend: Backend, head: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [group["params"] for group in parameter_groups(optim, self.parameters, head)]
        self.numbered = [weight for group in groups for weight in group]  # as the optimizer of all weights numbers them
        self.owners = shared_out([weight.numel() for weight in self.numbered], self.data_size)
        self.own = [number for number, owner in enumerate(self.owners) if owner == self.data_rank]
        check(
            len(self.numbered) >= self.data_size,
            f"parallel.shard_optimizer=true: this model trains {len(self.numbered)} tensors, too few for "
            f"{self.data_size} ranks; leave it out",
        )
        # The order of the model decides the order of the groups, here as there.
        return build_optimizer(optim, [self.numbered[number] for number in self.own], adamw=backend.adamw, head=head)

    def ready(self) -> None:
        self.backend.ready(self.optimizer, [self.numbered[number] for number in self.own])

    def optimizer_step(self, norm: Tensor) -> None:
        super().optimizer_step(norm)
        for weight in self.numbered:
            weight.grad = None
        self._send_updated()

    @torch.no_grad()
    def _send_updated(self) -> None:
        """Send each rank's share of the weights to the others, one message for each rank and type."""
        shares: dict[tuple[int, torch.dtype], list[nn.Parameter]] = {}
        for weight, owner in zip(self.numbered, self.owners, strict=True):
            shares.setdefault((owner, weight.dtype), []).append(weight)
        messages = {share: torch.cat([weight.reshape(-1) for weight in weights]) for share, weights in shares.items()}
        sending = {share: dist.broadcast(message, share[0], async_op=True) for share, message in messages.items()}
        for share, weights in shares.items():
            sending[share].wait()
            if share[0] != self.data_rank:
                parts = messages[share].split([weight.numel() for weight in weights])
                for weight, part in zip(weights, parts, strict=True):
                    weight.copy_(part.view_as(weight))

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, State]:
        held = self.held()
        own: State = {"state": {number: self.optimizer.state[self.numbered[number]] for number in self.own}}
        if self.data_rank != 0:
            return {"optimizer": own}
        groups = [{"params": list(range(len(self.numbered)))}]
        return {**held, "optimizer": {**held["optimizer"], **own, "param_groups": groups}}

    def load(self, model: Mapping[str, Tensor], optimizer: State) -> None:
        super().load(model, part_of(optimizer, self.own, total=len(self.numbered)))


def shared_out(sizes: list[int], num_ranks: int) -> list[int]:
    """The rank of each size: the largest first, each to the rank that has least."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += sizes[number]
    return owners
