"""Optimizers, which parameters decay, and learning rates as a function of the step.

An optimizer is a module with a SPEC and its line in OPTIMIZERS. The table is read to compose a configuration, without
torch: a module imports torch in its functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from train.config import OptimConfig, check, check_choice
from train.optim import adamw, lamb
from train.optim.schedules import SCHEDULES, learning_rate
from train.optim.spec import OptimizerSpec, load_state, parameter_groups, part_of, set_learning_rate

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "build_optimizer",
    "check_optimizer",
    "learning_rate",
    "load_state",
    "parameter_groups",
    "part_of",
    "set_learning_rate",
]

OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": adamw.SPEC,
    "lamb": lamb.SPEC,
}


def check_optimizer(cfg: OptimConfig) -> None:
    """Raise InputError unless optimizer and schedule are in the tables and the settings are the optimizer's."""
    check_choice("optim.name", cfg.name, tuple(OPTIMIZERS))
    check_choice("optim.schedule", cfg.schedule, tuple(SCHEDULES))
    spec = OPTIMIZERS[cfg.name]
    check(
        isinstance(cfg, spec.settings),
        f"optim.name={cfg.name} does not go with the settings beside it; use optim={cfg.name}",
    )


def build_optimizer(
    cfg: OptimConfig,
    parameters: Iterable[nn.Parameter],
    *,
    adamw: dict[str, bool] | None = None,
    head: Iterable[nn.Parameter] = (),
) -> torch.optim.Optimizer:
    """The optimizer of `parameters`, in the groups of `parameter_groups`; those in `head` learn at cfg.head_lr.

    `adamw` holds options of torch's implementation, for LAMB too; with `capturable`, all that changes from step to step
    is on the device, the rate included. The state is float32 and exists from the start: if the first step made it, that
    step would be another graph than the others.
    """
    return OPTIMIZERS[cfg.name].build(cfg, parameter_groups(cfg, parameters, head), adamw or {"fused": True})
