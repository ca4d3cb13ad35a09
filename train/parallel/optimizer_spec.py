"""An optimizer's spec, its parameter groups, and its state. Importing this does not import torch.

Groups separate parameters by weight decay and by learning rate. An optimizer's state is created with the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypedDict

from train.config import OptimConfig, check

if TYPE_CHECKING:
    import torch
    from torch import nn

Group = dict[str, Any]  # a parameter group of a torch optimizer


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer's entry in the table of optimizers."""

    # build(settings, groups, options) imports torch, and returns the optimizer with its state. `options` choose torch's
    # AdamW implementation for the device.
    build: Callable[[Any, list[Group], dict[str, bool]], torch.optim.Optimizer]
    # the class of its settings
    settings: type[OptimConfig] = OptimConfig


class Roles(TypedDict):
    """The places of parameters in the model, from which their learning rates are computed."""

    head: list[nn.Parameter]
    # distances to the head in layers; 0 for parameters not listed
    distances: dict[nn.Parameter, int]


def roles(cfg: OptimConfig, model: Any) -> Roles:
    """Return the roles of a model's parameters. Raises InputError if cfg.layer_decay does not suit the model."""
    return {
        "head": model.head_parameters(),
        "distances": {} if cfg.layer_decay is None else model.distances(),
    }


def parameter_groups(
    cfg: OptimConfig,
    parameters: Iterable[nn.Parameter],
    head: Iterable[nn.Parameter] = (),
    distances: Mapping[nn.Parameter, int] | None = None,
) -> list[Group]:
    """Return a group with weight decay, one without it (biases and normalisation weights), and the same two for `head`.

    Empty groups, such as a frozen encoder's, are left out. The learning rate of a group is cfg.lr times its
    `lr_factor`. With cfg.layer_decay a group is split wherever the distance to the head changes, so that parameters
    keep their order. Raises InputError if cfg.head_lr is set without a head.
    """
    parameters, heads = list(parameters), {id(parameter) for parameter in head}
    check(
        cfg.head_lr is None or bool(heads),
        f"optim.head_lr={cfg.head_lr} needs a task whose head begins with random weights; leave it out",
    )
    groups = []
    for is_head, lr_factor in ((False, 1.0), (True, (cfg.head_lr or cfg.lr) / cfg.lr)):
        for decays, weight_decay in ((True, cfg.weight_decay), (False, 0.0)):
            chosen = [
                p for p in parameters if (id(p) in heads) == is_head and (p.ndim >= 2) == decays
            ]
            for distance, same in groupby(chosen, lambda weight: (distances or {}).get(weight, 0)):
                factor = lr_factor * (cfg.layer_decay or 1.0) ** distance
                groups.append(
                    {"params": list(same), "lr_factor": factor, "weight_decay": weight_decay}
                )
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set each group's rate to `lr` times its `lr_factor`. Tensors change in place, because graphs refer to them."""
    import torch

    for group in optimizer.param_groups:
        value = lr * group["lr_factor"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(torch.tensor([value]), non_blocking=group["lr"].is_cuda)
        else:
            group["lr"] = value


def add_moments(optimizer: torch.optim.Optimizer, *names: str) -> None:
    """Add float32 zeros, with the parameter's shape, to every parameter's state under each of `names`."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name in names:
                optimizer.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore a saved state without the saved settings: they may choose an implementation that this device lacks."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(saved_order(saved, len(parameters)), parameters, strict=True):
        own = optimizer.state[parameter]
        for name, value in saved["state"].get(index, {}).items():
            if value.ndim == 0:
                # in place: on XLA all parameters share one step count at first
                own[name].fill_(value.item())
            elif own[name].device.type == "cpu":
                own[name].copy_(value)  # copied, since the loaded value may be memory-mapped
            else:
                own[name] = value.to(device=own[name].device, dtype=own[name].dtype)


def part_of(saved: dict[str, Any], mine: Sequence[int], *, total: int) -> dict[str, Any]:
    """Return a saved state with only the parameters at positions `mine` of `total`.

    Raises KeyError if the files that were read lack the moments of one of these parameters.
    """
    order = saved_order(saved, total)
    own = [order[position] for position in mine]
    lacking = [number for number in own if number not in saved["state"]] if saved["state"] else []
    if lacking:
        raise KeyError(f"no moments of parameter {lacking[0]}")
    return {**saved, "param_groups": [{"params": own}]}


def saved_order(saved: dict[str, Any], num_parameters: int) -> list[int]:
    """Return a saved optimizer's parameter indices by group. Raises InputError unless there are `num_parameters`."""
    order = [index for group in saved["param_groups"] for index in group["params"]]
    check(
        len(order) == num_parameters,
        f"the checkpoint's optimizer has {len(order)} parameters, but this run trains {num_parameters}: other "
        "weights are frozen; begin a new run from its weights with model.init_from",
    )
    return order
