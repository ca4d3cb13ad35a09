"""The highest of some scores, on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def topk(scores: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    """Return the k highest of the last dimension [..., N] of float32 scores, and their indices, [..., k] float32.

    The highest comes first, and of equal ones that with the lower index; the index of NaN is N. Trainium's compiler
    takes neither topk, which XLA makes a sort (NCC_EVRF029), nor argmax, a reduction of two tensors at the same time
    (NCC_ISPP027).
    """
    indices = torch.arange(scores.size(-1), dtype=torch.float32, device=scores.device)
    found: list[tuple[Tensor, Tensor]] = []
    for _ in range(k):
        if found:
            scores = torch.where(indices == found[-1][1], -math.inf, scores)
        value = scores.amax(-1, keepdim=True)
        index = torch.where(scores == value, indices, float(len(indices))).amin(-1, keepdim=True)
        found.append((value, index))
    values, at = zip(*found, strict=True)
    return torch.cat(values, -1), torch.cat(at, -1)
