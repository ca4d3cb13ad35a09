"""The skipping of steps whose gradient is NaN or infinite. A skipped step changes nothing and is counted.

All ranks make the same decision, because they test the norm of the reduced gradient, which is not finite if the
gradient of any rank or micro batch is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from train.parallel.optim import parameters_of


def is_finite(norm: Tensor) -> Tensor:
    """Return whether a norm is finite and not NaN, on its device. Compilers would remove the NaN test `x == x`."""
    return norm < math.inf


class Skips:
    """Counts of skipped steps. They are on the device if it decides which steps to skip, so that no step waits."""

    def __init__(
        self, device: torch.device, to_host: Callable[[Sequence[Tensor]], list[Tensor]]
    ) -> None:
        self.to_host = to_host
        self.total = torch.zeros(1, dtype=torch.int32).to(device)
        # number of consecutive skipped steps up to now
        self.streak = torch.zeros(1, dtype=torch.int32).to(device)

    @torch.no_grad()
    def see(self, norm: Tensor, *, overflowed: Tensor | None = None) -> None:
        """Count a step as skipped if its norm is not finite. If the loss scale `overflowed`, end the streak."""
        skipped = (~is_finite(norm)).to(self.total.device, torch.int32)
        self.total.add_(skipped)
        self.streak.add_(skipped).mul_(skipped)
        if overflowed is not None:
            self.streak.mul_((~overflowed).to(torch.int32))

    def counts(self) -> tuple[int, int]:
        """Return the number of steps skipped in this process, and the current streak. Waits for the device."""
        total, streak = self.to_host([self.total, self.streak])
        return int(total), int(streak)

    def known_streak(self) -> int:
        """Return the current streak, which is equal on all ranks; 0 if the device counts it."""
        if self.streak.device.type == "cpu":
            return int(self.streak)
        return 0

    def reset_streak(self) -> None:
        """Reset the streak to 0, after the run has returned to a step before the skipped ones."""
        # The existing tensor is filled from the host, because a new tensor would change XLA's graph.
        self.streak.copy_(torch.zeros(1, dtype=torch.int32))


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor, *, on_device: bool) -> None:
    """Step if the norm of the gradients is finite. With `on_device`, the device decides and the host does not wait."""
    if not on_device:
        if is_finite(norm):
            optimizer.step()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        # torch.amp.GradScaler skips steps in this way: if found_inf is 1, fused AdamW and LAMB change nothing.
        optimizer.found_inf = (~is_finite(norm)).float()  # type: ignore[attr-defined]
        optimizer.step()
    else:
        held = changed_by(optimizer)
        before = copies(held)
        optimizer.step()
        undo_unless(is_finite(norm), held, before)


def changed_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors that a step changes: weights, moments and step counts."""
    return parameters_of(optimizer) + [
        tensor for state in optimizer.state.values() for tensor in state.values()
    ]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def undo_unless(ok: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Restore the values `before` unless `ok`, a bool on the device, is True.

    This uses torch.where, because multiplying new values by 0 would not remove NaN. The copies need as much memory as
    weights and moments, unless a compiler fuses this with the update.
    """
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(ok, tensor, old))
