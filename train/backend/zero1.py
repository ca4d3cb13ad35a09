"""ZeRO stage 1: each rank keeps a share of the optimizer's state (https://arxiv.org/abs/1910.02054).

torch_xla's optimizer splits every tensor along its first dimension, padded to a multiple of the ranks. A checkpoint
holds the whole tensors, so that it is the one that any backend writes and reads, on any number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

State = dict[int, dict[str, Tensor]]  # by the number of the parameter


def split_optimizer(
    optimizer: torch.optim.Optimizer, zero_class: Any, *, max_norm: float | None, bucket_mb: int, world_size: int
) -> Any:
    """torch_xla's ZeRO optimizer in place of one whose parameters and state are whole. RuntimeError if it counts other
    ranks than the run.
    """
    known = inspect.signature(type(optimizer).__init__).parameters
    settings = {name: value for name, value in optimizer.defaults.items() if name in known}
    zero = zero_class(
        optimizer.param_groups,
        type(optimizer),
        max_norm=float("inf") if max_norm is None else max_norm,
        pin_layout=False,
        bucket_cap_mb_all_gather=bucket_mb,
        bucket_cap_mb_reduce_scatter=bucket_mb,
        save_master_weights=True,  # of no effect here but to keep it from warning
        **settings,
    )
    if zero.global_world_size != world_size:
        raise RuntimeError(f"ZeRO splits over {zero.global_world_size} devices, the run has {world_size} ranks")
    for group, split in zip(zero.param_groups, zero.base_optimizer.param_groups, strict=True):
        for parameter, shard in zip(group["params"], split["params"], strict=True):
            whole = optimizer.state[parameter]
            zero.base_optimizer.state[shard] = {
                name: value if value.ndim == 0 else zero._shard_tensor(value.cpu()).to(shard.device)
                for name, value in whole.items()
            }
    return zero


def own_share(zero: Any) -> State:
    """This rank's part of the state, still on the device."""
    shards = [shard for group in zero.base_optimizer.param_groups for shard in group["params"]]
    return {number: dict(zero.base_optimizer.state[shard]) for number, shard in enumerate(shards)}


def whole_state(shares: Sequence[dict[Any, Any]], parameters: Sequence[Tensor]) -> State:
    """The state that the ranks' shares, in rank order, make up for parameters of these shapes."""
    whole: State = {}
    for number, parameter in enumerate(parameters):
        whole[number] = {}
        for name, first in shares[0][number].items():
            pieces = [share[number][name] for share in shares]
            whole[number][name] = first if first.ndim == 0 else torch.cat(pieces)[: parameter.shape[0]]
            if whole[number][name].ndim and whole[number][name].shape != parameter.shape:
                raise RuntimeError(f"{len(shares)} shares of {name} do not make up {list(parameter.shape)}")
    return whole
