"""Reductions of gradients between machines whose link is slow: in fewer bytes and fewer messages.

All gradients are reduced at once, after the last backward pass. Where layers share their weights, as ALBERT's do, that
loses nothing: 1 % of its gradient bytes are final at 90 % of the backward pass. The arithmetic is that of the hooks
that PyTorch has for DDP. They are given one bucket with all gradients in the order of the model, which is the same from
the first step on, before and after a resume; DDP forms new buckets after its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from train.backend.base import GradSync, State, split_like
from train.backend.nonfinite import is_finite
from train.cli.console import without_stdout
from train.config import BackendConfig, check
from train.config.backend import DEFAULT_TIMEOUT_S
from train.ranks import World

HOOKS: dict[str, Any] = {"none": allreduce_hook, "bf16": bf16_compress_hook, "powersgd": powerSGD_hook}
EPSILON = 1e-8  # of lengths: a gradient of zeros (a weight that took no part) is not divided by 0


def flat_sync_for(cfg: BackendConfig, precision: str) -> Callable[..., FlatSync] | None:
    """What makes the reducer of these settings; None if DDP does. InputError for settings that do not go together."""
    if cfg.grad_compression != "powersgd" and not cfg.hierarchical_reduction:
        return None
    check(
        cfg.grad_compression != "powersgd" or precision != "fp16",
        "backend.grad_compression=powersgd adds what a step left out to the next one, which backend.precision=fp16 may "
        "scale otherwise; set bf16 or fp32",
    )
    return partial(FlatSync, cfg=cfg)


@dataclass(frozen=True)
class Bucket:
    """All gradients, as PyTorch's hooks see a bucket of DDP's."""

    flat: Tensor
    views: list[Tensor]

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return self.views

    def is_last(self) -> bool:
        return True


@dataclass(frozen=True)
class Machines:
    """The process groups of a reduction inside each machine first, and then between the first ranks of all."""

    inside: dist.ProcessGroup
    between: dist.ProcessGroup | None  # on first ranks
    first: int  # the first rank of this machine


def machines_of(world: World, timeout_s: float) -> Machines:
    """All ranks call this. InputError unless the machines have equally many ranks, numbered one after the other."""
    size = world.local_size
    differing = [
        rank
        for rank, ranks in enumerate(world.all_gather_object((world.local_rank, size)))
        if ranks != (rank % size, size)
    ]
    check(
        not differing,
        "backend.hierarchical_reduction=true needs as many ranks on each machine, numbered machine by machine; that is "
        f"not so from rank {min(differing, default=0)} on; leave it out",
    )
    timeout = timedelta(seconds=timeout_s)
    with without_stdout():  # gloo prints how many ranks each has connected
        inside, _ = dist.new_subgroups(group_size=size, timeout=timeout)
        between = dist.new_group(list(range(0, world.size, size)), timeout=timeout)
    is_first = world.local_rank == 0
    return Machines(inside, between if is_first else None, world.rank - world.local_rank)


class FlatSync(GradSync):
    """See `train.backend.GradSync`."""

    def __init__(self, model: nn.Module, device: torch.device, world: World, *, cfg: BackendConfig) -> None:
        super().__init__(model, device)
        self.world, self.cfg = world, cfg
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.flat = torch.zeros(sum(each.numel() for each in self.parameters), device=device)
        self.bucket = Bucket(self.flat, split_like(self.flat, self.parameters))
        self.machines = machines_of(world, cfg.timeout_s or DEFAULT_TIMEOUT_S) if cfg.hierarchical_reduction else None
        self.group = dist.group.WORLD if self.machines is None else self.machines.between
        self.hook = HOOKS[cfg.grad_compression]
        self.load({})

    def begin(self, count: float) -> None:
        super().begin(count)
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.bucket.views, strict=True):
            parameter.grad = view

    def finish(self) -> Tensor:
        is_bad = ~is_finite(torch.linalg.vector_norm(self.flat))
        sums = torch.stack([self.count[0], is_bad.float()])
        dist.all_reduce(sums)
        if sums[1] > 0:  # this waits for the device, but so does PowerSGD's hook, and the link takes far longer
            # The step will be skipped. Its numbers would stay in PowerSGD's memory for good.
            self.flat.fill_(float("nan"))
        else:
            self._average()
            self.steps += 1
        return sums[:1] / self.world.size  # as the gradients are

    def _average(self) -> None:
        machines = self.machines
        if machines is not None:
            dist.reduce(self.flat, machines.first, group=machines.inside)
        if machines is None or machines.between is not None:
            # PyTorch seeds all devices to draw PowerSGD's first factors, and puts back the CPU's random state alone.
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                self.hook(self.memory, self.bucket).wait()
        if machines is not None:
            self.flat.div_(self.world.local_size)
            dist.broadcast(self.flat, machines.first, group=machines.inside)

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state(self) -> State:
        """The number of steps. What each rank has left out so far is as large as the gradients, too much to gather over
        a slow link: it is dropped at each save, here as in the run that resumes.
        """
        saved = {"steps": self.steps}
        self.load(saved)
        return {"compression": saved}

    def load(self, state: State) -> None:
        self.steps = index(state.get("steps", 0))
        self.memory: Any = self.group
        if self.cfg.grad_compression == "powersgd" and self.group is not None:
            self.memory = PowerSGDState(
                self.group,
                matrix_approximation_rank=self.cfg.powersgd_rank,
                start_powerSGD_iter=self.cfg.powersgd_start_step,
                orthogonalization_epsilon=EPSILON,
                random_seed=self.steps,
            )
            self.memory.iter = self.steps
