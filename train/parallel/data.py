"""Data parallelism: every rank holds the model and sees its share of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from train.backend import Backend
    from train.data.batches import Batch
    from train.parallel import LossFunction


class DataParallel:
    """See `train.parallel.Engine`."""

    def __init__(self, backend: Backend, model: nn.Module, *, accumulation: int, lengths: int = 1) -> None:
        self.backend, self.model = backend, model
        self.wrapped = backend.wrap(model, accumulation=accumulation, lengths=lengths)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.loss_sum = torch.zeros(1).to(backend.device)

    def forward_backward(self, micro_batches: list[Batch], loss: LossFunction, count: float) -> None:
        # The ranks' gradients are averaged, the loss is a sum over all of them: hence the world size.
        scale = self.backend.world_size / (count or 1.0)
        for number, batch in enumerate(micro_batches, start=1):
            with self.backend.accumulate(self.wrapped, is_last=number == len(micro_batches)):
                self._add_gradients(batch, loss, scale)

    def _add_gradients(self, batch: Batch, loss: LossFunction, scale: float) -> None:
        # A function of its own: nothing of it is alive when the backend cuts the graph, so all cuts are alike.
        with self.backend.timed(), self.backend.autocast():
            loss_sum = loss(self.wrapped, batch["inputs"])
        (loss_sum * scale).backward()
        self.loss_sum += loss_sum.detach()

    def take_loss(self) -> float:
        taken = float(self.backend.read([self.loss_sum])[0])
        # The same tensor, filled from the host: a new one, or zeros made on the device, would change the graph.
        self.loss_sum.copy_(torch.zeros(1))
        return taken
