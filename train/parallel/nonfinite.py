"""Skipping of steps whose gradient is NaN or infinite. They change nothing and are counted, on the device if possible.

All ranks decide alike: they test the norm of the reduced gradient, which is NaN if that of any rank or micro batch is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_finite(norm: Tensor) -> Tensor:
    """Return whether a norm is finite, on its device. It is false for NaN; compilers would fold `x == x`."""
    return norm < math.inf


class Skips:
    """Skipped steps, counted where the decision is made: on the device, for which no step waits, or on the host."""

    def __init__(self, device: torch.device, to_host: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        self.to_host = to_host
        self.total = torch.zeros(1, dtype=torch.int32).to(device)
        self.streak = torch.zeros(1, dtype=torch.int32).to(device)  # number of the latest steps skipped in a row

    @torch.no_grad()
    def see(self, norm: Tensor, *, overflowed: Tensor | None = None) -> None:
        """Count a step by its norm. If it `overflowed`, a bool on the device, it does not count for the streak."""
        skipped = (~is_finite(norm)).to(self.total.device, torch.int32)
        self.total.add_(skipped)
        self.streak.add_(skipped).mul_(skipped)
        if overflowed is not None:
            self.streak.mul_((~overflowed).to(torch.int32))

    def counts(self) -> tuple[int, int]:
        """Return the number of skipped steps in this process, and in a row at the end. Waits for the device."""
        total, streak = self.to_host([self.total, self.streak])
        return int(total), int(streak)

    def known_streak(self) -> int:
        """Return the skipped steps in a row at the end, on all ranks alike; 0 if the device counts them."""
        return int(self.streak) if self.streak.device.type == "cpu" else 0

    def reset_streak(self) -> None:
        """Count from 0 again, after the run has returned to a step before the skipped ones."""
        # The tensor is kept and filled from the host: a new one would be another graph on XLA.
        self.streak.copy_(torch.zeros(1, dtype=torch.int32))


def step_if_finite(optimizer: torch.optim.Optimizer, norm: Tensor, *, on_device: bool) -> None:
    """Step if the norm of the gradients is finite. `on_device`: decide there, without waiting for the host."""
    if not on_device:
        if is_finite(norm):
            optimizer.step()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        # torch.amp.GradScaler skips steps in this way: fused AdamW and LAMB read this number and change nothing.
        optimizer.found_inf = (~is_finite(norm)).float()  # type: ignore[attr-defined]
        optimizer.step()
    else:
        held = changed_by(optimizer)
        before = copies(held)
        optimizer.step()
        undo_unless(is_finite(norm), held, before)


def changed_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all tensors that a step changes: weights, moments and step counts."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameters + [tensor for state in optimizer.state.values() for tensor in state.values()]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def undo_unless(ok: Tensor, tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Put the earlier values back unless `ok`, by a choice on the device.

    New values may be NaN, which no weighted sum would remove. The copies take the memory of weights and moments, unless
    a compiler makes one loop of this and the update.
    """
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(ok, tensor, old))
