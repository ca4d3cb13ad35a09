"""Weights, gradients and moments split over ranks: the same run as on one process, with a part of the bytes."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from finetuning import tuning
from forks import launch, run_forked
from run_results import assert_same_run, grad_norms, losses, moments, weights
from running import ROOT, lines, run, train_config, train_overrides
from safetensors.torch import load_file
from toy import NAN
from transformers import AutoModel, MPNetConfig

from train import loop
from train.attempt.preempt import StopRequest
from train.backend import open_backend
from train.cli import compose as cli
from train.cli.saved import read_config
from train.config import InputError, TrainConfig
from train.models.network import Network
from train.parallel import build_engine
from train.parallel.pieces import Tensors
from train.storage.folders import LocalFolder
from train.tasks import build_task

FSDP, SHARDED = "parallel=fsdp", "parallel.shard_optimizer=true"
AGAIN = "backend.activation_checkpointing=true"
ALBERT: list[str] = []  # one layer that is applied twice, and a head that is tied to the embedding
BERT = ["model.architecture=bert", "model.embedding_size=null"]  # a layer for each depth
LAMB = ["optim=lamb", "optim.lr=1e-2"]
MODELS = {"albert": ALBERT, "bert": BERT, "lamb": [*BERT, *LAMB]}
SPLITS = {
    "albert": ("albert", 2, [FSDP, "micro_batch_size=2"]),
    "bert": ("bert", 4, [FSDP, "parallel.reduce_once=false", "micro_batch_size=1", AGAIN]),
    "lamb": ("lamb", 2, [FSDP, "parallel.reshard_after_forward=false"]),
    "optimizer": ("bert", 2, [SHARDED, "micro_batch_size=2"]),
    "optimizer of lamb": ("lamb", 2, [SHARDED]),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, prepared):
    """The folder of a run in one process, by its model."""
    folder = tmp_path_factory.mktemp("plain")
    for name, options in MODELS.items():
        loop.run(train_config(folder / name, prepared, *options), StopRequest())
    return folder


@pytest.fixture(scope="module", params=SPLITS)
def split(request, tmp_path_factory, prepared):
    """A run on several ranks, and the name of the model that it trains."""
    model, ranks, options = SPLITS[request.param]
    run_dir = tmp_path_factory.mktemp("split") / "run"
    done = run(train_overrides(run_dir, prepared, *MODELS[model], *options), ranks=ranks)
    assert done.returncode == 0, done.stderr
    return run_dir, model


def test_it_is_the_run_of_one_process(split, plain):
    run_dir, model = split
    assert losses(run_dir)[-1] < losses(run_dir)[0] - 0.02
    assert_same_run(run_dir, plain / model)
    facts = [json.loads((path / "environment.json").read_text()) for path in (run_dir, plain / model)]
    assert facts[0]["parameters"] == facts[1]["parameters"]
    saved_settings = read_config(LocalFolder(run_dir)).parallel
    assert saved_settings.held(2).moments == 0.5  # train.predict and others read them again
    exported = load_file(run_dir / "export/model.safetensors")
    saved = weights(run_dir)
    assert exported and all(torch.equal(value, saved[f"network.{name}"]) for name, value in exported.items())


def test_its_checkpoint_is_that_of_one_process_and_resumes_there(split, plain, prepared, tmp_path):
    run_dir, model = split
    saved, wanted = (moments(path, 3) for path in (run_dir, plain / model))
    assert list(saved) == list(wanted)
    for number, state in wanted.items():
        for name, value in state.items():
            torch.testing.assert_close(saved[number][name], value, rtol=1e-3, atol=2e-5)
    shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000006")
    loop.run(train_config(tmp_path / "run", prepared, *MODELS[model]), StopRequest())
    assert losses(tmp_path / "run")[6:] == pytest.approx(losses(plain / model)[3:], rel=2e-5)


@pytest.mark.parametrize(("ranks", "options"), [(2, [FSDP]), (4, [SHARDED])])
def test_a_run_of_one_process_goes_on_split(plain, prepared, tmp_path, ranks, options):
    shutil.copytree(plain / "bert", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000006")
    done = run(train_overrides(tmp_path / "run", prepared, *BERT, *options), ranks=ranks)
    assert "resuming from the checkpoint of step 3" in done.stderr
    assert losses(tmp_path / "run")[6:] == pytest.approx(losses(plain / "bert")[3:], rel=2e-5)


@pytest.mark.parametrize("split", [FSDP, SHARDED])
def test_the_best_step_is_exported_whole(prepared, tmp_path, split):
    """Training diverges, so that the best step is not the last one."""
    options = [*BERT, "optim.lr=0.3", "optim.warmup_steps=4", "eval_every=1", "checkpoint.every=1"]
    options += ["checkpoint.best=true", "checkpoint.keep=9", "best.metric=loss", "best.export=true", split]
    done = run(train_overrides(tmp_path / "run", prepared, *options), ranks=2)
    assert done.returncode == 0, done.stderr
    (step,) = re.findall(r"exporting step (\d+), the best", done.stderr)
    best = weights(tmp_path / "run", int(step))
    exported = load_file(tmp_path / "run/export/model.safetensors")
    assert exported and all(torch.equal(value, best[f"network.{name}"]) for name, value in exported.items())


# Each product is rounded to 8 bits, and gathered weights are too: losses of 5 differ by a few thousandths.
def test_in_bf16_it_is_nearly_the_run_of_one_process(prepared, tmp_path):
    options = [*BERT, "backend.precision=bf16"]
    loop.run(train_config(tmp_path / "plain", prepared, *options), StopRequest())
    done = run(train_overrides(tmp_path / "split", prepared, *options, FSDP, "micro_batch_size=2"), ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "plain"), rel=5e-3)
    assert grad_norms(tmp_path / "split") == pytest.approx(grad_norms(tmp_path / "plain"), rel=5e-2)
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path / "split").values())


def test_a_classifier_with_a_frozen_layer_and_a_rate_of_its_own_for_the_head(prepared, tmp_path):
    tweets = ["task=classify", "data=tweets", "optim=finetune", f"data.path={ROOT / 'tests/data/tweets.csv'}"]
    tweets += ["data.validation_fraction=0.3", "data.lengths=[24,40]", "seq_len=64", "eval_every=2", "max_steps=4"]
    tweets += ["global_batch_size=12", "micro_batch_size=3", "optim.head_lr=1e-2", "model.freeze_layers=1", *BERT]
    plain, split = (tuning(tmp_path / name, prepared / "tokenizer", *tweets) for name in ("plain", "split"))
    loop.run(cli.load_config(TrainConfig, plain), StopRequest())
    done = run([*split, FSDP], ranks=2)
    assert done.returncode == 0, done.stderr
    for kind, key in (("train", "loss"), ("train", "grad_norm"), ("eval", "loss"), ("eval", "f1_macro")):
        wanted, got = ([line[key] for line in lines(tmp_path / name, kind)] for name in ("plain", "split"))
        assert got == pytest.approx(wanted, rel=4e-4), key
    assert (tmp_path / "split/samples.json").is_file()


# ---- what a rank holds ---------------------------------------------------------------------------------------------


def hold(out, prepared, *options):
    """One rank: write how many numbers it holds, and how it takes a gradient of another rank that is no number."""
    cfg = train_config(Path(out) / "run", Path(prepared), *BERT, *options)
    task, backend = build_task(cfg), open_backend(cfg.backend, cfg.instance)
    torch.manual_seed(0)
    engine = build_engine(cfg.parallel, cfg.optim, backend, task.build_model(), task.loss, accumulation=1)
    engine.ready()
    held = {
        "all": sum(weight.numel() for weight in engine.model.parameters()),
        "weights": held_in(engine.model.parameters()),
        "moments": held_in(value for state in engine.optimizer.state.values() for value in state.values()),
    }
    before = whole(backend.world.all_gather_object(engine.state()))
    drawn = task.train_data().draw(np.arange(4)[None] + 4 * backend.world.rank)
    batch = {"inputs": {name: value[0] for name, value in drawn["inputs"].items()}, "count": drawn["count"][0]}
    engine.loss = lambda model, inputs: task.loss(model, inputs) * (NAN if backend.world.rank == 1 else 1.0)
    norms = []
    for backend.skips_on_device in (False, True):  # as CPUs skip, and as GPUs do
        norms.append(step(engine, batch, 1.0))
    skipped, after = backend.skips.counts()[0], whole(backend.world.all_gather_object(engine.state()))
    engine.loss = task.loss
    norms.append(step(engine, batch, 1e-3))
    with torch.no_grad():
        engine.evaluate(task.eval_statistics, batch["inputs"])
    engine.load(before["model"], before["optimizer"])  # as after a rollback
    norms.append(step(engine, batch, 1e-3))
    same = all(torch.equal(before["model"][name], value) for name, value in after["model"].items())
    answer = {**held, "norms": norms, "skipped": skipped, "unchanged": same, "state": len(after["model"])}
    (Path(out) / f"rank_{backend.world.rank}.json").write_text(json.dumps(answer))
    del engine
    backend.close()


def step(engine, batch, lr):
    engine.begin_step(batch["count"], lr)
    engine.forward_backward(batch, is_last=True)
    norm = engine.reduce_and_clip()
    engine.optimizer_step(norm)
    return float(norm)


def whole(parts):
    """The state that ranks hold parts of, as the loader of checkpoints returns it."""
    optimizers = [part["optimizer"] for part in parts]
    numbers = {number for optimizer in optimizers for number in optimizer["state"]}
    state = {
        number: Tensors({str(rank): each["state"].get(number, {}) for rank, each in enumerate(optimizers)})
        for number in numbers
    }
    model = Tensors({str(rank): part.get("model", {}) for rank, part in enumerate(parts)})
    return {"model": model, "optimizer": {**optimizers[0], "state": state}}


def held_in(tensors):
    """Numbers in this process."""
    locals_ = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() for tensor in locals_ if tensor.ndim)


@pytest.mark.parametrize(
    ("options", "split"),
    [([FSDP], ("weights", "moments")), ([FSDP, *LAMB], ("weights", "moments")), ([SHARDED], ("moments",))],
)
def test_a_rank_holds_its_part_alone_and_all_skip_a_step_that_one_cannot_take(prepared, tmp_path, options, split):
    done = run_forked(launch(__file__, [str(tmp_path), str(prepared), *options], ranks=2), os.environ)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    for name, factor in (("weights", 1), ("moments", 2)):
        held, whole = [rank[name] for rank in ranks], factor * ranks[0]["all"]
        if name in split:
            assert sum(held) == whole and max(held) < 0.6 * whole  # tensors of an odd number of rows have no halves
        else:
            assert held == [whole, whole]
    for rank in ranks:
        assert rank["skipped"] == 2 and rank["unchanged"]
        assert np.isnan(rank["norms"][:2]).all() and rank["norms"][2] == ranks[0]["norms"][2] > 0
        assert rank["norms"][3] == rank["norms"][2]
    assert ranks[0]["state"] > 20


# ---- what is rejected -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([FSDP, "backend=xla"], "parallel=fsdp runs with backend=ddp, not backend=xla"),
        ([SHARDED, "backend=xla"], "parallel.shard_optimizer=true runs with backend=ddp, not backend=xla"),
        ([FSDP, "backend.precision=fp16"], "parallel=fsdp does not go with backend.precision=fp16"),
        ([SHARDED, "backend.precision=fp16"], "shard_optimizer=true does not go with backend.precision=fp16"),
        ([FSDP, "backend.grad_compression=powersgd"], "parallel=fsdp reduces gradients by itself"),
        ([FSDP, "backend.hierarchical_reduction=true"], "parallel=fsdp reduces gradients by itself"),
        ([FSDP, "backend.compile=layers"], "backend.compile=layers was never seen to run with parallel=fsdp"),
        (["parallel.name=fsdp"], "parallel.name=fsdp has settings of its own: use parallel=fsdp"),
        (["parallel=local_sgd"], "there is no such parallel; choose one of: data, fsdp, pipeline"),
    ],
)
def test_what_does_not_go_with_it_is_rejected_in_one_line(prepared, tmp_path, overrides, message):
    with pytest.raises(InputError) as rejection:
        loop.run(train_config(tmp_path / "run", prepared, *overrides), StopRequest())
    assert message in str(rejection.value) and "\n" not in str(rejection.value)


def test_a_model_without_known_layers_is_rejected():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    network = Network(AutoModel.from_config(MPNetConfig(vocab_size=10, **sizes)))
    with pytest.raises(InputError, match="the layers of MPNetModel are not known.*choose parallel=data"):
        network.separate_layers()


if __name__ == "__main__":
    hold(*sys.argv[1:])
