"""The memory of a rank's model state, and the settings that save memory. It does not import torch.

Model states are counted as in ZeRO (https://arxiv.org/abs/1910.02054, section 3.1): a parameter takes 4 bytes for its
weight, 4 for its gradient, and 8 for the two moments of AdamW and LAMB. Activations and temporary copies are not
counted: `baretrain bench` measures the peak.
"""

from __future__ import annotations

import math

from train.config import TrainConfig
from train.models.model_sizes import Shape

GIB = 2**30
# bytes of a gradient and two moments
OPTIMIZER_BYTES = 12
# bytes of a bf16 weight alone, or with its fp32 master copy; 4 in other precisions
WEIGHT_BYTES = {"bf16_stochastic": 2, "bf16_master": 6}


def state_gib(
    cfg: TrainConfig, shape: Shape, *, world_size: int, ranks_per_machine: int, precision: str
) -> float:
    """Return the GiB of a rank's weights, gradients and moments."""
    head = cfg.task.head_size(cfg.seq_len or 1)
    trained = shape.trained_parameters(head, freeze_layers=cfg.model.freeze_layers)
    weights_bytes = WEIGHT_BYTES.get(precision, 4) * shape.trained_parameters(head)
    whole_bytes = weights_bytes + OPTIMIZER_BYTES * trained
    filled = whole_bytes / GIB / (cfg.instance.device_memory_gib or math.inf)
    holders = cfg.parallel.num_holders(world_size, ranks_per_machine, devices_filled=filled)
    return whole_bytes / holders / GIB


def advice(cfg: TrainConfig, *, world_size: int) -> str:
    """Return the settings that would save memory, the cheapest first."""
    found = ["lower micro_batch_size (the global batch stays the same)"]
    if not cfg.backend.activation_checkpointing:
        found.append("backend.activation_checkpointing=true")
    if world_size > 1:
        found.append(cfg.parallel.frees)
    return ", ".join(found)
