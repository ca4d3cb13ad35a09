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
from finetuning import tuned, tuning
from forks import launch, run_forked
from run_results import assert_same_run, assert_same_weights, grad_norms, losses, moments, weights
from running import ROOT, lines, run, train_config, train_here, train_overrides
from safetensors.torch import load_file
from saved_steps import cut_back, flip, store_of
from toy import NAN

from train.checkpoints.loader import newest_valid
from train.config import FSDPConfig
from train.parallel.backends import open_backend
from train.parallel.engines import build_engine
from train.parallel.pieces import Tensors
from train.tasks import build_task

FSDP = "parallel=fsdp"
PIPELINE = [
    "parallel=pipeline",
    "parallel.stages=2",
    "parallel.micro_batches=2",
    "micro_batch_size=6",
]
AGAIN = "backend.activation_checkpointing=true"
ALBERT: list[str] = []  # one layer that is applied twice, and a head that is tied to the embedding
BERT = ["model.architecture=bert", "model.embedding_size=null"]  # a layer for each depth
LAMB = ["optim=lamb", "optim.lr=1e-2"]
MODELS = {"albert": ALBERT, "bert": BERT, "lamb": [*BERT, *LAMB]}
SPLITS = {
    "albert": ("albert", 2, [FSDP, "micro_batch_size=2"]),
    "bert": ("bert", 4, [FSDP, "micro_batch_size=1", AGAIN]),
    "lamb": ("lamb", 2, [FSDP, "parallel.reshard_after_forward=false"]),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory, prepared):
    """The folder of a run in one process, by its model."""
    folder = tmp_path_factory.mktemp("plain")
    for name, options in MODELS.items():
        train_here(folder / name, prepared, *options)
    return folder


@pytest.fixture(scope="module")
def splits(tmp_path_factory, prepared):
    """The folder of a run on several ranks, by its name."""
    folder = tmp_path_factory.mktemp("splits")
    for name, (model, ranks, options) in SPLITS.items():
        done = run(train_overrides(folder / name, prepared, *MODELS[model], *options), ranks=ranks)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"), [(name, model) for name, (model, *_) in SPLITS.items()]
)
def test_it_is_the_run_of_one_process(splits, plain, name, model):
    run_dir = splits / name
    assert losses(run_dir)[-1] < losses(run_dir)[0] - 0.02
    assert_same_run(run_dir, plain / model)
    facts = [
        json.loads((path / "environment.json").read_text()) for path in (run_dir, plain / model)
    ]
    assert facts[0]["parameters"] == facts[1]["parameters"]
    exported = load_file(run_dir / "export/model.safetensors")
    saved = weights(run_dir)
    assert exported and all(
        torch.equal(value, saved[f"network.{name}"]) for name, value in exported.items()
    )


@pytest.mark.parametrize("name", ["albert", "lamb"])
def test_its_checkpoint_is_that_of_one_process_and_resumes_there(
    splits, plain, prepared, tmp_path, name
):
    model = SPLITS[name][0]
    saved, wanted = (moments(path, 3) for path in (splits / name, plain / model))
    assert list(saved) == list(wanted)
    for number, state in wanted.items():
        for key, value in state.items():
            torch.testing.assert_close(saved[number][key], value, rtol=1e-3, atol=2e-5)
    train_here(cut_back(splits / name, tmp_path / "run"), prepared, *MODELS[model])
    assert losses(tmp_path / "run")[6:] == pytest.approx(losses(plain / model)[3:], rel=2e-5)


def test_a_run_of_one_process_goes_on_split(plain, prepared, tmp_path):
    run_dir = cut_back(plain / "bert", tmp_path / "run")
    done = run(train_overrides(run_dir, prepared, *BERT, FSDP), ranks=2)
    assert "resuming from the checkpoint of step 3" in done.stderr
    assert losses(run_dir)[6:] == pytest.approx(losses(plain / "bert")[3:], rel=2e-5)


