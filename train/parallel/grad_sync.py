"""The interface through which an engine adds the gradients of a step up over the ranks, and the table of its classes.

Losses are sums over labels. Gradients are reduced once a step and then divided once, by the labels of all ranks: in the
engine's `clip` (train/parallel), in the same pass that clips them. `reduce` returns the divisor.

    class         where                         reduces                                       over ranks  returns
    GradSync      one rank on ddp, neuron       never                                         -           its labels
    DDPSync       parallel=data on ddp, neuron  in the last backward pass, by buckets         average     labels / ranks
    XLASync       xla, one rank too             in `reduce`, in the graph of the update       sum         labels
    ShardSync     parallel=fsdp                 in the last backward pass, or in every one    sum         labels
    PipelineSync  parallel=pipeline             in `reduce`, over the holders of each weight  sum         labels

Averages are DDP's own: it divides by the number of ranks, so the number of labels is divided by it too. XLASync adds
nothing up for one rank, and parallel=fsdp with one rank is parallel=data.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from train.config.backend import CUDA


class GradSync:
    """The reduction of gradients, once a step. This one is for a single rank."""

    module: nn.Module  # the model as forward passes call it
    count: Tensor  # [1], on the device

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.module, self.device = model, device

    def begin(self, count: float) -> None:
        """Begin a step in which this rank has `count` labels. The count is added up together with the gradients."""
        self.count = sent(torch.tensor([float(count)]), self.device)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of one micro batch, forward and backward. `is_last`: it is the last of this step."""
        return nullcontext()

    def reduce(self) -> Tensor:
        """Reduce the rest. Returns the divisor [1] that makes sums means over the labels of all ranks; 0: no labels."""
        return self.count


def sent(value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on a device. On CUDA the copy does not wait for the previous step."""
    # CUDA takes the bytes before the call returns. Other devices may read the host's memory later, when it is freed.
    return value.to(device, non_blocking=device.type == CUDA)
