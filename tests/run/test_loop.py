"""A run as its user sees it: what it writes, how it ends, what it rejects."""

import json
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rejections import rejects
from running import ROOT, lines, run, train_config, train_here, train_overrides
from saved_steps import flip
from toy import ToyTask
from transformers import AlbertConfig, AutoModelForMaskedLM, AutoTokenizer

from train import loop
from train.config import BackendConfig, HeadSize, InputError, TaskConfig
from train.config.train import EarlyStopConfig
from train.data.shards.format import ShardSet
from train.data.shards.manifest import read_manifest
from train.models.encoder import MaskedLM
from train.run import description
from train.run.stopping import StopRequest


def test_metrics_have_the_fields_that_outside_tools_read(finished):
    step = lines(finished, "train")[-1]
    assert (
        set("step loss lr grad_norm tokens_per_s data_wait_s step_s examples".split())
        <= step.keys()
    )
    assert (step["step"], step["examples"]) == (6, 48)
    evaluation = lines(finished, "eval")[-1]
    assert {"step", "loss", "perplexity", "masked_accuracy"} <= evaluation.keys()
    assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
    (summary,) = lines(finished, "summary")
    assert set("train_s tokens tokens_per_s mfu world_size backend".split()) <= summary.keys()
    assert summary["tokens"] == 6 * 8 * 32
    assert summary["mfu"] is None  # unknown on an unknown machine
    assert "cost_usd" not in summary
    assert [line["step"] for line in lines(finished, "eval")] == [3, 6]


def test_the_run_folder_is_as_the_readme_draws_it(finished):
    result = {path.name for path in finished.iterdir()}
    files = {"config.yaml", "environment.json", "metrics.jsonl", "outcome.json", "samples.json"}
    assert result == files | {"checkpoints", "tensorboard", "log", "model", "export", "lease"}
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["plan"]["total_steps"] == 6
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0]
    assert not {"PATH", "HOME", "environ"} & environment.keys()


def test_tensorboard_shows_the_curves(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert events.Scalars("eval/loss")[-1].value == pytest.approx(
        lines(finished, "eval")[-1]["loss"]
    )


def test_the_export_is_the_trained_model_for_plain_transformers(finished, prepared):
    plain = AutoModelForMaskedLM.from_pretrained(finished / "export").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "export")
    state = torch.load(finished / "checkpoints" / "step_00000006" / "model.pt", weights_only=True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, state[f"network.{name}"]), name
    manifest = read_manifest(prepared)
    tokens = torch.tensor(
        ShardSet(prepared, manifest, "train").rows(torch.arange(4).numpy()).tokens.astype("int64")
    )
    positions = torch.arange(1, 9).expand(4, -1)
    segments = torch.zeros_like(tokens)
    ours = MaskedLM(plain)(tokens, segments, positions)
    fresh = AutoModelForMaskedLM.from_pretrained(finished / "export").eval()
    torch.testing.assert_close(ours, fresh(input_ids=tokens).logits[:, 1:9], rtol=1e-5, atol=1e-5)
    assert tokenizer.mask_token == "[MASK]"
    assert tokenizer("ba").input_ids[0] == tokenizer.cls_token_id


def test_evaluation_uses_every_validation_sequence_once(finished, prepared, tmp_path):
    """The loss does not depend on the batch that the sequences were put in, the last one padded."""
    train_here(tmp_path / "run", prepared, "micro_batch_size=1")
    odd = lines(tmp_path / "run", "eval")[-1]["loss"]
    # see runs.TOLERANCE
    assert odd == pytest.approx(lines(finished, "eval")[-1]["loss"], rel=2e-5)


def test_known_peaks_and_prices_give_mfu_and_cost(tmp_path, prepared):
    known = ["instance.device_tflops_fp32=0.5", "instance.usd_per_hour=36", "export=false"]
    for steps in ("max_steps=2", "max_steps=6"):
        train_here(tmp_path / "run", prepared, *known, steps)
    first, second = lines(tmp_path / "run", "summary")
    line = lines(tmp_path / "run", "train")[-1]
    assert 0 < first["cost_usd"] < line["cost_usd"] <= second["cost_usd"]
    assert 0 < second["mfu"] < 1 and line["mfu"] > 0


def test_a_pretrained_model_goes_on_where_it_was(finished, tmp_path, prepared):
    """The export of one run is the start of the next: its first evaluation is the other's last."""
    cfg = train_config(tmp_path / "run", prepared, f"model.pretrained={finished / 'export'}")
    names = ("hidden_size", "intermediate_size", "embedding_size", "num_heads")
    for name in names:  # sizes come from the checkpoint
        setattr(cfg.model, name, None)
    cfg.optim.lr = 1e-12
    cfg.max_steps = 1
    loop.run(cfg, StopRequest())
    assert lines(tmp_path / "run", "eval")[-1]["loss"] == pytest.approx(
        lines(finished, "eval")[-1]["loss"], rel=1e-5
    )


# ---- several ranks ---------------------------------------------------------------------------------------------------


def test_a_damaged_shard_stops_all_ranks_with_one_message(tmp_path, prepared):
    data = shutil.copytree(prepared, tmp_path / "data")
    shard = data / "train-00000.safetensors"
    flip(shard, -5)
    result = run(train_overrides(tmp_path / "run", data), ranks=2)
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1 and "has sha256" in result.stderr
    # no stack trace of ours; torchrun prints its own
    assert f'File "{ROOT / "train"}' not in result.stderr


# ---- what the loop decides -------------------------------------------------------------------------------------------


