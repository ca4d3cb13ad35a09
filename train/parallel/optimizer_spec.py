"""The entry of an optimizer in the table, its parameter groups, and its state. No torch at import.

Groups separate parameters that decay and those that learn at other rates. The state exists before the first step.
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

Group = dict[str, Any]  # a parameter group, as torch's optimizers take it


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer's entry in the table of optimizers."""

    # build(settings, parameter groups, the options of torch's AdamW that suit the device) returns the optimizer, with
    # its state. It imports torch.
    build: Callable[[Any, list[Group], dict[str, bool]], torch.optim.Optimizer]
    settings: type[OptimConfig] = OptimConfig  # a subclass adds settings


class Roles(TypedDict):
    """The places of parameters in their model, on which their rates depend."""

    head: list[nn.Parameter]
    distances: dict[nn.Parameter, int]  # layers to the head; 0 for those that are not there


def roles(cfg: OptimConfig, model: Any) -> Roles:
    """Return the roles of a model's parameters. Raises InputError if it has no layers for cfg.layer_decay."""
    return {"head": model.head_parameters(), "distances": {} if cfg.layer_decay is None else model.distances()}


def parameter_groups(
    cfg: OptimConfig,
    parameters: Iterable[nn.Parameter],
    head: Iterable[nn.Parameter] = (),
    distances: Mapping[nn.Parameter, int] | None = None,
) -> list[Group]:
    """Return two groups, one that decays and one of biases and normalisation weights; two more for `head`.

    Empty groups (of a frozen encoder) are left out. `lr_factor` is a group's multiple of cfg.lr. With cfg.layer_decay a
    group is split where the distance to the head changes, so that the order is the same. Raises InputError if
    cfg.head_lr is set without a head.
    """
    parameters, heads = list(parameters), {id(parameter) for parameter in head}
    check(
        cfg.head_lr is None or bool(heads),
        f"optim.head_lr={cfg.head_lr} needs a task whose head begins with random weights; leave it out",
    )
    groups = []
    for is_head, lr_factor in ((False, 1.0), (True, (cfg.head_lr or cfg.lr) / cfg.lr)):
        for decays, weight_decay in ((True, cfg.weight_decay), (False, 0.0)):
            chosen = [p for p in parameters if (id(p) in heads) == is_head and (p.ndim >= 2) == decays]
            for distance, same in groupby(chosen, lambda weight: (distances or {}).get(weight, 0)):
                factor = lr_factor * (cfg.layer_decay or 1.0) ** distance
                groups.append({"params": list(same), "lr_factor": factor, "weight_decay": weight_decay})
    return groups


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the encoder's rate to `lr`, the head's in proportion. A tensor is filled: XLA's graph holds it."""
    import torch

    for group in optimizer.param_groups:
        value = lr * group["lr_factor"]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].copy_(torch.tensor([value]), non_blocking=group["lr"].is_cuda)
        else:
            group["lr"] = value


def add_moments(optimizer: torch.optim.Optimizer, *names: str) -> None:
    """Give every parameter a float32 tensor of zeros of its shape under each of `names`."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name in names:
                optimizer.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Restore the result of `state_dict()`. Settings are kept: a saved implementation may not exist here."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in zip(saved_order(saved, len(parameters)), parameters, strict=True):
        own = optimizer.state[parameter]
        for name, value in saved["state"].get(index, {}).items():
            if value.ndim == 0:
                own[name].fill_(value.item())  # filled in place: on XLA all parameters share one step count at first
            elif own[name].device.type == "cpu":
                own[name].copy_(value)  # copied: a value that was read from a file may be mapped to it
            else:
                own[name] = value.to(device=own[name].device, dtype=own[name].dtype)


def part_of(saved: dict[str, Any], mine: Sequence[int], *, total: int) -> dict[str, Any]:
    """Return the state of an optimizer with the parameters at the positions `mine` of the `total` saved ones.

    Raises KeyError if the moments of one of these are in none of the files that were read.
    """
    order = saved_order(saved, total)
    own = [order[position] for position in mine]
    lacking = [number for number in own if number not in saved["state"]] if saved["state"] else []
    if lacking:
        raise KeyError(f"no moments of parameter {lacking[0]}")
    return {**saved, "param_groups": [{"params": own}]}


def saved_order(saved: dict[str, Any], num_parameters: int) -> list[int]:
    """Return the numbers of a saved optimizer's parameters, by its groups. Raises InputError if their count differs."""
    order = [index for group in saved["param_groups"] for index in group["params"]]
    check(
        len(order) == num_parameters,
        f"the checkpoint's optimizer has {len(order)} parameters, but this run trains {num_parameters}: other parts "
        "are frozen; begin a new run from its weights with model.init_from",
    )
    return order
