"""AdamW, Adam with decoupled weight decay (https://arxiv.org/abs/1711.05101), as implemented in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.config import OptimConfig
from train.parallel.optimizer_spec import Group, OptimizerSpec, add_moments

if TYPE_CHECKING:
    import torch


def build(
    cfg: OptimConfig, groups: list[Group], options: dict[str, bool]
) -> torch.optim.Optimizer:
    import torch

    optimizer = torch.optim.AdamW(
        groups, lr=cfg.lr, betas=(cfg.betas[0], cfg.betas[1]), eps=cfg.eps, **options
    )
    # With backend.cuda_graphs, the first steps run before a graph is recorded. torch would warn about them.
    optimizer._warned_capturable_if_run_uncaptured = True
    add_moments(optimizer, "exp_avg", "exp_avg_sq")
    for group in optimizer.param_groups:
        if group["capturable"]:
            group["lr"] = torch.tensor([cfg.lr]).to(group["params"][0].device)
        # Fused and capturable implementations need the step count on the device; the others read it on the host.
        counts_on_device = group["fused"] or group["capturable"]
        for parameter in group["params"]:
            device = parameter.device if counts_on_device else "cpu"
            optimizer.state[parameter]["step"] = torch.zeros((), device=device)
    return optimizer


SPEC = OptimizerSpec(build)
