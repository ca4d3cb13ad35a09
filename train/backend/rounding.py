"""Weights that are stored in bf16 and updated in fp32."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def widen(parameters: Sequence[nn.Parameter]) -> None:
    """Make bf16 parameters and their gradients fp32, for one update."""
    for parameter in parameters:
        grad, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.float()
        parameter.grad = None if grad is None else grad.float()


def round_to_bf16(parameters: Sequence[nn.Parameter]) -> None:
    """Round the parameters back once, on Trainium stochastically, so that small updates are not lost
    (NEURON_RT_STOCHASTIC_ROUNDING_EN). The gradients are None afterwards.
    """
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.bfloat16()
