"""How tests read a finished run, and compare two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from running import lines

from train.checkpoints.loader import read_optimizer, read_weights
from train.checkpoints.store import LocalStore

# Sums of float32 in another order differ in the last bits (relative 6e-8), and AdamW's division by sqrt(v) + eps can
# enlarge that: over six steps differences of up to 2e-6 were seen in losses of 5. 2e-5 is ten times that.
TOLERANCE = 2e-5


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in lines(run_dir, "train")]


def grad_norms(run_dir: Path) -> list[float]:
    return [line["grad_norm"] for line in lines(run_dir, "train")]


def weights(run_dir: Path, step: int = 6) -> dict[str, torch.Tensor]:
    """Those of all ranks, put together."""
    store = LocalStore(run_dir / "checkpoints")
    return dict(read_weights(store.fetch(step), store.manifest(step)))


def moments(run_dir: Path, step: int) -> dict[str, Any]:
    store = LocalStore(run_dir / "checkpoints")
    return read_optimizer(store.fetch(step), store.manifest(step))["state"]


def assert_same_weights(result: Path, wanted: Path, step: int = 6) -> None:
    """Bit for bit."""
    first, second = weights(result, step), weights(wanted, step)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def assert_same_run(result: Path, wanted: Path) -> None:
    assert losses(result) == pytest.approx(losses(wanted), rel=TOLERANCE)
    assert grad_norms(result) == pytest.approx(grad_norms(wanted), rel=20 * TOLERANCE)
    evaluations = [
        [line[key] for line in lines(d, "eval") for key in ("loss", "masked_accuracy")]
        for d in (result, wanted)
    ]
    assert evaluations[0] == pytest.approx(evaluations[1], rel=TOLERANCE)
    for name, tensor in weights(result).items():
        torch.testing.assert_close(tensor, weights(wanted)[name], rtol=1e-3, atol=2e-5)
