"""A step whose gradient is not finite leaves everything as it was, is counted, and costs no graph and no wait.

Under torchrun, and with XLA as Neuron has it, this file is also the program of its own processes, see `PROGRAMS`.
"""

import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forks import DEVICE
from running import ROOT, run
from torch import nn

from train.config import BackendConfig, OptimConfig, XLAConfig
from train.parallel import nonfinite
from train.parallel.data import divide_and_clip
from train.parallel.ddp import DDP
from train.parallel.engines import Engine
from train.parallel.optim import build_optimizer

pytest.importorskip("torch_xla")

IDS = torch.arange(10).view(2, 5)
DDP_WAYS = {  # of deciding: backend.skips_on_device, torch's implementation of AdamW, optimizer
    "cpu": (False, {"fused": True}, "adamw"),
    "cpu, lamb": (False, {}, "lamb"),
    "neuron": (False, {"foreach": False}, "adamw"),
    "cuda": (True, {"fused": True}, "adamw"),  # torch's fused CPU kernel knows found_inf as well
    "cuda, lamb": (True, {}, "lamb"),
    "cuda, fused lamb": (True, {}, "lamb"),
    "cpu, fp16": (False, {"fused": True}, "adamw"),
    "cuda, fp16": (True, {"fused": True}, "adamw"),
}
XLA_WAYS = {
    "xla": ({}, "adamw"),
    "xla, lamb": ({}, "lamb"),
    "xla, bf16 weights": ({"precision": "bf16_stochastic"}, "adamw"),
    "xla, bf16 weights, lamb": ({"precision": "bf16_stochastic"}, "lamb"),
}


class Run:
    """A small model and its optimizer on a backend."""

    def __init__(self, way):
        if way in DDP_WAYS:
            precision = "fp16" if "fp16" in way else "auto"
            self.backend = DDP(BackendConfig(device=DEVICE, timeout_s=60, precision=precision))
            self.backend.skips_on_device, adamw, name = DDP_WAYS[way]
        else:
            from train.parallel.xla import XLA

            settings, name = XLA_WAYS[way]
            self.backend = XLA(XLAConfig(device="cpu", timeout_s=60, **settings))
            adamw = self.backend.adamw
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(13, 6), nn.LayerNorm(6), nn.Linear(6, 13))
        self.backend.setup_model(self.model)
        self.sync = self.backend.grad_sync(self.model, accumulation=2)
        self.parameters = list(self.model.parameters())
        self.optimizer = build_optimizer(
            OptimConfig(name=name, lr=0.1), self.parameters, adamw=adamw
        )
        if way == "cuda, fused lamb":
            self.optimizer.is_fused = True  # as on a GPU
        self.backend.ready(self.optimizer, self.parameters)

    def step(self, *scales):
        """One micro batch for each scale of the loss. Returns the norm."""
        self.sync.begin(1.0)
        for number, scale in enumerate(scales, start=1):
            with self.sync.micro_batch(is_last=number == len(scales)):
                # as data: a number would be in the graph
                scale = torch.tensor([scale]).to(self.backend.device)
                loss = (
                    self.sync.module(IDS.to(self.backend.device)).sum(-1).pow(2).sum() * scale
                ).sum()
                self.backend.scaler.scale(loss).backward()
                del scale, loss
        divisor = self.sync.reduce()
        self.backend.unscale(self.optimizer, self.parameters)
        norm = divide_and_clip(self.parameters, divisor, 1.0)
        self.backend.optimizer_step(self.optimizer, self.parameters, norm)
        return norm

    def everything(self):
        """Weights, moments and step counts, on the host."""
        state = [
            value
            for parameter in self.parameters
            for value in self.optimizer.state[parameter].values()
        ]
        assert len(state) >= 2 * len(self.parameters)
        return [copy.clone() for copy in self.backend.to_host([*self.parameters, *state])]

    def gradients_are_cleared(self):
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return not any(copy.any() for copy in self.backend.to_host(grads))


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def compiled():
    from train.parallel.xla import metric

    return metric("CompileTime")[0]


def check_skips(way, value):
    """Among steps by finite multiples of the loss those by `value`."""
    # finite gradients with an infinite norm are none of the scale's
    excused = "fp16" in way and math.isnan(value)
    clean, result = Run(way), Run(way)
    wanted = []
    for scale in (1.0, 0.5, 2.0):
        assert math.isfinite(clean.step(scale, 1.0))
        wanted.append(clean.everything())
    assert not same(wanted[0], wanted[1]) and not same(wanted[1], wanted[2])
    assert clean.backend.skips.counts() == (0, 0)
    num_graphs = compiled()
    steps = [
        (1.0, 0, (0, 0)),
        (value, 0, (1, 1)),
        (0.5, 1, (1, 0)),
        (value, 1, (2, 1)),
        (value, 1, (3, 2)),
    ]
    for scale, expected, counts in (*steps, (2.0, 2, (3, 0))):
        norm = float(result.step(scale, 1.0))
        assert math.isfinite(norm) == (scale in (1.0, 0.5, 2.0)) and math.isnan(
            norm
        ) == math.isnan(scale)
        assert same(result.everything(), wanted[expected])
        assert result.backend.skips.counts() == ((counts[0], 0) if excused else counts)
        assert result.gradients_are_cleared()
    assert compiled() == num_graphs
    result.step(value, 1.0)
    result.backend.skips.reset_streak()
    assert result.backend.skips.counts() == (4, 0)
    result.step(value, 1.0)
    assert result.backend.skips.counts() == (5, 0 if excused else 1)
    assert result.backend.scaler.get_scale() == (
        65536 / 2**5 if excused else 65536 if "fp16" in way else 1
    )
    assert compiled() == num_graphs


