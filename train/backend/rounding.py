"""Weights that are stored in bf16 and updated in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


@contextmanager
def fp32_weights(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Inside, these bf16 parameters and their gradients are fp32. At the end the parameters are rounded once (on
    Trainium stochastically, so that small updates are not lost: NEURON_RT_STOCHASTIC_ROUNDING_EN), and the gradients
    are None.
    """
    for parameter in parameters:
        grad, parameter.grad = parameter.grad, None
        parameter.data = parameter.data.float()
        parameter.grad = None if grad is None else grad.float()
    yield
    for parameter in parameters:
        parameter.grad = None
        parameter.data = parameter.data.bfloat16()
