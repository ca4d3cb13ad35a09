"""The tables of optimizers and of learning-rate schedules; parameter groups, learning rates and saved state.

To add an optimizer, write a function `build` and add a line to OPTIMIZERS. Composing a configuration reads this table
without importing torch, so torch is imported inside functions. Groups separate parameters by weight decay and by
learning rate. An optimizer's state is created with the optimizer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.config import FROM_START, WSD, OptimConfig, Plan, check
from train.config.backend import CUDA

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("train")
Group = dict[str, Any]  # a parameter group of a torch optimizer


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer's entry in the table of optimizers."""

    # build(settings, groups, options) imports torch, and returns the optimizer with its state. `options` choose torch's
    # AdamW implementation for the device.
    build: Callable[[Any, list[Group], dict[str, bool]], torch.optim.Optimizer]
    # the class of its settings
    settings: type[OptimConfig] = OptimConfig


# ---- the optimizers --------------------------------------------------------------------------------------------------


def build_adamw(
    cfg: OptimConfig, groups: list[Group], options: dict[str, bool]
) -> torch.optim.Optimizer:
    """Return torch's AdamW, Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101)."""
    import torch

    betas = (cfg.betas[0], cfg.betas[1])
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=betas, eps=cfg.eps, **options)
    # With backend.cuda_graphs, the first steps run before a graph is recorded. torch would warn about them.
    optimizer._warned_capturable_if_run_uncaptured = True
    add_moments(optimizer, "exp_avg", "exp_avg_sq")
    for group in optimizer.param_groups:
        parameters = group["params"]
        if group["capturable"]:
            group["lr"] = torch.tensor([cfg.lr]).to(parameters[0].device)
        # Fused and capturable implementations need the step count on the device; the others read it on the host.
        counts_on_device = group["fused"] or group["capturable"]
        for parameter in parameters:
            device = parameter.device if counts_on_device else "cpu"
            optimizer.state[parameter]["step"] = torch.zeros((), device=device)
    return optimizer


def build_lamb(
    cfg: OptimConfig, groups: list[Group], options: dict[str, bool]
) -> torch.optim.Optimizer:
    """Return LAMB as in Google's ALBERT code, without a trust ratio for biases and normalisation weights."""
    import torch

    from train.parallel.lamb_update import Lamb

    device = groups[0]["params"][0].device
    # If the learning rate were a Python number, XLA would compile the update again for each new value, and a CUDA graph
    # would keep the first value.
    needs_tensor = device.type not in ("cpu", CUDA) or options.get("capturable")
    for group in groups:
        group["trust_ratio"] = group["params"][0].ndim >= 2
        if needs_tensor:
            group["lr"] = torch.tensor([cfg.lr]).to(device)
    optimizer = Lamb(groups, {"lr": cfg.lr, "betas": cfg.betas, "eps": cfg.eps})
    add_moments(optimizer, "exp_avg", "exp_avg_sq")
    return optimizer


OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": OptimizerSpec(build_adamw),
    "lamb": OptimizerSpec(build_lamb),
}


