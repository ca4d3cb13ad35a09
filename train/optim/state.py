"""The state of an optimizer: made before the first step, and put back from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train.config import check

if TYPE_CHECKING:
    import torch


def add_moments(optimizer: torch.optim.Optimizer, *names: str) -> None:
    """Give every parameter a float32 tensor of zeros of its shape under each of `names`."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name in names:
                optimizer.state[parameter][name] = torch.zeros_like(parameter, dtype=torch.float32)


def load_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put back what `optimizer.state_dict()` returned, on any device. The settings stay those of this run: a saved
    choice of implementation may not exist here.
    """
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
    """What an optimizer loads that has the parameters at the positions `mine` of the `total` that were saved."""
    order = saved_order(saved, total)
    return {**saved, "param_groups": [{"params": [order[position] for position in mine]}]}


def saved_order(saved: dict[str, Any], num_parameters: int) -> list[int]:
    """The numbers of a saved optimizer's parameters, in the order of its groups. InputError for another count of them
    than that of this run.
    """
    order = [index for group in saved["param_groups"] for index in group["params"]]
    check(
        len(order) == num_parameters,
        f"the checkpoint's optimizer has {len(order)} parameters, but this run trains {num_parameters}: other parts "
        "are frozen; begin a new run from its weights with model.init_from",
    )
    return order
