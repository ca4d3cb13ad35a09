"""Division and clipping of the gradients of a summed loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def divide_and_clip(parameters: Sequence[nn.Parameter], divisor: Tensor, max_norm: float | None) -> Tensor:
    """Divide the gradients by `divisor` [1] (by 1 if that is 0, in a step without labels) and clip their norm to
    `max_norm`, in one pass over them. Returns the norm [] between the two. Nothing is read from the device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return scale(gradients, nn.utils.get_total_norm(gradients), divisor, max_norm)


@torch.no_grad()
def scale(gradients: list[Tensor], norm: Tensor, divisor: Tensor, max_norm: float | None) -> Tensor:
    """The same for gradients whose norm [] is known, as over all ranks that hold a part of them, maybe in float64."""
    divisor = divisor.reshape(())
    factor = 1 / torch.where(divisor > 0, divisor, torch.ones_like(divisor))
    norm = norm * factor
    if max_norm is not None:
        factor = factor * (max_norm / (norm + EPSILON)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor.float())
    return norm
