"""Optimizers, which parameters decay, and learning rates as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from train.config import OptimConfig, Plan, check


def learning_rate(step: int, *, cfg: OptimConfig, plan: Plan) -> float:
    """Rate of the optimizer step number `step`, counted from 0.

    Warm-up is linear and reaches the peak at its last step; its first rate is peak / warmup, never 0, which would
    waste a step and cost one more compilation on XLA. Then the schedule falls to `final_lr_fraction` of the peak
    one step after the last.
    """
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    left = (plan.total_steps - step) / max(1, plan.total_steps - plan.warmup_steps)  # 1 after the warm-up, to 0
    left = min(1.0, max(0.0, left))
    shape = {
        "constant": 1.0,
        "linear": left,
        "polynomial": left**cfg.power,
        "cosine": 0.5 - 0.5 * math.cos(math.pi * left),
    }[cfg.schedule]
    return plan.lr * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """`lr` is that of the encoder; the head's follows in proportion."""
    for group in optimizer.param_groups:
        value = lr * group["lr_factor"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(torch.tensor([value]))
        else:
            group["lr"] = value


def build_optimizer(
    cfg: OptimConfig,
    parameters: Iterable[nn.Parameter],
    *,
    adamw: dict[str, bool] | None = None,
    head: Iterable[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """The optimizer, in two groups: decayed, and biases and normalisation weights not; and two more for those of the
    parameters that are the `head`, which learns at cfg.head_lr.

    `adamw` chooses one of torch's implementations; with `capturable` all that changes from step to step, the rate as
    well, is on the device. The state is float32 and there from the start: made in the first step, it would make that
    step another graph than the others.
    """
    parameters, heads = list(parameters), {id(parameter) for parameter in head}
    check(
        cfg.head_lr is None or bool(heads),
        f"optim.head_lr={cfg.head_lr} is for a task whose head begins anew (classify, qa); leave it out",
    )
    groups: list[dict[str, Any]] = []
    for is_head, factor in ((False, 1.0), (True, (cfg.head_lr or cfg.lr) / cfg.lr)):
        for decays, weight_decay in ((True, cfg.weight_decay), (False, 0.0)):
            chosen = [p for p in parameters if (id(p) in heads) == is_head and (p.ndim >= 2) == decays]
            if chosen:  # of an encoder that is frozen nothing is left
                own = {"lr_factor": factor, "weight_decay": weight_decay, "trust_ratio": decays}
                groups.append({"params": chosen, **own})
    settings: dict[str, Any] = {"lr": cfg.lr, "betas": tuple(cfg.betas), "eps": cfg.eps}
    optimizer: torch.optim.Optimizer
    if cfg.name == "lamb":
        optimizer = Lamb(groups, **settings)
    else:
        for group in groups:
            del group["trust_ratio"]
        optimizer = torch.optim.AdamW(groups, **{**settings, **(adamw or {"fused": True})})
    for group in optimizer.param_groups:
        if group.get("capturable"):
            group["lr"] = torch.tensor([cfg.lr]).to(parameters[0].device)
    for settings in optimizer.param_groups:
        counts_on_device = settings.get("fused") or settings.get("capturable")  # the others read it every step
        for parameter in settings["params"]:
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            if cfg.name == "adamw":
                state["step"] = torch.zeros((), device=parameter.device if counts_on_device else "cpu")
    return optimizer


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put back what `optimizer.state_dict()` gave, on any device. The settings stay those of this run: a saved
    choice of implementation may not exist here.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    order = [index for group in saved["param_groups"] for index in group["params"]]
    check(
        len(order) == len(parameters),
        f"the checkpoint's optimizer is of {len(order)} parameters, this run learns {len(parameters)}: other parts are "
        "frozen; begin a new run from its weights with model.init_from",
    )
    for index, parameter in zip(order, parameters, strict=True):
        own = optimizer.state[parameter]
        for name, value in saved["state"][index].items():
            if value.ndim == 0:
                own[name].fill_(value.item())  # copied, XLA lets all parameters share one step count at first
            elif own[name].device.type == "cpu":
                own[name].copy_(value)  # a value that was read from a file may be the file
            else:
                own[name] = value.to(device=own[name].device, dtype=own[name].dtype)


class Lamb(torch.optim.Optimizer):
    """LAMB as in Google's ALBERT code: no bias correction, no trust ratio where the group says so.

    update = m / (sqrt(v) + eps) + weight_decay * w;  w <- w - lr * |w| / |update| * update, the ratio being 1 where
    either norm is 0. https://arxiv.org/abs/1904.00962 algorithm 2, without its bias correction, as
    https://github.com/google-research/albert lamb_optimizer.py does.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float = 0.0
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "trust_ratio": True}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("Lamb takes no closure")
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            grads = [parameter.grad for parameter in params]
            means, squares = [], []
            for parameter in params:
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:  # build_optimizer has made it
                        state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                means.append(state["exp_avg"])
                squares.append(state["exp_avg_sq"])
            beta1, beta2 = group["betas"]
            torch._foreach_lerp_(means, grads, 1 - beta1)
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
            updates = torch._foreach_sqrt(squares)
            torch._foreach_add_(updates, group["eps"])
            updates = torch._foreach_div(means, updates)
            if group["weight_decay"]:
                torch._foreach_add_(updates, params, alpha=group["weight_decay"])
            if group["trust_ratio"]:
                weight_norms, update_norms = torch._foreach_norm(params), torch._foreach_norm(updates)
                ratios = [
                    torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w))
                    for w, u in zip(weight_norms, update_norms, strict=True)
                ]
                torch._foreach_mul_(updates, ratios)
            torch._foreach_add_(params, updates, alpha=-group["lr"])