def build_optimizer(
    cfg: OptimConfig,
    parameters: Iterable[nn.Parameter],
    *,
    adamw: dict[str, bool] | None = None,
    head: Iterable[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """Return the optimizer of `parameters`, with the groups of `parameter_groups`.

    `adamw` has options of torch's AdamW, which LAMB also reads. With `capturable`, everything that changes from step to
    step is on the device, including the learning rate. The state is float32 and is created here, because a first step
    that creates it would be a different graph.
    """
    groups = parameter_groups(cfg, parameters, head)
    return OPTIMIZERS[cfg.name].build(cfg, groups, adamw or {"fused": True})


def add_moments(optimizer: torch.optim.Optimizer, *names: str) -> None:
    """Add float32 zeros, with the parameter's shape, to every parameter's state under each of `names`."""
    import torch

    for parameter in parameters_of(optimizer):
        state = optimizer.state[parameter]
        for name in names:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# ---- parameter groups ------------------------------------------------------------------------------------------------


def parameter_groups(
    cfg: OptimConfig,
    parameters: Iterable[nn.Parameter],
    head: Iterable[nn.Parameter] = (),
) -> list[Group]:
    """Return a group with weight decay, one without it (biases and normalisation weights), and the same two for `head`.

    Empty groups, such as a frozen encoder's, are left out. The learning rate of a group is cfg.lr times its
    `lr_factor`. Raises InputError if cfg.head_lr is set without a head.
    """
    heads = {id(parameter) for parameter in head}
    check(
        cfg.head_lr is None or bool(heads),
        f"optim.head_lr={cfg.head_lr} needs a task whose head begins with random weights; leave it out",
    )
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        is_head = id(parameter) in heads
        kinds.setdefault((is_head, parameter.ndim < 2), []).append(parameter)
    groups = []
    for (is_head, is_vector), chosen in sorted(kinds.items()):
        group: Group = {"params": chosen, "lr_factor": 1.0, "weight_decay": cfg.weight_decay}
        if is_head and cfg.head_lr is not None:
            group["lr_factor"] = cfg.head_lr / cfg.lr
        if is_vector:
            group["weight_decay"] = 0.0
        groups.append(group)
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's rate to `lr` times its `lr_factor`. Tensors change in place, because graphs refer to them.

    Rates that are numbers are rounded to float32 too, so that all runs use the same ones.
    """
    import torch

    for group in optimizer.param_groups:
        value = torch.tensor([lr * group["lr_factor"]], dtype=torch.float32)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(value, non_blocking=group["lr"].is_cuda)
        else:
            group["lr"] = float(value)


# ---- saved state -----------------------------------------------------------------------------------------------------


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore a saved state without the saved settings: they may choose an implementation that this device lacks."""
    parameters = parameters_of(optimizer)
    order = saved_order(saved, len(parameters))
    for index, parameter in zip(order, parameters, strict=True):
        state = optimizer.state[parameter]
        for name, value in saved["state"].get(index, {}).items():
            own = state[name]
            if value.ndim == 0:
                # In place, because on XLA all parameters share one step count at first.
                own.fill_(value.item())
            elif own.device.type == "cpu":
                # A copy, because the loaded value may be memory-mapped.
                own.copy_(value)
            else:
                state[name] = value.to(device=own.device, dtype=own.dtype)


def part_of(saved: dict[str, Any], mine: Sequence[int], *, total: int) -> dict[str, Any]:
    """Return a saved state with only the parameters at positions `mine` of `total`.

    Raises KeyError if the files that were read lack the moments of one of these parameters.
    """
    order = saved_order(saved, total)
    own = [order[position] for position in mine]
    state = saved["state"]
    for number in own:
        if state and number not in state:
            raise KeyError(f"no moments of parameter {number}")
    return {**saved, "param_groups": [{"params": own}]}


def saved_order(saved: dict[str, Any], num_parameters: int) -> list[int]:
    """Return a saved optimizer's parameter indices by group. Raises InputError unless there are `num_parameters`."""
    order = [index for group in saved["param_groups"] for index in group["params"]]
    check(
        len(order) == num_parameters,
        f"the checkpoint's optimizer has {len(order)} parameters, but this run trains {num_parameters}: other "
        "weights are frozen; begin a new run from its weights with model.pretrained",
    )
    return order


# ---- learning rates --------------------------------------------------------------------------------------------------

# schedule(left, settings) returns the rate after the warm-up as a fraction of the peak. `left` falls from 1 to 0. The
# decay of wsd is the best one in https://arxiv.org/abs/2405.18392.
SCHEDULES: dict[str, Callable[[float, OptimConfig], float]] = {
    "linear": lambda left, cfg: left,
    FROM_START: lambda left, cfg: left,
    "cosine": lambda left, cfg: 0.5 - 0.5 * math.cos(math.pi * left),
    "constant": lambda left, cfg: 1.0,
    WSD: lambda left, cfg: 1 - math.sqrt(1 - left),
}


def learning_rate(step: int, *, cfg: OptimConfig, plan: Plan) -> float:
    """Return the learning rate of step `step`, counted from 0.

    Warm-up is linear and reaches the peak at its last step. Its first rate is peak / warmup_steps: a rate of 0 would
    waste a step and cost one more compilation on XLA. After the warm-up, the rate falls, unless
    the schedule is constant. It would reach `final_lr_fraction` of the peak one step after the last.

    With the schedule linear_from_start the decay is counted from step 0, as in Google's BERT and ALBERT
    (https://github.com/google-research/albert optimization.py): the first rate after the warm-up is below the peak.
    With the schedule wsd, it is counted from the end of the run's stable part.
    """
    if step < plan.warmup_steps:
        return cfg.lr * (step + 1) / plan.warmup_steps
    begin = plan.warmup_steps
    if cfg.schedule == FROM_START:
        begin = 0
    if cfg.schedule == WSD:
        begin = cfg.decay_begin(plan.total_steps)
    left = (plan.total_steps - step) / max(1, plan.total_steps - begin)
    left = min(1.0, max(0.0, left))
    share = SCHEDULES[cfg.schedule](left, cfg)
    final = cfg.final_lr_fraction
    return cfg.lr * (final + (1 - final) * share)


def check_continues(
    step: int, lr: float | None, *, cfg: OptimConfig, plan: Plan, force: bool
) -> None:
    """Raise InputError if a wsd run's length contradicts the rate of its last step; with `force`, only warn.

    `step` steps are done, the last one at the rate `lr`. Before its decay begins, a run may change to
    any length whose decay begins after `step`.
    """
    if cfg.schedule != WSD or lr is None:
        return
    now = learning_rate(step - 1, cfg=cfg, plan=plan)
    if now == lr:
        return
    remedy = "choose a larger length"
    if lr < cfg.lr and step > plan.warmup_steps:  # the decay has begun
        remedy = "keep the previous length, or continue a copy of an older checkpoint"
    begin = cfg.decay_begin(plan.total_steps)
    message = (
        f"with a length of {plan.total_steps} steps, the decay of wsd begins after step {begin}, and the rate of step "
        f"{step} would have been {now:g}, but it was {lr:g}; {remedy}"
    )
    check(force, f"{message} (resume.force=true lets the rate jump)")
    logger.warning("resume.force=true: %s", message)
