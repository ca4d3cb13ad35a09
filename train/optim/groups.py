"""Parameter groups: which parameters decay, and which learn at the head's rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from train.config import OptimConfig, check
from train.optim.spec import Group

if TYPE_CHECKING:
    import torch
    from torch import nn


def parameter_groups(
    cfg: OptimConfig, parameters: Iterable[nn.Parameter], head: Iterable[nn.Parameter] = ()
) -> list[Group]:
    """Two groups, one that decays and one of biases and normalisation weights, which do not; and two more for the
    parameters in `head`. Empty groups (of a frozen encoder) are left out. `lr_factor` is a group's multiple of cfg.lr.

    InputError for cfg.head_lr without a head.
    """
    parameters, heads = list(parameters), {id(parameter) for parameter in head}
    check(
        cfg.head_lr is None or bool(heads),
        f"optim.head_lr={cfg.head_lr} is for tasks whose head begins with random weights; leave it out",
    )
    groups = []
    for is_head, lr_factor in ((False, 1.0), (True, (cfg.head_lr or cfg.lr) / cfg.lr)):
        for decays, weight_decay in ((True, cfg.weight_decay), (False, 0.0)):
            chosen = [p for p in parameters if (id(p) in heads) == is_head and (p.ndim >= 2) == decays]
            if chosen:
                groups.append({"params": chosen, "lr_factor": lr_factor, "weight_decay": weight_decay})
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the encoder's rate to `lr` and the head's in proportion. A rate that is a tensor stays the same tensor: a new
    one would make another graph on XLA.
    """
    import torch

    for group in optimizer.param_groups:
        value = lr * group["lr_factor"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(torch.tensor([value]))
        else:
            group["lr"] = value
