"""LAMB's update."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from train.config.backend import CUDA

# a step count for which torch's fused Adam corrects no bias, because beta ** SETTLED is 0
SETTLED = 1e9


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

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        first = groups[0]["params"][0]
        self.is_fused = first.device.type == CUDA and not isinstance(first, DTensor)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False if weights are split over ranks: `found_inf` needs DTensor operations that torch 2.9 lacks."""
        return not isinstance(self.param_groups[0]["params"][0], DTensor)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            grads = [parameter.grad for parameter in params]
            means = [self.state[parameter]["exp_avg"] for parameter in params]
            squares = [self.state[parameter]["exp_avg_sq"] for parameter in params]
            if self.is_fused:
                self.change_fused(group, params, grads, means, squares)
            else:
                self.change(group, params, grads, means, squares)

    def change_fused(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        """Change weights and moments by torch's fused Adam, which adds m / (sqrt(v) + eps) to the decayed weights."""
        updates = torch._foreach_mul(params, group["weight_decay"])
        steps = [torch.full((), SETTLED, device=params[0].device)] * len(params)
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            updates,
            grads,
            means,
            squares,
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
        rate = group["lr"]
        if isinstance(rate, Tensor):
            rate = rate.squeeze()
        if self.found_inf is not None:
            rate = rate * (self.found_inf == 0)
        if not group["trust_ratio"]:
            torch._foreach_mul_(updates, rate)
            torch._foreach_sub_(params, updates)
            return
        weight_norms = torch.stack(torch._foreach_norm(params))
        update_norms = torch.stack(torch._foreach_norm(updates))
        are_known = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(are_known, weight_norms / update_norms, 1.0)
        for parameter, update, factor in zip(params, updates, ratios * rate, strict=True):
            parameter.addcmul_(update, factor, value=-1)

    def change(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        means: list[Tensor],
        squares: list[Tensor],
    ) -> None:
        """Change weights and moments by separate operations, which every device and DTensor have."""
        beta1, beta2 = group["betas"]
        if self.found_inf is None:
            skips = None
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
        else:
            skips = self.found_inf != 0
            for grad in grads:
                grad.masked_fill_(skips, 0.0)  # multiplying by 0 would not remove NaN
            torch._foreach_lerp_(means, grads, [torch.where(skips, 0.0, 1 - beta1)] * len(means))
            torch._foreach_mul_(squares, torch.where(skips, 1.0, beta2))
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(means, updates)
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])
        if skips is not None:
            torch._foreach_mul_(updates, (~skips).float())
        if group["trust_ratio"]:
            weight_norms = torch._foreach_norm(params)
            update_norms = torch._foreach_norm(updates)
            ratios = [
                torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))
                for w, u in zip(weight_norms, update_norms, strict=True)
            ]
            torch._foreach_mul_(updates, ratios)
        if isinstance(group["lr"], Tensor):
            torch._foreach_mul_(updates, group["lr"].squeeze())
            torch._foreach_sub_(params, updates)
        else:
            torch._foreach_add_(params, updates, alpha=-group["lr"])
