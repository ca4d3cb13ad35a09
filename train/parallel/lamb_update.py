"""LAMB's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.config.backend import CUDA

Group = dict[str, Any]  # a parameter group of a torch optimizer
# a step count for which torch's fused Adam corrects no bias, because beta ** SETTLED is 0
SETTLED = 1e9


@dataclass(frozen=True)
class Trained:
    """The weights of a group that have a gradient, and their gradients and moments in the same order."""

    weights: list[Tensor]
    grads: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]


class Lamb(torch.optim.Optimizer):
    """LAMB as in Google's ALBERT code: no bias correction, and no trust ratio in groups with trust_ratio=False.

    update = m / (sqrt(v) + eps) + weight_decay * w;  w <- w - lr * |w| / |update| * update, where the ratio is 1 if
    either norm is 0. This is algorithm 2 of https://arxiv.org/abs/1904.00962 without its bias correction, as in
    lamb_optimizer.py of https://github.com/google-research/albert. Every parameter's state, `exp_avg` and `exp_avg_sq`
    in float32, must exist before the first step. A learning rate may be a tensor [1] on the device.

    On GPUs, torch's fused Adam computes both moments and the update in one pass. A step then reads and writes 56 bytes
    per weight: 8 to begin the updates with the decayed weights, 28 in Adam's pass, 8 for the norms and 12 to change the
    weights. On other devices it is about twice that.

    `found_inf` works as in torch's fused optimizers: if this device tensor is set and not 0, a step changes no weight
    and no state. torch.amp.GradScaler skips steps in this way, without copying weights or waiting for the device. A
    skipped step may set the gradients to 0.
    """

    found_inf: Tensor | None = None

    def __init__(self, groups: list[Group], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        first = groups[0]["params"][0]
        is_whole = not isinstance(first, DTensor)
        self.is_fused = is_whole and first.device.type == CUDA
        # Not if weights are split over ranks: `found_inf` needs DTensor operations that torch 2.9 lacks.
        self._step_supports_amp_scaling = is_whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            own = self.trained(group)
            if not own.weights:
                continue
            if self.is_fused:
                self.change_fused(group, own)
            else:
                self.change(group, own)

    def trained(self, group: Group) -> Trained:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        states = [self.state[weight] for weight in weights]
        return Trained(
            weights=weights,
            grads=[weight.grad for weight in weights],
            means=[state["exp_avg"] for state in states],
            squares=[state["exp_avg_sq"] for state in states],
        )

    # ---- on GPUs ---------------------------------------------------------------------------------------------------

    def change_fused(self, group: Group, own: Trained) -> None:
        """Change weights and moments by torch's fused Adam."""
        updates = self.fused_updates(group, own)
        rate = group["lr"]
        if isinstance(rate, Tensor):
            rate = rate.squeeze()
        if self.found_inf is not None:
            rate = rate * (self.found_inf == 0)
        if not group["trust_ratio"]:
            torch._foreach_mul_(updates, rate)
            torch._foreach_sub_(own.weights, updates)
            return
        weight_norms = torch.stack(torch._foreach_norm(own.weights))
        update_norms = torch.stack(torch._foreach_norm(updates))
        ratios = trust_ratio(weight_norms, update_norms)
        for weight, update, factor in zip(own.weights, updates, ratios * rate, strict=True):
            weight.addcmul_(update, factor, value=-1)

    def fused_updates(self, group: Group, own: Trained) -> list[Tensor]:
        """Change the moments, and return the updates: Adam adds m / (sqrt(v) + eps) to the decayed weights."""
        updates = list(torch._foreach_mul(own.weights, group["weight_decay"]))
        steps = [torch.full((), SETTLED, device=updates[0].device)] * len(updates)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            updates,
            own.grads,
            own.means,
            own.squares,
            [],
            steps,
            lr=-1.0,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        return updates

    # ---- on other devices ------------------------------------------------------------------------------------------

    def change(self, group: Group, own: Trained) -> None:
        """Change weights and moments by separate operations, which every device and DTensor have."""
        self.change_moments(group, own)
        updates = torch._foreach_sqrt(own.squares)
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(own.means, updates)
        if group["weight_decay"]:
            torch._foreach_add_(updates, own.weights, alpha=group["weight_decay"])
        if self.found_inf is not None:
            torch._foreach_mul_(updates, (self.found_inf == 0).float())
        if group["trust_ratio"]:
            weight_norms = torch._foreach_norm(own.weights)
            update_norms = torch._foreach_norm(updates)
            torch._foreach_mul_(updates, list(map(trust_ratio, weight_norms, update_norms)))
        if isinstance(group["lr"], Tensor):
            torch._foreach_mul_(updates, group["lr"].squeeze())
            torch._foreach_sub_(own.weights, updates)
        else:
            torch._foreach_add_(own.weights, updates, alpha=-group["lr"])

    def change_moments(self, group: Group, own: Trained) -> None:
        beta1, beta2 = group["betas"]
        if self.found_inf is None:
            torch._foreach_lerp_(own.means, own.grads, 1 - beta1)
            torch._foreach_mul_(own.squares, beta2)
        else:
            skips = self.found_inf != 0
            for grad in own.grads:
                grad.masked_fill_(skips, 0.0)  # multiplying by 0 would not remove NaN
            moves = torch.where(skips, 0.0, 1 - beta1)
            torch._foreach_lerp_(own.means, own.grads, [moves] * len(own.means))
            torch._foreach_mul_(own.squares, torch.where(skips, 1.0, beta2))
        torch._foreach_addcmul_(own.squares, own.grads, own.grads, 1 - beta2)


def trust_ratio(weight_norms: Tensor, update_norms: Tensor) -> Tensor:
    """Return the quotients of norms, of any shape; 1 if a norm is 0."""
    are_known = (weight_norms > 0) & (update_norms > 0)
    return torch.where(are_known, weight_norms / update_norms, torch.ones_like(weight_norms))