@pytest.mark.slow
def test_four_ranks_resume_bit_for_bit(splits, prepared, tmp_path):
    model, ranks, options = SPLITS["bert"]
    run_dir = cut_back(splits / "bert", tmp_path / "run")
    done = run(train_overrides(run_dir, prepared, *MODELS[model], *options), ranks=ranks)
    assert "resuming from the checkpoint of step 3" in done.stderr
    assert losses(run_dir)[6:] == losses(splits / "bert")[3:]
    assert_same_weights(run_dir, splits / "bert")


def test_every_rank_writes_its_rows_under_one_manifest_and_fewer_ranks_resume(
    splits, plain, prepared, tmp_path
):
    manifest = store_of(splits / "bert").manifest(6)
    numbers = ("", "_00001", "_00002", "_00003")
    names = {f"{content}{number}.pt" for content in ("model", "optimizer") for number in numbers}
    assert manifest.files.keys() == {"ranks.pt", *names}
    sizes = [manifest.files[name]["bytes"] for name in manifest.files_of("model")]
    assert max(sizes) < 0.4 * sum(sizes)  # names and tensors of few rows are not divided by four
    run_dir = cut_back(splits / "bert", tmp_path / "run")
    done = run(train_overrides(run_dir, prepared, *BERT, FSDP, "micro_batch_size=4"), ranks=2)
    assert "resuming from the checkpoint of step 3" in done.stderr
    assert losses(run_dir)[6:] == pytest.approx(losses(plain / "bert")[3:], rel=2e-5)
    assert len(store_of(run_dir).manifest(6).files_of("model")) == 2


@pytest.mark.parametrize(
    ("name", "fault"), [("model_00002.pt", "has sha256"), ("optimizer_00003.pt", "is missing")]
)
def test_without_one_of_its_parts_a_step_is_none(splits, tmp_path, name, fault):
    run_dir = shutil.copytree(splits / "bert", tmp_path / "run")
    path = run_dir / "checkpoints/step_00000006" / name
    flip(path, 100) if fault == "has sha256" else path.unlink()
    manifest, faults = newest_valid(store_of(run_dir))
    assert manifest.step == 3 and f"step 6 is damaged ({name} {fault}" in faults[0]


@pytest.mark.slow
def test_the_best_step_is_exported_whole(prepared, tmp_path):
    """Training diverges, so that the best step is not the last one."""
    options = [*BERT, "optim.lr=0.3", "optim.warmup_steps=4", "eval_every=1", "checkpoint.every=1"]
    options += [
        "checkpoint.best=true",
        "checkpoint.keep=9",
        "best.metric=loss",
        FSDP,
    ]
    done = run(train_overrides(tmp_path / "run", prepared, *options), ranks=2)
    assert done.returncode == 0, done.stderr
    (step,) = re.findall(r"the export has the weights of step (\d+), the best", done.stderr)
    best = weights(tmp_path / "run", int(step))
    exported = load_file(tmp_path / "run/export/model.safetensors")
    assert exported and all(
        torch.equal(value, best[f"network.{name}"]) for name, value in exported.items()
    )


# Each product is rounded to 8 bits, and gathered weights are too: losses of 5 differ by a few thousandths.
@pytest.mark.slow
def test_in_bf16_it_is_nearly_the_run_of_one_process(prepared, tmp_path):
    options = [*BERT, "backend.precision=bf16"]
    train_here(tmp_path / "plain", prepared, *options)
    done = run(
        train_overrides(tmp_path / "split", prepared, *options, FSDP, "micro_batch_size=2"),
        ranks=2,
    )
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "plain"), rel=5e-3)
    assert grad_norms(tmp_path / "split") == pytest.approx(
        grad_norms(tmp_path / "plain"), rel=5e-2
    )
    assert all(weight.dtype == torch.float32 for weight in weights(tmp_path / "split").values())


TWEETS = [
    "task=classify",
    "data=tweets",
    "optim=finetune",
    f"data.path={ROOT / 'tests/inputs/tweets.csv'}",
]
TWEETS += [
    "data.validation_fraction=0.3",
    "data.lengths=[24,40]",
    "seq_len=64",
    "eval_every=2",
    "max_steps=4",
]
TWEETS += [
    "global_batch_size=12",
    "micro_batch_size=3",
    "optim.lr=1e-3",
    "optim.head_lr=1e-2",
    "model.freeze_layers=1",
    *BERT,
]
TWEETS += ["task.class_weights=balanced", "model.num_layers=4"]


