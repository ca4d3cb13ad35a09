"""Learning rates as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

from train.config import OptimConfig, Plan

# The share of the peak rate after the warm-up: schedule(left, settings), where `left` falls from 1 to 0.
SCHEDULES: dict[str, Callable[[float, OptimConfig], float]] = {
    "linear": lambda left, cfg: left,
    "cosine": lambda left, cfg: 0.5 - 0.5 * math.cos(math.pi * left),
    "polynomial": lambda left, cfg: left**cfg.power,
    "constant": lambda left, cfg: 1.0,
}


def learning_rate(step: int, *, cfg: OptimConfig, plan: Plan) -> float:
    """The rate of optimizer step `step`, counted from 0.

    Warm-up is linear and reaches the peak at its last step. Its first rate is peak / warmup: 0 would waste a step and
    cost one more compilation on XLA. Then the rate falls to `final_lr_fraction` of the peak, one step after the last.

    With `decay_from_start` the decay is counted from step 0, as in Google's BERT and ALBERT
    (https://github.com/google-research/albert optimization.py): the first rate after the warm-up is below the peak.
    """
    if step < plan.warmup_steps:
        return plan.lr * (step + 1) / plan.warmup_steps
    begin = 0 if cfg.decay_from_start else plan.warmup_steps
    left = (plan.total_steps - step) / max(1, plan.total_steps - begin)
    share = SCHEDULES[cfg.schedule](min(1.0, max(0.0, left)), cfg)
    return plan.lr * (cfg.final_lr_fraction + (1 - cfg.final_lr_fraction) * share)
