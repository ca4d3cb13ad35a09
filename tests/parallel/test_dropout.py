"""Dropout with 16 random bits per element, where a run on a CPU uses it."""

import pytest
import torch
import torch.nn.functional as F

from train.config import BackendConfig
from train.parallel.ddp import DDP
from train.parallel.dropout import QuickDropout

SHAPE = (3, 5, 7_001)  # not a multiple of four elements


def dropped(p, values, *, seed=0):
    torch.manual_seed(seed)
    with QuickDropout():
        return F.dropout(values, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_elements_are_zeroed_independently_and_the_others_are_scaled(p, dtype):
    result = dropped(p, torch.ones(SHAPE, dtype=dtype)).flatten()
    kept = (result != 0).double()
    (scale,) = set(result[result != 0].tolist())
    assert scale == pytest.approx(1 / (1 - p), rel=1e-4 if dtype == torch.float32 else 4e-3)
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert kept.mean().item() == pytest.approx(1 - p, abs=4 * deviation)
    for distance in (1, 2, 3, 4):  # four elements share a random number
        both = (kept[distance:] * kept[:-distance]).mean().item()
        assert both == pytest.approx((1 - p) ** 2, abs=8 * deviation)


def test_the_gradient_is_zero_where_the_value_is():
    values = torch.randn(SHAPE, requires_grad=True)
    result = dropped(0.3, values)
    result.sum().backward()
    assert torch.allclose(values.grad * values, result)


def test_the_seed_decides():
    values = torch.ones(SHAPE)
    assert torch.equal(dropped(0.1, values), dropped(0.1, values))
    assert not torch.equal(dropped(0.1, values), dropped(0.1, values, seed=1))


@pytest.mark.parametrize("given", [{"p": 0.0}, {"p": 1.0}, {"training": False}])
def test_without_a_choice_it_is_pytorchs(given):
    values = torch.randn(SHAPE)
    with QuickDropout():
        assert F.dropout(values, **given).abs().sum() in (0, values.abs().sum())


@pytest.mark.parametrize(
    ("settings", "is_quick"),
    [
        ({"precision": "bf16"}, True),
        ({"precision": "fp32"}, False),
        # recomputed layers must drop what they dropped before
        ({"precision": "bf16", "activation_checkpointing": True}, False),
    ],
)
def test_runs_in_bf16_on_a_cpu_use_it(settings, is_quick):
    backend = DDP(BackendConfig(device="cpu", **settings))
    values = torch.ones(SHAPE)
    torch.manual_seed(0)
    with backend.autocast():
        result = torch.nn.Dropout(0.1)(values)
    backend.close()
    assert torch.equal(result, dropped(0.1, values)) == is_quick
