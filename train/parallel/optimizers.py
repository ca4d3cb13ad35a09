"""The tables of optimizers and of learning-rate schedules.

To add an optimizer, write a module with a SPEC and add a line to OPTIMIZERS. Composing a configuration reads this table
without importing torch, so the modules of optimizers import torch inside their functions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from train.config import WSD, OptimConfig, Plan, check, check_choice
from train.parallel import adamw, lamb
from train.parallel.optimizer_spec import OptimizerSpec, parameter_groups

if TYPE_CHECKING:
    import torch
    from torch import nn

logger = logging.getLogger("train")
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": adamw.SPEC,
    "lamb": lamb.SPEC,
}
# schedule(left, settings) returns the rate after the warm-up as a fraction of the peak. `left` falls from 1 to 0.
SCHEDULES: dict[str, Callable[[float, OptimConfig], float]] = {
    "linear": lambda left, cfg: left,
    "cosine": lambda left, cfg: 0.5 - 0.5 * math.cos(math.pi * left),
    "polynomial": lambda left, cfg: left**cfg.power,
    "constant": lambda left, cfg: 1.0,
    WSD: lambda left, cfg: (
        1 - math.sqrt(1 - left)
    ),  # the best decay in https://arxiv.org/abs/2405.18392
}


def check_optimizer(cfg: OptimConfig) -> None:
    """Raise InputError if the optimizer or schedule is unknown, or if the settings are another optimizer's."""
    check_choice("optim.name", cfg.name, tuple(OPTIMIZERS))
    check_choice("optim.schedule", cfg.schedule, tuple(SCHEDULES))
    spec = OPTIMIZERS[cfg.name]
    check(
        isinstance(cfg, spec.settings),
        f"optim.name={cfg.name} does not match the settings of optim; use optim={cfg.name}",
    )


def build_optimizer(
    cfg: OptimConfig,
    parameters: Iterable[nn.Parameter],
    *,
    adamw: dict[str, bool] | None = None,
    head: Iterable[nn.Parameter] = (),
    distances: Mapping[nn.Parameter, int] | None = None,
) -> torch.optim.Optimizer:
    """Return the optimizer of `parameters`, with the groups of `parameter_groups`.

    `adamw` has options of torch's AdamW, which LAMB also reads. With `capturable`, everything that changes from step to
    step is on the device, including the learning rate. The state is float32 and is created here, because a first step
    that creates it would be a different graph.
    """
    groups = parameter_groups(cfg, parameters, head, distances)
    return OPTIMIZERS[cfg.name].build(cfg, groups, adamw or {"fused": True})


def learning_rate(step: int, *, cfg: OptimConfig, plan: Plan) -> float:
    """Return the learning rate of step `step`, counted from 0.

    Warm-up is linear and reaches the peak at its last step. Its first rate is peak / warmup_steps: a rate of 0 would
    waste a step and cost one more compilation on XLA. After the warm-up, the rate falls, unless
    the schedule is constant. It would reach `final_lr_fraction` of the peak one step after the last.

    With `decay_from_start` the decay is counted from step 0, as in Google's BERT and ALBERT
    (https://github.com/google-research/albert optimization.py): the first rate after the warm-up is below the peak.
    With the schedule wsd, it is counted from the end of the run's stable part.
    """
    if step < plan.warmup_steps:
        return cfg.lr * (step + 1) / plan.warmup_steps
    begin = 0 if cfg.decay_from_start else plan.warmup_steps
    if cfg.schedule == WSD:
        begin = cfg.decay_begin(plan.total_steps)
    left = (plan.total_steps - step) / max(1, plan.total_steps - begin)
    share = SCHEDULES[cfg.schedule](min(1.0, max(0.0, left)), cfg)
    return cfg.lr * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * share)


def check_continues(
    step: int, lr: float | None, *, cfg: OptimConfig, plan: Plan, force: bool
) -> None:
    """Raise InputError if a wsd run's length contradicts the rate of its last step; with `force`, only warn.

    `step` steps are done, the last one at the rate `lr`. Before its decay begins, a run may change to
    any length whose decay begins after `step`.
    """
    if (
        cfg.schedule != WSD
        or lr is None
        or (now := learning_rate(step - 1, cfg=cfg, plan=plan)) == lr
    ):
        return
    begin, remedy = cfg.decay_begin(plan.total_steps), "choose a larger length"
    if lr < cfg.lr and step > plan.warmup_steps:  # the decay has begun
        remedy = "keep the previous length, or continue a copy of an older checkpoint"
    message = (
        f"with a length of {plan.total_steps} steps, the decay of wsd begins after step {begin}, and the rate of step "
        f"{step} would have been {now:g}, but it was {lr:g}; {remedy}"
    )
    check(force, f"{message} (resume.force=true lets the rate jump)")
    logger.warning("resume.force=true: %s", message)
