"""What a process of training sets for itself: memory that was freed stays its own."""

import resource

import torch

from train.config import BackendConfig
from train.parallel.ddp import DDP

BLOCK = 2**26  # bytes: more than glibc keeps by default
PAGE = 4096  # bytes


def first_touches() -> int:
    """The pages that this process touches for the first time when it fills a block."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(BLOCK, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_backend_on_a_cpu_reuses_large_blocks():
    DDP(BackendConfig(device="cpu")).close()
    # a block fits into the place of the one before unless a small one was put beside it
    assert min(first_touches() for _ in range(5)) < BLOCK / PAGE / 100