@pytest.fixture(scope="module")
def classifier(prepared, tmp_path_factory):
    return tuned(tmp_path_factory.mktemp("classifier") / "plain", prepared / "tokenizer", *TWEETS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "split"), [(2, [FSDP]), (4, PIPELINE)], ids=["fsdp", "pipeline"]
)
def test_a_classifier_with_a_frozen_layer_and_a_rate_of_its_own_for_the_head(
    classifier, prepared, tmp_path, ranks, split
):
    """Of texts of two lengths, with labels that weigh differently and a rate for each layer."""
    done = run([*tuning(tmp_path / "split", prepared / "tokenizer", *TWEETS), *split], ranks=ranks)
    assert done.returncode == 0, done.stderr
    for kind, key in (
        ("train", "loss"),
        ("train", "grad_norm"),
        ("eval", "loss"),
        ("eval", "f1_macro"),
    ):
        wanted, got = (
            [line[key] for line in lines(run_dir, kind)]
            for run_dir in (classifier, tmp_path / "split")
        )
        assert got == pytest.approx(wanted, rel=4e-4), key
    assert (tmp_path / "split/samples.json").is_file()
    exported, wanted = (
        load_file(path / "export/model.safetensors") for path in (tmp_path / "split", classifier)
    )
    for name, value in exported.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-3, atol=2e-5)


# ---- several machines ----------------------------------------------------------------------------------------------


