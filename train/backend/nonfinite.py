"""A step whose gradient is NaN or infinite changes nothing: it is skipped and counted, where possible on the device.

All ranks decide alike: they look at the norm of the reduced gradient, into which the sum over the ranks, and over the
micro batches, carries a NaN of any of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def is_finite(norm: Tensor) -> Tensor:
    """Whether a norm is a number, on its device. One comparison, false for NaN: `x == x` is what compilers fold."""
    return norm < math.inf


class Skips:
    """Steps that were skipped, counted where it is decided: on the device, so that no step waits for the host, or on
    the host, which then knows of each skip at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros(1, dtype=torch.int32).to(device)
        self.streak = torch.zeros(1, dtype=torch.int32).to(device)  # the last ones, in a row

    @torch.no_grad()
    def see(self, norm: Tensor) -> None:
        skipped = (~is_finite(norm)).to(self.total.device, torch.int32)
        self.total.add_(skipped)
        self.streak.add_(skipped).mul_(skipped)

    def known_streak(self) -> int:
        """The last ones in a row, as far as the host knows without waiting for a device: 0 where it does not."""
        return int(self.streak) if self.streak.device.type == "cpu" else 0

    def reset_streak(self) -> None:
        # The same tensor, filled from the host: a new one would be another graph on XLA.
        self.streak.copy_(torch.zeros(1, dtype=torch.int32))


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor, *, on_device: bool) -> None:
    """Step unless the gradients' norm is not finite. `on_device`: decide there, without waiting for the host."""
    if not on_device:
        if is_finite(norm):
            optimizer.step()
    elif all(group.get("fused") for group in optimizer.param_groups):
        # torch's own way, for torch.amp.GradScaler: its fused kernels look at this number and do nothing.
        optimizer.found_inf = (~is_finite(norm)).float()  # type: ignore[attr-defined]
        optimizer.step()
    else:
        held = changed_by(optimizer)
        before = copies(held)
        optimizer.step()
        undo_unless(is_finite(norm), held, before)


def changed_by(*optimizers: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors that a step changes: weights, moments and step counts."""
    found: list[Tensor] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            found += group["params"]
        for state in optimizer.state.values():
            found += state.values()
    return found


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def undo_unless(ok: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Put the values from before back unless `ok`, by a choice on the device: new values may be NaN, so no sum of the
    two would do. Costs the memory of the copies, except where a compiler makes it one loop with the update.
    """
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(ok, tensor, old))
