"""An optimizer's entry in the table of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from train.config import OptimConfig

if TYPE_CHECKING:
    import torch

Group = dict[str, Any]  # a parameter group, as torch's optimizers take it


@dataclass(frozen=True)
class OptimizerSpec:
    # build(settings, parameter groups, the options of torch's AdamW that suit the device) returns the optimizer, with
    # its state. It imports torch.
    build: Callable[[Any, list[Group], dict[str, bool]], torch.optim.Optimizer]
    settings: type[OptimConfig] = OptimConfig  # a subclass adds settings
