"""The k highest scores, computed with operations that every device supports."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def topk(scores: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    """Return the k highest scores of the last dimension of [..., N], and their indices, both [..., k] float32.

    Higher scores come first; of equal scores, the lower index comes first. If a score is NaN, the index is N.
    Trainium's compiler supports neither topk, which XLA turns into a sort (NCC_EVRF029), nor argmax, which reduces two
    tensors at the same time (NCC_ISPP027).
    """
    size = scores.size(-1)
    indices = torch.arange(size, dtype=torch.float32, device=scores.device)
    values: list[Tensor] = []
    found: list[Tensor] = []
    for _ in range(k):
        if found:
            scores = torch.where(indices == found[-1], -math.inf, scores)
        value = scores.amax(-1, keepdim=True)
        places = torch.where(scores == value, indices, float(size))
        values.append(value)
        found.append(places.amin(-1, keepdim=True))
    return torch.cat(values, -1), torch.cat(found, -1)
