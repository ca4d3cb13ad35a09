"""The measured peak of a device: its fastest product of two square matrices."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from train.backend import Backend

SIZES = (512, 1024, 2048, 4096, 8192)  # rows and columns
LONG_ENOUGH_S = 0.05  # a product that takes longer shows the peak
REPEATS = 8


def matmul_flops_per_s(backend: Backend) -> tuple[float, int]:
    """The most operations a second in a product of two n x n matrices (2 n^3 of them) in the run's precision, on this
    rank's device with its number of threads, and n.
    """
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(backend.precision.partition("_")[0], torch.float32)
    best = (0.0, 0)
    for size in SIZES:
        left, right = (torch.rand(size, size).to(backend.device, kind) for _ in range(2))
        durations_s = []
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            backend.to_host([(left @ right).amax()])  # reading its maximum waits for the device
            durations_s.append(time.perf_counter() - began_s)
        least_s = min(durations_s)
        best = max(best, (2 * size**3 / least_s, size))
        if least_s > LONG_ENOUGH_S:
            break
    return best