def test_early_stopping_ends_a_run_that_learns_nothing_for_good_and_exports_it(toy):
    toy.scores = iter([3.0, 2.0, 2.5, 2.0, 7.0])
    flat = {"eval_every": 1, "early_stop": EarlyStopConfig(patience=2), "export": True}
    assert toy.train(**flat) == ("early_stop", 4)
    assert (toy.folder / "run/export/model.pt").is_file() and max(toy.saved()) == 4
    assert (toy.saved()[4]["best_step"], toy.outcome()["outcome"]) == (2, "done")
    assert toy.train(**flat) == ("early_stop", 4)  # it stays stopped
    assert len(toy.lines("train")) == 4


def test_a_stop_during_an_evaluation_ends_it_and_saves_the_step(toy, monkeypatch):
    """Of five batches; the second evaluation, which the next attempt owes, is stopped as well, and costs no save."""
    evaluated: list[StopRequest] = []
    statistics = ToyTask.eval_statistics

    def asks(self, model, inputs):
        # an evaluation is tried before the first step
        if not model.training and toy.losses > trained:
            stop.ask("a notice")
            evaluated.append(stop)
        return statistics(self, model, inputs)

    options = {"eval_every": 3, "eval_batch_size": 2, "checkpoint": {"every": 100}}
    toy.train("whole", **options)
    trained = toy.losses
    with monkeypatch.context() as patches:
        patches.setattr(ToyTask, "eval_statistics", asks)
        for _ in range(2):
            stop = StopRequest()
            assert toy.train(stop=stop, **options) == ("a notice", 3)
            assert list(toy.saved()) == [3] and not toy.lines("eval")
            assert evaluated.count(stop) == 2, "the vote of a batch is counted one batch later"
    assert toy.train(**options) == ("done", 6)
    assert toy.values("eval", "loss") == toy.values("eval", "loss", "whole")


def test_a_new_model_that_cannot_be_evaluated_fails_before_it_is_trained(toy, monkeypatch):
    """In its last batch, which has empty places; the trial of one that can be evaluated changes no loss."""
    toy.train("whole", eval_batch_size=4)
    statistics = ToyTask.eval_statistics
    seen = []

    def fails(self, model, inputs):
        if not model.training:
            seen.append(inputs["labels"].tolist())
            raise AssertionError("no separators in this row")
        return statistics(self, model, inputs)

    with monkeypatch.context() as patches:
        patches.setattr(ToyTask, "eval_statistics", fails)
        with pytest.raises(AssertionError, match="no separators"):
            toy.train(eval_batch_size=4)
    assert not toy.lines("train") and not toy.saved()
    (last,) = seen
    numbers = ToyTask.eval_data(None).draw(np.array([8, 9, 0, 0]))["inputs"]["labels"].tolist()
    assert last == numbers
    monkeypatch.setattr(loop, "try_evaluation", lambda *_: None)
    toy.train("untried", eval_batch_size=4)
    assert toy.values("train", "loss", "untried") == toy.values("train", "loss", "whole")


def test_the_best_evaluation_is_saved_at_once_kept_and_exported(toy):
    toy.scores = iter([3.0, 1.0, 2.0, 2.0, 2.0, 2.0])
    options = {"checkpoint": {"best": True, "keep": 2, "every": 3}}
    assert toy.train(eval_every=1, export=True, **options) == ("done", 6)
    assert list(toy.saved()) == [2, 3, 6]
    exported = torch.load(toy.folder / "run/export/model.pt")
    assert [
        number for tensor in exported.values() for number in tensor.flatten().tolist()
    ] == toy.weights(2)


TF32_ON_A_CPU = BackendConfig(device="cpu", precision="tf32")


def unloadable(*_, **__):
    raise InputError("the model lacks weights")


def large(self, *, build=ToyTask.build_model):
    model = build(self)
    model.network = SimpleNamespace(config=AlbertConfig())
    return model


@pytest.mark.parametrize("is_new", [True, False], ids=["nothing", "a finished run"])
@pytest.mark.parametrize(
    ("changes", "method", "says"),
    [
        ({"backend": TF32_ON_A_CPU}, None, "tf32 needs a CUDA device"),
        ({}, ("build_model", unloadable), "lacks weights"),
        ({}, ("train_data", unloadable), "lacks weights"),
        (
            {"backend": BackendConfig(device="cpu")},
            ("build_model", large),
            "this machine or container has too little",
        ),
    ],
    ids=["device", "model", "batches", "memory"],
)
def test_a_start_that_is_rejected_late_changes_no_result_and_can_be_repeated(
    toy, monkeypatch, is_new, changes, method, says
):
    if not is_new:
        toy.train("new/run", max_steps=1)
    before = results(toy.folder / "new/run")
    with monkeypatch.context() as poor:
        poor.setattr(description, "total_memory_bytes", lambda: 2**20)
        poor.setattr(TaskConfig, "head_size", lambda *_: HeadSize())
        if method is not None:
            poor.setattr(ToyTask, *method)
        rejects(says, toy.train, name="new/run", **changes)
    assert results(toy.folder / "new/run") == before
    assert toy.train("new/run", max_steps=2)[1] == 2


def results(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files if path.parent.name not in ("lease", "log")}


def test_an_attempt_that_is_rejected_after_its_start_leaves_its_outcome(toy, monkeypatch):
    monkeypatch.setattr(loop, "open_monitor", unloadable)
    rejects("lacks weights", toy.train)
    assert toy.outcome()["reason"] == "rejected: the model lacks weights"


@pytest.mark.parametrize(
    ("changes", "steps"),
    [({"max_epochs": 0.25}, 5), ({"max_examples": 30}, 3)],
    ids=["epochs", "examples"],
)
def test_a_run_is_as_long_as_its_epochs_or_examples(toy, changes, steps):
    assert toy.train(eval_every=None, max_steps=None, **changes) == ("done", steps)
    assert toy.values("eval", "step") == [steps]
