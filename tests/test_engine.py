"""The engine's interface: one from outside trains, evaluates, saves, resumes and exports through the unchanged loop."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from forks import launch, run_forked
from run_results import weights
from split_engine import HalvesConfig, TwoLayersTask
from toy import Toy, spec_of

from train import parallel
from train.config import InputError, ParallelConfig
from train.tasks import TASKS

NAMES = ["first.weight", "first.bias", "second.weight", "second.bias"]


def main(folder, engine):
    """One rank: train in FOLDER/run."""
    toy = Toy(Path(folder))
    TASKS["toy"] = spec_of(lambda: TwoLayersTask(toy))
    parallel.ENGINES["halves"] = "split_engine"  # the one line
    try:
        toy.train(
            parallel=HalvesConfig() if engine == "halves" else ParallelConfig(name=engine),
            export=True,
            micro_batch_size=4,
        )
    except InputError as error:
        sys.exit(f"rejected: {error}")


def train(folder, engine, *, ranks):
    return run_forked(launch(__file__, [str(folder), engine], ranks=ranks), os.environ)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), "data", ranks=1)


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("halves"), "halves", ranks=2)


def trained(folder, engine, *, ranks):
    done = train(folder, engine, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return Toy(folder)


def test_two_ranks_that_hold_a_layer_each_are_one_that_holds_both(plain, halves):
    for kind, key in (("train", "loss"), ("train", "grad_norm"), ("eval", "loss"), ("train", "examples")):
        assert halves.values(kind, key) == pytest.approx(plain.values(kind, key), rel=1e-5), key
    assert halves.values("summary", "tokens") == plain.values("summary", "tokens") == [48]
    before, after = halves.values("eval", "loss")
    assert after < before
    for step in (3, 6):
        saved, wanted = weights(halves.folder / "run", step), weights(plain.folder / "run", step)
        assert sorted(saved) == sorted(wanted) == sorted(NAMES)
        for name in NAMES:
            torch.testing.assert_close(saved[name], wanted[name], rtol=1e-5, atol=1e-6)
    plan = json.loads((halves.folder / "run/environment.json").read_text())["plan"]
    assert (plan["micro_batch_size"], plan["accumulation"]) == (4, 2)  # both ranks see the whole batch


def test_its_export_is_the_whole_model(halves):
    exported = torch.load(halves.folder / "run/export/model.pt", weights_only=True)
    saved = weights(halves.folder / "run")
    assert all(torch.equal(exported[name], saved[name]) for name in NAMES)


@pytest.mark.parametrize(("engine", "ranks"), [("halves", 2), ("data", 1)])
def test_its_checkpoint_resumes_under_it_and_under_data_parallelism(plain, halves, tmp_path, engine, ranks):
    shutil.copytree(halves.folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000006")
    resumed = trained(tmp_path, engine, ranks=ranks)
    assert resumed.values("train", "step") == [1, 2, 3, 4, 5, 6, 4, 5, 6]
    assert resumed.values("train", "loss")[6:] == pytest.approx(plain.values("train", "loss")[3:], rel=1e-5)


def test_a_number_of_ranks_that_it_cannot_use_is_rejected(tmp_path):
    done = train(tmp_path, "halves", ranks=1)
    assert done.returncode != 0 and "rejected: parallel=halves needs 2 ranks, not 1" in done.stderr


if __name__ == "__main__":
    main(*sys.argv[1:])
