"""Ways to train over slow links: each beside the plain reduction, and resumed beside uninterrupted.

Under torchrun this file is also the program of its own ranks.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import DEVICE, launch, run_forked
from run_results import grad_norms, losses, weights
from running import run, train_overrides
from torch import nn
from toy import NAN

from train.backend import slow_links
from train.backend.ddp import DDP
from train.config import BackendConfig

RANKS, PER_MACHINE, STEPS = 4, 2, 4
SIDE, LOW, ENOUGH = 40, 1, 8  # a weight [SIDE, SIDE]; the gradient of one row on each of 4 ranks has rank 4 at most
WAYS = {
    "plain": {},
    "bf16": {"grad_compression": "bf16"},
    "powersgd": {"grad_compression": "powersgd", "powersgd_rank": ENOUGH, "powersgd_start_step": 2},
    "powersgd of rank 1": {"grad_compression": "powersgd", "powersgd_rank": LOW, "powersgd_start_step": 2},
    "hierarchical": {"hierarchical_reduction": True},
    "hierarchical bf16": {"hierarchical_reduction": True, "grad_compression": "bf16"},
}
WAYS["hierarchical powersgd"] = {**WAYS["powersgd"], "hierarchical_reduction": True}
# The most by which an entry of the gradient may differ, as a share of the largest. fp32: 6e-8 times a few roundings;
# low rank: products of three matrices; bf16: 2**-9 for each value and each of the 2 or 3 sums on its way.
TOLERANCES = {"plain": 0.0, "bf16": 0.01, "powersgd": 1e-5, "hierarchical": 1e-6, "hierarchical bf16": 0.01}
TOLERANCES["hierarchical powersgd"] = 1e-5


class Reducing:
    """A small model and its reducer on one rank, whose inputs depend on rank, step and micro batch."""

    def __init__(self, backend, way, *, accumulation=1):
        backend = copy.copy(backend)
        cfg = BackendConfig(device=DEVICE, **WAYS[way])
        backend.compresses, backend.flat_sync = cfg.grad_compression == "bf16", slow_links.flat_sync_for(cfg, "fp32")
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
        divisor = self.sync.finish()
        gradient = torch.cat([weight.grad.flatten() for weight in self.model.parameters()]).clone()
        self.model.zero_grad(set_to_none=True)
        return gradient, divisor


def reduce_all_ways(path):
    rank = int(os.environ["RANK"])
    os.environ |= {"LOCAL_RANK": str(rank % PER_MACHINE), "LOCAL_WORLD_SIZE": str(PER_MACHINE)}
    backend = DDP(BackendConfig(device=DEVICE, timeout_s=60))
    plain = Reducing(backend, "plain")
    wanted, (divisor, *_) = zip(*map(plain.step, range(STEPS)), strict=True)
    answer = {"divisor": float(divisor)}
    for way in TOLERANCES:
        made = Reducing(backend, way)
        got, divisors = zip(*map(made.step, range(STEPS)), strict=True)
        assert all(map(torch.equal, divisors, [divisor] * STEPS)), way
        answer[way] = max(furthest(one, other) for one, other in zip(got, wanted, strict=True))
        answer[f"{way}, ranks"] = float(spread_over_ranks(got[-1]))
        answer[f"{way}, accumulated"] = furthest(
            Reducing(backend, way, accumulation=2).step(0, 0.5, 0.5)[0], Reducing(backend, way).step(0)[0]
        )
    answer |= feed_back(backend, wanted) | skip(backend) | forget(backend)
    if rank == 0:
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


def feed_back(backend, wanted):
    """What was reduced and what is kept for later are together the true sum; without the latter they differ."""
    made = Reducing(backend, "powersgd of rank 1")
    got = sum(made.step(number)[0] for number in range(STEPS))
    kept = made.sync.memory.error_dict[0].clone()
    dist.all_reduce(kept)
    whole, stats = sum(wanted), made.sync.memory.compression_stats()
    return {"fed back": furthest(got + kept / RANKS, whole), "left out": furthest(got, whole), "rate": stats[0]}


def skip(backend):
    """A step whose gradient is no number on one rank is none on all, and the next is as if it had not been."""
    disturbed, calm = Reducing(backend, "powersgd of rank 1"), Reducing(backend, "powersgd of rank 1")
    for number in range(3):
        calm.step(number), disturbed.step(number)
    bad, _ = disturbed.step(3, NAN if backend.world.rank == 1 else 1.0)
    return {"skipped": bool(bad.isnan().all()), "after a skip": furthest(disturbed.step(4)[0], calm.step(4)[0])}


def forget(backend):
    """A reducer that goes on after a save, and a new one that was given what was saved."""
    made, resumed = Reducing(backend, "powersgd of rank 1"), Reducing(backend, "powersgd of rank 1")
    made.step(0), made.step(1), made.step(2)
    random = torch.get_rng_state()
    resumed.sync.load(made.sync.state()["compression"])
    pairs = [(made.step(number)[0], resumed.step(number)[0]) for number in (3, 4)]
    return {
        "resumed": all(torch.equal(one, other) for one, other in pairs),
        "compressed at once": bool(resumed.sync.memory.error_dict[0].any()),
        "random state": torch.equal(random, torch.get_rng_state()),
    }


@pytest.fixture(scope="module")
def reduced(tmp_path_factory):
    path = tmp_path_factory.mktemp("reduced") / "answer.json"
    done = run_forked(launch(__file__, [str(path)], ranks=RANKS), os.environ)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize("way", TOLERANCES)
def test_every_reduction_gives_the_plain_gradient(reduced, way):
    assert reduced[way] <= TOLERANCES[way]
    assert reduced[f"{way}, ranks"] == 0  # or replicas would drift apart
    assert reduced[f"{way}, accumulated"] <= TOLERANCES[way] or way == "plain"
    assert "bf16" not in way or reduced[way] > 1e-4  # it was rounded


def test_powersgd_keeps_what_it_leaves_out_and_resumes_as_it_goes_on(reduced):
    assert reduced["divisor"] == (1 + 2 + 3 + 4) / RANKS  # whatever the reduction
    assert reduced["rate"] > 5 and reduced["left out"] > 0.01 and reduced["fed back"] < 1e-5
    assert reduced["skipped"] and reduced["after a skip"] == 0
    assert reduced["resumed"] and reduced["compressed at once"]
    assert reduced["random state"]  # drawing the first factors has changed no dropout


POWERSGD = ["backend.grad_compression=powersgd", "backend.powersgd_rank=2", "backend.powersgd_start_step=2"]


def test_resumed_is_uninterrupted_bit_for_bit(prepared, tmp_path):
    options = [*POWERSGD, "micro_batch_size=2", "model.hidden_dropout=0.1"]
    done = run(train_overrides(tmp_path / "whole", prepared, *options), ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0] - 0.05
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut/checkpoints/step_00000006")
    done = run(train_overrides(tmp_path / "cut", prepared, *options), ranks=2)
    assert "resuming from the checkpoint of step 3" in done.stderr
    assert losses(tmp_path / "cut")[6:] == losses(tmp_path / "whole")[3:]
    assert grad_norms(tmp_path / "cut")[6:] == grad_norms(tmp_path / "whole")[3:]
    for name, tensor in weights(tmp_path / "cut").items():
        assert torch.equal(tensor, weights(tmp_path / "whole")[name]), name


if __name__ == "__main__":
    reduce_all_ways(sys.argv[1])