# Four ranks of which each two stand for a machine.
TWO_MACHINES = """
import os, sys
here = str(int(os.environ["RANK"]) % 2)
os.environ.update(LOCAL_RANK=here, LOCAL_WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
from train.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "albert"])
def test_each_machine_holds_a_whole_copy_and_only_the_first_saves_it(
    plain, prepared, tmp_path, model
):
    script = tmp_path / "two_machines.py"
    script.write_text(TWO_MACHINES)
    options = [*MODELS[model], FSDP, "micro_batch_size=1"]
    done = run(train_overrides(tmp_path / "run", prepared, *options), module=str(script), ranks=4)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("each of 2 machines holds a whole copy, in 2 shards") == 1
    assert_same_run(tmp_path / "run", plain / model)
    manifest = store_of(tmp_path / "run").manifest(6)
    assert manifest.files_of("model") == ["model.pt", "model_00001.pt"]
    exported = load_file(tmp_path / "run/export/model.safetensors")
    saved = weights(tmp_path / "run")
    assert exported and all(
        torch.equal(value, saved[f"network.{name}"]) for name, value in exported.items()
    )
    train_here(cut_back(tmp_path / "run", tmp_path / "one"), prepared, *MODELS[model])
    assert losses(tmp_path / "one")[6:] == pytest.approx(losses(plain / model)[3:], rel=2e-5)
    again = run(
        train_overrides(cut_back(tmp_path / "run", tmp_path / "two"), prepared, *options),
        module=str(script),
        ranks=4,
    )
    assert "resuming from the checkpoint of step 3" in again.stderr
    assert losses(tmp_path / "two")[6:] == losses(tmp_path / "run")[3:]


@pytest.mark.parametrize(
    ("ranks", "state_gib", "device_gib", "holders"),
    [
        ((16, 8), 16 * 0.34, 80, 8),  # BERT-large on two p5.48xlarge
        ((16, 8), 16 * 40.0, 80, 16),  # 40 billion weights
        ((16, 8), 16 * 40.0, None, 8),
        ((8, 8), 16 * 0.34, 80, 8),
        ((4, 1), 16 * 0.34, 24, 4),
        ((11, 8), 16 * 0.34, 80, 11),  # machines with different numbers of ranks
    ],
)
def test_weights_are_split_within_a_machine_that_has_the_memory(
    ranks, state_gib, device_gib, holders
):
    filled = state_gib / device_gib if device_gib else 0
    found = FSDPConfig().num_holders(*ranks, devices_filled=filled)
    assert found == holders


# ---- what a rank holds ---------------------------------------------------------------------------------------------


HELD = {"fsdp": [FSDP], "lamb": [FSDP, *LAMB]}


def hold_all(out, prepared):
    """One rank: write what it holds in each way, one after the other."""
    answers = {name: hold(Path(out) / name, prepared, *options) for name, options in HELD.items()}
    (Path(out) / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(answers))


def hold(out, prepared, *options):
    """How many numbers this rank holds, and how it takes a gradient of another rank that is no number."""
    cfg = train_config(Path(out) / "run", Path(prepared), *BERT, *options)
    task, backend = build_task(cfg), open_backend(cfg.backend, cfg.instance)
    torch.manual_seed(0)
    engine = build_engine(
        cfg.parallel, cfg.optim, backend, task.build_model(), task.loss, accumulation=1
    )
    engine.ready()
    held = {
        "all": sum(weight.numel() for weight in engine.model.parameters()),
        "weights": held_in(engine.model.parameters()),
        "moments": held_in(
            value for state in engine.optimizer.state.values() for value in state.values()
        ),
        "prefetched": [
            len(layer._get_fsdp_state()._states_to_forward_prefetch)
            for layer in engine.model.separate_layers()
        ],
    }
    before = whole(backend.world.all_gather_object(engine.state()))
    drawn = task.train_data().draw(np.arange(4)[None] + 4 * backend.world.rank)
    inputs = {name: value[0].to(backend.device) for name, value in drawn["inputs"].items()}
    batch = {"inputs": inputs, "count": drawn["count"][0]}
    engine.loss = lambda model, inputs: (
        task.loss(model, inputs) * (NAN if backend.world.rank == 1 else 1.0)
    )
    norms = []
    for backend.skips_on_device in (False, True):  # as CPUs skip, and as GPUs do
        norms.append(step(engine, batch, 1.0))
    skipped, after = (
        backend.skips.counts()[0],
        whole(backend.world.all_gather_object(engine.state())),
    )
    engine.loss = task.loss
    norms.append(step(engine, batch, 1e-3))
    with torch.no_grad():
        engine.evaluate(task.eval_statistics, batch["inputs"])
    engine.load(before["model"], before["optimizer"])  # as after a rollback
    norms.append(step(engine, batch, 1e-3))
    same = all(torch.equal(before["model"][name], value) for name, value in after["model"].items())
    del engine
    backend.close()
    return {
        **held,
        "norms": norms,
        "skipped": skipped,
        "unchanged": same,
        "state": len(after["model"]),
    }


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
        number: Tensors(
            {str(rank): each["state"].get(number, {}) for rank, each in enumerate(optimizers)}
        )
        for number in numbers
    }
    model = Tensors({str(rank): part.get("model", {}) for rank, part in enumerate(parts)})
    return {"model": model, "optimizer": {**optimizers[0], "state": state}}


def held_in(tensors):
    """Numbers in this process."""
    locals_ = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() for tensor in locals_ if tensor.ndim)


@pytest.fixture(scope="module")
def held(prepared, tmp_path_factory):
    """What each rank holds, by the name of the way."""
    folder = tmp_path_factory.mktemp("held")
    done = run_forked(launch(__file__, [str(folder), str(prepared)], ranks=2), os.environ)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("way", HELD)
def test_a_rank_holds_its_part_alone_and_all_skip_a_step_that_one_cannot_take(held, way):
    ranks = [rank[way] for rank in held]
    for name, factor in (("weights", 1), ("moments", 2)):
        parts, whole = [rank[name] for rank in ranks], factor * ranks[0]["all"]
        # tensors of an odd number of rows have no halves
        assert sum(parts) == whole and max(parts) < 0.6 * whole
    for rank in ranks:
        assert rank["prefetched"] == [1, 0]
        assert rank["skipped"] == 2 and rank["unchanged"]
        assert np.isnan(rank["norms"][:2]).all() and rank["norms"][2] == ranks[0]["norms"][2] > 0
        assert rank["norms"][3] == rank["norms"][2]
    assert ranks[0]["state"] > 20


# ---- what is rejected -----------------------------------------------------------------------------------------------


if __name__ == "__main__":
    hold_all(*sys.argv[1:])
