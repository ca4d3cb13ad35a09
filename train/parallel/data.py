"""Data parallelism: every rank holds the model and sees its share of each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from train.backend import Backend
    from train.data.batches import Batch
    from train.parallel import LossFunction


class DataParallel:
    """See `train.parallel.Engine`."""

    def __init__(self, backend: Backend, model: nn.Module, *, accumulation: int) -> None:
        self.backend, self.model = backend, model
        self.wrapped = backend.wrap(model, accumulates=accumulation > 1)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def forward_backward(self, micro_batches: list[Batch], loss: LossFunction, count: float) -> Tensor:
        # The ranks' gradients are averaged, the loss is a sum over all of them: hence the world size.
        scale = self.backend.world_size / max(count, 1.0)
        total: Tensor | None = None
        for number, batch in enumerate(micro_batches, start=1):
            with self.backend.accumulate(self.wrapped, is_last=number == len(micro_batches)):
                with self.backend.autocast():
                    loss_sum = loss(self.wrapped, batch["inputs"])
                (loss_sum * scale).backward()
            total = loss_sum.detach() if total is None else total + loss_sum.detach()
        assert total is not None
        return total
