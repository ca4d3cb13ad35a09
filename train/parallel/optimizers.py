"""The table of optimizers, the choice of parameters that decay, and learning rates as a function of the step.

An optimizer is a module with a SPEC and its line in OPTIMIZERS. The table is read to compose a configuration, without
torch: a module imports torch in its functions.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from train.config import WSD, OptimConfig, Plan, check, check_choice
from train.parallel import adamw, lamb
from train.parallel.optimizer_spec import OptimizerSpec, load_state, parameter_groups, part_of, roles, set_learning_rate

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "build_optimizer",
    "check_continues",
    "check_optimizer",
    "learning_rate",
    "load_state",
    "parameter_groups",
    "part_of",
    "roles",
    "set_learning_rate",
]

logger = logging.getLogger("train")
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": adamw.SPEC,
    "lamb": lamb.SPEC,
}
# Each returns the share of the peak rate after the warm-up: schedule(left, settings), where `left` falls from 1 to 0.
SCHEDULES: dict[str, Callable[[float, OptimConfig], float]] = {
    "linear": lambda left, cfg: left,
    "cosine": lambda left, cfg: 0.5 - 0.5 * math.cos(math.pi * left),
    "polynomial": lambda left, cfg: left**cfg.power,
    "constant": lambda left, cfg: 1.0,
    WSD: lambda left, cfg: 1 - math.sqrt(1 - left),  # of several forms the best in https://arxiv.org/abs/2405.18392
}


def check_optimizer(cfg: OptimConfig) -> None:
    """Raise InputError unless optimizer and schedule are in the tables and the settings are the optimizer's."""
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
    """Return the optimizer of `parameters`, in the groups of `parameter_groups`; those in `head` learn at cfg.head_lr.

    `adamw` holds options of torch's implementation, for LAMB too; with `capturable`, everything that changes from step
    to step is on the device, the rate included. The state is float32 and exists from the start: if the first step made
    it, that step would be a different graph.
    """
    groups = parameter_groups(cfg, parameters, head, distances)
    return OPTIMIZERS[cfg.name].build(cfg, groups, adamw or {"fused": True})


def learning_rate(step: int, *, cfg: OptimConfig, plan: Plan) -> float:
    """Return the rate of optimizer step `step`, counted from 0.

    Warm-up is linear and reaches the peak at its last step. Its first rate is peak / warmup: 0 would waste a step and
    cost one more compilation on XLA. Then the rate falls to `final_lr_fraction` of the peak, one step after the last.

    With `decay_from_start` the decay is counted from step 0, as in Google's BERT and ALBERT
    (https://github.com/google-research/albert optimization.py): the first rate after the warm-up is below the peak.
    With the schedule wsd it is counted from the step at which the stable part of the run ends.
    """
    if step < plan.warmup_steps:
        return cfg.lr * (step + 1) / plan.warmup_steps
    begin = 0 if cfg.decay_from_start else plan.warmup_steps
    if cfg.schedule == WSD:
        begin = cfg.decay_begin(plan.total_steps)
    left = (plan.total_steps - step) / max(1, plan.total_steps - begin)
    share = SCHEDULES[cfg.schedule](min(1.0, max(0.0, left)), cfg)
    return cfg.lr * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * share)


def check_continues(step: int, lr: float | None, *, cfg: OptimConfig, plan: Plan, force: bool) -> None:
    """Raise InputError, or warn if forced, if the length of a run of wsd contradicts its last step.

    `step` steps are done, the last one at the rate `lr`. A stable run may get any length that begins its decay later.
    """
    if cfg.schedule != WSD or lr is None or (now := learning_rate(step - 1, cfg=cfg, plan=plan)) == lr:
        return
    begin, remedy = cfg.decay_begin(plan.total_steps), "give a longer one"
    if lr < cfg.lr and step > plan.warmup_steps:  # it has begun to decay
        remedy = "keep the length of before, or continue a copy of an older checkpoint"
    message = (
        f"with a length of {plan.total_steps} steps the decay of wsd begins after step {begin}, and step {step}, "
        f"which is done at the rate {lr:g}, would have had {now:g}; {remedy}"
    )
    check(force, f"{message} (resume.force=true lets the rate jump)")
    logger.warning("resume.force=true: %s", message)