HUGE = 1e30  # finite gradients, whose squares are not: a norm of inf


@pytest.mark.parametrize(
    ("way", "value"),
    [
        *((way, value) for way in DDP_WAYS for value in (math.nan, HUGE)),
        *((way, HUGE) for way in XLA_WAYS),
    ],
)
def test_a_step_that_is_not_finite_changes_nothing_and_the_next_is_as_if_it_had_not_been(
    way, value
):
    check_skips(way, value)


@pytest.mark.parametrize("way", XLA_WAYS)
def test_finite_steps_on_xla_are_those_without_the_choice(way):
    """Bit for bit, also as XLA compiles it."""
    result, wanted = Run(way), Run(way)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "undo_unless", lambda *_: None)
        for scale in (1.0, 0.5, 2.0):
            wanted.step(scale, 1.0)
    for scale in (1.0, 0.5, 2.0):
        result.step(scale, 1.0)
    assert same(result.everything(), wanted.everything())


@pytest.mark.parametrize(("on_host", "on_device"), [("cpu", "cuda"), ("cpu, lamb", "cuda, lamb")])
def test_finite_steps_decided_on_the_device_are_those_decided_on_the_host(on_host, on_device):
    runs = [Run(on_host), Run(on_device)]
    for scale in (1.0, 0.5, 2.0):
        first, second = (result.step(scale, 1.0) for result in runs)
        assert torch.equal(first, second)
    assert same(runs[0].everything(), runs[1].everything())


@pytest.mark.parametrize("way", ["cuda", "cuda, lamb", "cuda, fused lamb", "cuda, fp16"])
def test_deciding_on_the_device_neither_waits_for_it_nor_copies_weights_and_moments(
    way, monkeypatch
):
    result = Run(way)

    def waits(*_):
        raise AssertionError("the host reads a value, or a tensor is copied")

    for name in ("__bool__", "__float__", "__int__", "item", "tolist", "cpu", "clone"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    result.step(1.0)
    result.step(math.nan)
    monkeypatch.undo()
    assert result.backend.skips.counts() == (1, 0 if "fp16" in way else 1)


def test_a_first_step_that_is_skipped_is_no_error_and_the_next_is_looked_at_instead():
    way = "xla"
    result = Run(way)
    result.step(math.nan)
    result.step(HUGE)
    with pytest.raises(RuntimeError, match="the first step changed no weights"):
        nothing = Run(way)
        nothing.optimizer.param_groups[0]["weight_decay"] = 0.0
        nothing.step(math.nan)
        nothing.step(0.0)
    result.step(1.0)
    assert result.backend.skips.counts() == (2, 0)


# ---- other processes -----------------------------------------------------------------------------------------------


def rank_of_two(folder):
    """Only rank 1 has a bad loss, and only in the first of two micro batches."""
    rank, result = int(os.environ["RANK"]), {}
    # XLA's device is to be open at the first backward
    for way in (
        "xla",
        "cpu",
        "cuda",
        "cuda, lamb",
        "cuda, fp16",
    ):
        begun = Run(way)
        begun.step(1.0, 1.0)
        before, num_graphs = begun.everything(), compiled()
        begun.step(math.nan if rank == 1 else 1.0, 1.0)
        kept, counts = same(before, begun.everything()), begun.backend.skips.counts()
        begun.step(1.0, 1.0)
        went_on = not same(before, begun.everything())
        Engine(begun.backend, begun.model, begun.optimizer).check_replicas()
        result[way] = [
            kept,
            counts,
            went_on,
            begun.backend.skips.counts(),
            compiled() - num_graphs,
        ]
        result[way].append(begun.backend.scaler.get_scale())
        backend = begun.backend
        dist.init_process_group = lambda *_, **__: None  # the others share the group of the first
    del begun
    backend.close()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))


def all_of_xla():
    for way in XLA_WAYS:
        check_skips(way, math.nan)
        test_finite_steps_on_xla_are_those_without_the_choice(way)


PROGRAMS = {"ranks": rank_of_two, "xla": all_of_xla}
ENVIRONMENT = {"PJRT_DEVICE": "CPU", "PYTHONPATH": f"{ROOT}/tests:{ROOT}/tests/parallel"}


def test_a_bad_micro_batch_of_one_rank_is_skipped_by_both(tmp_path):
    done = run(["ranks", str(tmp_path)], ranks=2, module=__file__, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        for way, result in json.loads((tmp_path / f"{rank}.json").read_text()).items():
            streak, scale = (0, 32768) if "fp16" in way else (1, 1)
            assert result == [True, [1, streak], True, [1, 0], 0, scale], (rank, way)


def test_without_functionalization_as_on_neuron_it_is_the_same():
    done = run(["xla"], module=__file__, env={**ENVIRONMENT, "XLA_DISABLE_FUNCTIONALIZATION": "1"})
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
