"""The engine's interface: one from outside trains, evaluates, saves, resumes and exports through the unchanged loop."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import pytest
import torch
from rejections import rejects
from toy import Line, ToyTask, spec_of

from train.config import ParallelConfig, check
from train.parallel import engines as parallel
from train.parallel.data import DataParallel
from train.tasks import TASKS


@dataclass(kw_only=True)
class HalvesConfig(ParallelConfig):
    name: str = "halves"
    num_ranks: int = 1

    def replicas(self, world_size):
        check(
            world_size == self.num_ranks,
            f"parallel=halves needs {self.num_ranks} ranks, not {world_size}",
        )
        return 1


class Halves(DataParallel):
    """It computes a micro batch in two halves: losses are sums, so the gradient is that of the whole."""

    was_last: list[bool] = []
    exported = 0

    def forward_backward(self, batch, *, is_last):
        self.was_last.append(is_last)
        with self.sync.micro_batch(is_last=is_last):
            for first in (0, 1):
                self._add_gradients(
                    {"inputs": {name: rows[first::2] for name, rows in batch["inputs"].items()}}
                )

    def gather_full_model(self):
        Halves.exported += 1


def build(cfg, optim, backend, model, loss, **options):
    return Halves(optim, backend, model, loss, **options)


class CalmTask(ToyTask):
    def build_model(self):
        model = Line()
        model.dropout.p = 0.0  # halves would draw other units
        return model


@pytest.fixture
def calm(toy, monkeypatch):
    monkeypatch.setitem(TASKS, "toy", spec_of(lambda: CalmTask(toy)))
    monkeypatch.setitem(parallel.ENGINES, "halves", __name__)  # the one line
    return toy


def test_it_is_the_run_of_another_engine_whose_checkpoint_it_goes_on_from(calm):
    options = {"micro_batch_size": 4, "export": True}
    calm.train("plain", **options)
    assert calm.train("halves", parallel=HalvesConfig(), **options) == ("done", 6)
    assert Halves.was_last == [False, True] * 6 and Halves.exported == 1
    shutil.copytree(calm.folder / "plain", calm.folder / "resumed")
    shutil.rmtree(calm.folder / "resumed/checkpoints/step_00000006")
    calm.train("resumed", parallel=HalvesConfig(), **options)
    for name in ("halves", "resumed"):
        for kind, key in (
            ("train", "loss"),
            ("train", "grad_norm"),
            ("train", "examples"),
            ("eval", "loss"),
        ):
            got, wanted = (calm.values(kind, key, each)[-1:] for each in (name, "plain"))
            assert got == pytest.approx(wanted, rel=1e-5), key
        assert calm.weights(6, name) == pytest.approx(calm.weights(6, "plain"), rel=1e-5, abs=1e-6)
    exported = torch.load(calm.folder / "halves/export/model.pt")
    assert [
        number for tensor in exported.values() for number in tensor.flatten().tolist()
    ] == calm.weights(6, "halves")


def test_a_number_of_ranks_that_it_cannot_use_is_rejected(calm):
    rejects("parallel=halves needs 2 ranks, not 1", calm.train, parallel=HalvesConfig(num_ranks=2))
