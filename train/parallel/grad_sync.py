"""The interface of the reductions of gradients over ranks.

    class         where                     reduces                                       over ranks  returns
    GradSync      one rank on ddp           never                                         -           its labels
    DDPSync       parallel=data on ddp      in the last backward pass, by buckets         average     labels / ranks
    BucketSync    recorded; many CPU ranks  in the last backward pass, by buckets         sum         labels
    XLASync       xla, even with one rank   in `reduce`, in the graph of the update       sum         labels
    ShardSync     parallel=fsdp             in the last backward pass                     sum         labels
    PipelineSync  parallel=pipeline         in `reduce`, over the holders of each weight  sum         labels

torch's DDP always divides by the number of ranks, so DDPSync also divides the label count by it. With one rank, XLASync
reduces nothing, and parallel=fsdp runs as parallel=data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config.backend import CUDA


class GradSync:
    """A reduction of gradients, once per step. This base class is for a single rank and reduces nothing."""

    module: nn.Module  # the model as forward passes call it
    count: Tensor  # [1], on the device: the number of labels in this step
    count_type = torch.float32
    adds_counts = False  # whether the label counts are summed over the ranks during the passes
    # What a recording needs: whether gradients keep their addresses, and how many buckets this step has sent.
    is_built = True
    num_sent = 0

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.module, self.device = model, device
        # Runs an action that must not be part of a recording.
        self.outside: Callable[..., None] = lambda action: action()

    def begin(self, count: float) -> None:
        """Begin a step in which this rank has `count` labels."""
        self.count = sent(torch.tensor([count], dtype=self.count_type), self.device)
        self.add_counts()

    def add_counts(self) -> None:
        """Begin to sum `count` over the ranks, if `adds_counts`."""
        if self.adds_counts:
            self.adding = dist.all_reduce(self.count, async_op=True)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context for the passes of one micro batch. `is_last` marks the last micro batch of a step."""
        return nullcontext()

    def held(self) -> AbstractContextManager[Any]:
        """Return a context in which passes send nothing."""
        return nullcontext()

    def reduce(self) -> Tensor:
        """Finish the reduction. Returns the number [1] by which to divide the gradients; 0 if there are no labels."""
        if self.adds_counts:
            self.adding.wait()
        return self.count


def gradients_of(weights: Iterable[nn.Parameter]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]


def sent(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on a device. On CUDA the copy does not wait for the previous step."""
    # CUDA reads the host's memory before the call returns. Other devices may read it later, when it has been freed.
    return value.to(device, non_blocking=device.type == CUDA)
