"""Gradients that ranks send in bf16, beside the plain reduction.

Under torchrun this file is also the program of its own ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forks import DEVICE, launch, run_forked
from torch import nn

from train.config import BackendConfig
from train.parallel.ddp import DDP

RANKS, STEPS = 4, 4
SIDE = 40  # a weight [SIDE, SIDE]
ROUNDED = 0.01  # share of the largest entry: 2**-9 for each value and each of the 3 sums on its way


class Reducing:
    """A small model and its reducer on one rank, whose inputs depend on rank, step and micro batch."""

    def __init__(self, backend, *, compresses, accumulation=1):
        backend.compresses = compresses
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, 1))
        backend.setup_model(self.model)
        self.device, self.rank = backend.device, backend.world.rank
        self.sync = backend.grad_sync(self.model, accumulation=accumulation)

    def step(self, number, *scales):
        """One row a micro batch. Returns all gradients before the division, in one tensor, and the divisor."""
        self.sync.begin(1.0 + self.rank)
        for micro, scale in enumerate(scales or (1.0,), start=1):
            with self.sync.micro_batch(is_last=micro == len(scales or (1,))):
                rows = torch.randn(1, SIDE, generator=torch.Generator().manual_seed(100 * number + self.rank))
                (self.sync.module(rows.to(self.device)).square().sum() * scale).backward()
        divisor = self.sync.reduce()
        gradient = torch.cat([weight.grad.flatten() for weight in self.model.parameters()]).clone()
        self.model.zero_grad(set_to_none=True)
        return gradient, divisor


def reduce_both_ways(path):
    backend = DDP(BackendConfig(device=DEVICE, timeout_s=60))
    plain, half = (Reducing(backend, compresses=compresses) for compresses in (False, True))
    wanted, divisors = zip(*map(plain.step, range(STEPS)), strict=True)
    got, others = zip(*map(half.step, range(STEPS)), strict=True)
    once, twice = (
        Reducing(backend, compresses=True, accumulation=len(scales)).step(0, *scales)[0]
        for scales in ((1.0,), (0.5, 0.5))
    )
    answer = {
        "divisors": [float(each) for each in (*divisors, *others)],
        "rounded": max(furthest(one, other) for one, other in zip(got, wanted, strict=True)),
        "accumulated": furthest(twice, once),
        "spread": float(spread_over_ranks(got[-1])),
    }
    if backend.world.rank == 0:
        Path(path).write_text(json.dumps(answer))
    backend.world.barrier()


def furthest(one, other):
    return float((one - other).abs().max() / other.abs().max())


def spread_over_ranks(tensor):
    """The largest difference between rank 0's tensor and that of another."""
    first = tensor.clone()
    dist.broadcast(first, 0)
    difference = (tensor - first).abs().max()
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    return difference


def test_gradients_in_bf16_are_the_plain_ones_but_for_rounding_and_the_same_on_all_ranks(tmp_path):
    path = tmp_path / "answer.json"
    done = run_forked(launch(__file__, [str(path)], ranks=RANKS), os.environ)
    assert done.returncode == 0, done.stderr
    answer = json.loads(path.read_text())
    assert answer["divisors"] == [(1 + 2 + 3 + 4) / RANKS] * 2 * STEPS
    assert 1e-4 < answer["rounded"] < ROUNDED and answer["accumulated"] < ROUNDED
    assert answer["spread"] == 0  # or replicas would drift apart


if __name__ == "__main__":
    reduce_both_ways(sys.argv[1])
