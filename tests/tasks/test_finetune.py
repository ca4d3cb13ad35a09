"""Fine-tuning through the loop: the same numbers on any number of ranks, the best model out, and what is rejected."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from finetuning import train_with, tuning
from rejections import rejects
from running import ROOT, lines, run
from transformers import AutoModelForSequenceClassification

from train.checkpoints.manifest import step_name
from train.config import InputError
from train.run.stopping import StopRequest
from train.tasks.finetune import TextTask

TWEETS = ROOT / "tests" / "inputs" / "tweets.csv"


@pytest.fixture(scope="module")
def overrides(prepared, tmp_path_factory):
    """Of a run of a few seconds: a tiny ALBERT that reads tweets in batches of the lengths that suit them."""
    cache = tmp_path_factory.mktemp("cache")
    task = [
        "task=classify",
        "data=tweets",
        "optim=finetune",
        f"data.path={TWEETS}",
        f"data.cache_dir={cache}",
    ]
    task += ["data.validation_fraction=0.3"]
    steps = ["max_steps=6", "optim.lr=3e-3", "eval_every=2", "checkpoint.every=100"]
    steps += ["global_batch_size=12", "micro_batch_size=4"]
    return lambda run_dir, *others: tuning(run_dir, prepared / "tokenizer", *task, *steps, *others)


@pytest.fixture(scope="module")
def train(overrides):
    return lambda run_dir, *others, stop=None: train_with(overrides(run_dir, *others), stop)


BEST = ["checkpoint.best=true", "best.metric=f1_macro"]


@pytest.fixture(scope="module")
def best(train, tmp_path_factory):
    """A run whose last evaluation is not the best: its rate is far too high in the end."""
    run_dir = tmp_path_factory.mktemp("best") / "run"
    train(run_dir, *BEST, "max_steps=8", "optim.lr=0.1", "optim.schedule=constant")
    return run_dir


NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")


@pytest.mark.slow
def test_training_and_evaluation_are_the_same_on_three_ranks(overrides, train, tmp_path):
    given = [
        "task.class_weights=balanced",
        "task.label_smoothing=0.1",
        "optim.head_lr=1e-2",
        "micro_batch_size=2",
    ]
    train(tmp_path / "one", *given)
    done = run(overrides(tmp_path / "three", *given), ranks=3)
    assert done.returncode == 0, done.stderr
    for kind, keys in (
        ("train", ("loss", "grad_norm", "lr")),
        ("eval", ("loss", "accuracy", "f1_macro")),
    ):
        one, three = (
            [[line[key] for key in keys] for line in lines(tmp_path / n, kind)]
            for n in ("one", "three")
        )
        assert len(one) == (6 if kind == "train" else 3)
        assert np.array(three) == pytest.approx(np.array(one), rel=1e-4)
    assert (
        lines(tmp_path / "one", "summary")[0]["tokens"]
        == lines(tmp_path / "three", "summary")[0]["tokens"]
    )
    texts = [
        (tmp_path / name / "predictions/validation.jsonl").read_text() for name in ("one", "three")
    ]
    assert NUMBER.sub("N", texts[0]) == NUMBER.sub("N", texts[1]) and texts[0].count("\n") > 30
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in texts]
    # Seen with AVX-512: the last bit of a product depends on a row's place in the batch.
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3)


@pytest.mark.slow
def test_an_interrupted_run_continues_bit_for_bit(train, best, tmp_path):
    given = [*BEST, "max_steps=8", "optim.lr=0.1", "optim.schedule=constant", "checkpoint.every=1"]
    asked = StopRequest()
    asked.reason = "SIGTERM"
    for _ in range(3):  # a step each
        train(tmp_path / "run", *given, stop=asked)
    assert train(tmp_path / "run", *given) == ("done", 8)
    for kind, key in (("train", "loss"), ("eval", "f1_macro")):
        values = [
            [(line["step"], line[key]) for line in lines(folder, kind)]
            for folder in (tmp_path / "run", best)
        ]
        assert values[0] == values[1]
    assert (tmp_path / "run" / "evaluation.json").read_bytes() == (
        best / "evaluation.json"
    ).read_bytes()


@pytest.mark.slow
def test_on_xla_each_length_has_graphs_to_train_to_accumulate_and_to_evaluate(overrides, tmp_path):
    """In a process of its own: within one, a second run finds the graphs of the first."""
    pytest.importorskip("torch_xla")
    lengths = ["data.lengths=[24,40]", "seq_len=64"]
    given = ["backend=xla", "backend.device=cpu", "eval_every=6", "max_steps=10", *lengths]
    done = run(overrides(tmp_path / "run", *given))
    assert done.returncode == 0, done.stderr
    summary = lines(tmp_path / "run", "summary")[0]
    assert summary["graphs"] == 2 * 3  # no text here needs the third length
    assert summary["tokens"] < 12 * 10 * 64 and 0 < summary["padding_share"] < 1  # real ones


def test_the_best_evaluation_is_what_is_kept_and_exported(best):
    scores = {line["step"]: line["f1_macro"] for line in lines(best, "eval")}
    top = max(scores, key=lambda step: (scores[step], -step))
    assert top != max(scores), scores  # else this shows nothing: choose another rate
    assert json.loads((best / "evaluation.json").read_text())["step"] == top
    weights = torch.load(best / "checkpoints" / step_name(top) / "model.pt", weights_only=True)
    exported = AutoModelForSequenceClassification.from_pretrained(best / "export")
    for name, value in exported.state_dict().items():
        assert torch.equal(value, weights[f"network.{name}"]), name
    assert exported.config.id2label == {0: "0", 1: "1", 2: "2"}
    assert "f1" in (best / "export" / "README.md").read_text().lower()
    assert json.loads((best / "samples.json").read_text())["step"] == best_step(best) < 8


def test_a_best_checkpoint_that_is_gone_does_not_lose_the_run(train, tmp_path):
    given = [*BEST, "eval_every=2", "checkpoint.every=2", "optim.lr=1e-30"]
    train(tmp_path / "run", *given, "max_steps=6")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / step_name(2))
    shutil.rmtree(tmp_path / "run" / "export")
    assert train(tmp_path / "run", *given, "max_steps=6") == ("done", 6)
    assert (tmp_path / "run" / "export" / "config.json").is_file()
    said = "the best evaluation was at step 2, whose checkpoint cannot be loaded: exporting step 4"
    assert said in (tmp_path / "run/log/rank_0000.txt").read_text()
    assert (
        "The exported weights are those of step 4."
        in (tmp_path / "run/export/README.md").read_text()
    )


def test_predictions_that_cannot_be_written_are_a_warning(train, tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise InputError("cannot write predictions: no space left")

    monkeypatch.setattr(TextTask, "write_evaluation", full)
    assert train(tmp_path / "run", "max_steps=2") == ("done", 2)
    said = "the predictions of this evaluation are not written: InputError: cannot write predictions: no"
    assert said in (tmp_path / "run/log/rank_0000.txt").read_text()


def test_a_resume_may_pad_to_other_lengths_but_not_go_on_in_another_order(train, tmp_path):
    run = tmp_path / "run"
    train(run, "max_steps=2")
    assert train(run, "max_steps=4", "data.lengths=[32]") == ("done", 4)
    described = json.loads((run / "environment.json").read_text())
    # as of a version in which a step had rows of one length
    del described["identity"]["data.order"]
    (run / "environment.json").write_text(json.dumps(described))
    rejects("data.order: None -> any lengths", train, run, "max_steps=6")


def best_step(run_dir):
    return json.loads((run_dir / "evaluation.json").read_text())["step"]


def test_early_stopping_goes_by_the_metric_chosen(train, tmp_path):
    given = [
        "best.metric=accuracy",
        "early_stop.patience=2",
        "optim.lr=1e-30",
        "max_steps=50",
        "eval_every=1",
    ]
    assert train(tmp_path / "run", *given) == ("early_stop", 3)
