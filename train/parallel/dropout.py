"""Dropout that draws fewer random numbers: on CPUs, PyTorch's takes a fifth of a step in bf16 (benchmarks/notes.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

LANES = 4  # numbers of 16 bits in one random number of 64 bits
LEVELS = 2**16  # probabilities are rounded to multiples of 1 / LEVELS


class QuickDropout(TorchFunctionMode):
    """A context in which `torch.nn.functional.dropout`, and modules that call it, use 16 random bits per element."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.dropout:
            func = dropout
        return func(*args, **(kwargs or {}))


def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    """Zero elements with probability `p` in training, and divide the others by the share that is kept.

    The random numbers come from PyTorch's default generator.
    """
    dropped = round(p * LEVELS)
    if inplace or not training or dropped in (0, LEVELS):
        return F.dropout(input, p, training, inplace)
    numbers = torch.empty(-(-input.numel() // LANES), dtype=torch.int64)
    numbers.random_(-(2**63), None)  # all 64 bits
    lanes = numbers.view(torch.int16)[: input.numel()].view(input.shape)
    # comparing in place keeps 16 bits, which are cast to `dtype` four times as fast as booleans
    kept = lanes.ge_(dropped - LEVELS // 2).to(input.dtype)
    return input * kept.mul_(LEVELS / (LEVELS - dropped))
