"""What a process of training sets for itself: memory that was freed stays its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BLOCK = 2**26  # bytes: more than glibc keeps by default
PAGE = 4096  # bytes
# It prints the smallest number of pages that a block touches for the first time, of five blocks one after the other: a
# block fits into the place of the one before unless a small one was put beside it.
PROGRAM = f"""
import resource, torch
from train.config import BackendConfig
from train.parallel.ddp import DDP

def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros({BLOCK}, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

DDP(BackendConfig(device="cpu")).close()
print(min(touched() for _ in range(5)))
"""


def test_a_backend_on_a_cpu_reuses_large_blocks():
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(ended.stdout) < BLOCK / PAGE / 100
