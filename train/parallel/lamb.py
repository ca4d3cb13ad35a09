"""LAMB, layer-wise adaptive moments, as in Google's ALBERT and BERT code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.config import OptimConfig
from train.config.backend import CUDA
from train.parallel.optimizer_spec import Group, OptimizerSpec, add_moments

if TYPE_CHECKING:
    import torch


def build(
    cfg: OptimConfig, groups: list[Group], options: dict[str, bool]
) -> torch.optim.Optimizer:
    """Return LAMB, without a trust ratio for biases and normalisation weights."""
    import torch

    from train.parallel.lamb_update import Lamb

    groups = [{**group, "trust_ratio": group["params"][0].ndim >= 2} for group in groups]
    device = groups[0]["params"][0].device
    # If the learning rate were a Python number, XLA and Neuron would compile the update again for each new value, and
    # a CUDA graph would keep the first value.
    if device.type not in ("cpu", CUDA) or options.get("capturable"):
        groups = [{**group, "lr": torch.tensor([cfg.lr]).to(device)} for group in groups]
    optimizer = Lamb(groups, {"lr": cfg.lr, "betas": (cfg.betas[0], cfg.betas[1]), "eps": cfg.eps})
    add_moments(optimizer, "exp_avg", "exp_avg_sq")
    return optimizer


SPEC = OptimizerSpec(build)
