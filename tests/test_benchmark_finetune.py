"""The benchmark of fine-tuning in its smallest form: that both sides do the same work, and what is counted."""

import dataclasses
import importlib.util
import json
import time
from argparse import Namespace

import pytest
import torch
from datasets import load_from_disk
from running import ROOT
from torch.utils.data import DataLoader
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

from benchmarks import finetune
from benchmarks.peers import trainer
from train import cli, loop
from train.config import TrainConfig, make_plan
from train.data.tokenizer import train_tokenizer
from train.optim import learning_rate
from train.preempt import StopRequest

DATA = ROOT / "tests" / "data" / "tweets.csv"
NO_STEP = 1e-30  # a learning rate at which the weights stay


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """As of the command line; the encoder has random weights."""
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = train_tokenizer(DATA.read_text().splitlines(), vocab_size=120, lowercase=True, train_bytes=10**6)
    tokenizer.save_pretrained(folder)
    sizes = {"embedding_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = AlbertConfig(vocab_size=len(tokenizer), num_attention_heads=2, max_position_embeddings=64, **sizes)
    AlbertForMaskedLM(config).save_pretrained(folder)
    given = {"data": DATA, "model": folder, "overrides": [], "rounds": 2, "epochs": 1, "batch": 16, "eval_every": 3}
    sizes = {"seq_len": 24, "lengths": [18, 21], "precision": "fp32", "threads": 1}
    return Namespace(**given, **sizes, lr=NO_STEP, variants=finetune.VARIANTS)


@pytest.fixture(scope="module")
def folder(options, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    finetune.prepare(options, folder)
    return folder


@pytest.fixture(scope="module")
def facts(folder):
    return json.loads((folder / "facts.json").read_text())


@pytest.fixture(scope="module")
def ours(options, folder, facts):
    """What the runs of ours come to; in this process, since imports would take most of the time."""

    def run(command, log, *, threads):
        calm = ["watchdog.enabled=false", "preempt.notices=off"]
        loop.run(cli.load_config(TrainConfig, [*command[1:], *calm]), StopRequest())
        return {"command_s": 1.0}

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several only wait for each other, in a model so small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "run_apart", run)
        found = {name: finetune.run_variant(options, name, 3, folder, facts) for name in finetune.OURS}
    torch.set_num_threads(threads)
    return found


def test_the_tokens_of_both_sides_are_counted_alike(ours, folder, facts):
    tokens = load_from_disk(str(folder / "tokens" / "train"))
    assert len(tokens) == facts["rows"]["train"] == facts["settings"]["data"]["max_train_examples"]
    assert len(tokens) % 16 == 0
    real = sum(map(len, tokens["input_ids"]))
    assert ours["buckets"]["tokens"] == ours["fixed"]["tokens"] == real
    assert ours["fixed"]["slots"] == len(tokens) * 24
    assert real < ours["buckets"]["slots"] < ours["fixed"]["slots"]
    lengths = torch.tensor([*map(len, tokens["input_ids"])])
    needed = len(torch.bucketize(lengths, torch.tensor([18, 21, 24])).unique())
    assert ours["buckets"]["shapes"]["train"] == needed > 1 == ours["fixed"]["shapes"]["train"]


def test_steps_and_evaluations_are_those_of_the_settings(ours, facts):
    assert facts["steps"] == facts["rows"]["train"] // 16
    for found in ours.values():
        assert found["step"] == facts["steps"]
        assert [one["step"] for one in found["evaluations"]] == [3, 6, facts["steps"]]
        assert found["evaluations"][-1]["train_s"] == pytest.approx(found["train_s"])
        assert all(one["all_s"] > one["train_s"] > 0 < one["eval_s"] for one in found["evaluations"])
        assert found["begun_unix_s"] == pytest.approx(time.time(), abs=600)


def test_our_run_evaluates_the_model_and_the_texts_that_the_trainer_is_given(ours, folder):
    model = AutoModelForSequenceClassification.from_pretrained(folder / "start").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "start")
    tokens = load_from_disk(str(folder / "tokens" / "validation"))
    batch = next(iter(DataLoader(tokens, batch_size=len(tokens), collate_fn=DataCollatorWithPadding(tokenizer))))
    with torch.no_grad():
        loss = float(model(**batch).loss)
    for run_dir in (path for path in folder.iterdir() if path.name.startswith(finetune.OURS) and path.is_dir()):
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        assert [line["loss"] for line in lines if line["kind"] == "eval"] == [pytest.approx(loss, abs=1e-5)] * 3


def test_the_trainer_gets_the_same_settings(facts, options, folder):
    given = trainer.arguments("grouped", facts, 7)
    assert set(given) <= {field.name for field in dataclasses.fields(TrainingArguments)}
    assert (given["train_sampling_strategy"], given["seed"], given["bf16"]) == ("group_by_length", 7, False)
    assert trainer.arguments("trainer", facts, 7)["train_sampling_strategy"] == "random"
    assert (given["weight_decay"], given["max_grad_norm"], given["adam_epsilon"]) == (0.01, 1.0, 1e-8)

    words = finetune.our_words(options, "fixed", 0, folder, folder / "none")
    cfg = cli.load_config(TrainConfig, words)
    plan = make_plan(cfg, world_size=1, rows=facts["rows"]["train"])
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=given["learning_rate"])
    schedule = get_linear_schedule_with_warmup(optimizer, given["warmup_steps"], given["max_steps"])
    theirs = [schedule.lr_lambdas[0](step) * NO_STEP for step in range(plan.total_steps)]
    rates = [learning_rate(step, cfg=cfg.optim, plan=plan) for step in range(plan.total_steps)]
    assert 0 < given["warmup_steps"] == (first := plan.warmup_steps)
    assert rates[first:] == pytest.approx(theirs[first:])
    assert rates[:first] == pytest.approx(theirs[1 : first + 1])  # the Trainer's warm-up is a step behind


class FakeTrainer:
    def training_step(self, model, inputs, num_items):
        return "loss"

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return "outputs"

    def evaluate(self):
        time.sleep(0.05)
        self.log({})
        return {"eval_f1_macro": 0.5}

    def log(self, logs):
        time.sleep(0.05)


def test_the_meter_leaves_evaluations_and_log_lines_out_of_training():
    meter = trainer.Meter()
    fake = trainer.metered(FakeTrainer, meter)()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    meter.begin()
    began_s = time.perf_counter()
    assert fake.training_step(None, {"attention_mask": mask}, 2) == "loss"
    meter.end_step(1)
    fake.log({})
    assert fake.evaluate() == {"eval_f1_macro": 0.5}
    assert fake.prediction_step(None, {"attention_mask": mask[:1]}, False) == "outputs"
    fake.training_step(None, {"attention_mask": mask[:, :2]}, 2)
    fake.training_step(None, {"attention_mask": mask}, 2)
    meter.end_step(3)
    found = meter.result()
    assert (found["tokens"], found["slots"], found["step"]) == (14, 16, 3)
    assert found["shapes"] == {"train": 2, "validation": 1}
    evaluation = found["evaluations"][0]
    assert (evaluation["step"], evaluation["f1"]) == (1, 0.5)
    assert evaluation["all_s"] >= 0.15 > 0.1 <= evaluation["eval_s"]
    assert evaluation["train_s"] <= found["train_s"] <= time.perf_counter() - began_s - 0.15


def run_of(*f1s, scale=1.0, tokens=1000):
    """A run with an evaluation each ten seconds of training."""
    evaluations = [
        {"step": i, "f1": f1, "eval_s": scale, "train_s": 10 * scale * i, "all_s": 11 * scale * i}
        for i, f1 in enumerate(f1s, 1)
    ]
    found = {"tokens": tokens, "slots": 2 * tokens, "step": len(f1s), "train_s": 10 * scale * len(f1s)}
    used = {"spawned_unix_s": 1.0, "begun_unix_s": 3.0, "command_s": 50.0, "cpu_s": 60.0, "peak_rss_mib": 100.0}
    return {**found, **used, "shapes": {"train": 5, "validation": 2}, "evaluations": evaluations}


def test_the_target_is_common_and_a_ratio_above_one_is_in_favour_of_ours():
    rounds = [
        {"trainer": run_of(0.3, 0.75, 0.9, scale=2), "buckets": run_of(0.8, 0.9, 0.8)},
        {"trainer": run_of(0.8, 0.9, 0.9, scale=4), "buckets": run_of(0.2, 0.3, 0.85)},
    ]
    result = finetune.compare(rounds)
    assert result["target_f1"] == 0.784
    values, against = result["values"], result["against"]
    assert set(against) == {"buckets against trainer"}
    assert values["trainer"]["to_target_s"] == [40, 50, 60]  # the third evaluation, the first
    assert values["buckets"]["to_target_all_s"] == [11, 22, 33]
    assert values["buckets"]["final_f1"] == [0.8, 0.825, 0.85]
    assert values["buckets"]["padding_share"] == [0.5, 0.5, 0.5]
    assert values["trainer"]["start_s"] == [2, 2, 2]
    assert against["buckets against trainer"]["tokens_per_s"] == [2, 3, 4]
    assert against["buckets against trainer"]["to_target_s"] == [1.333, 3.667, 6]
    assert "final_f1" not in against["buckets against trainer"]
    assert "| training until the target, s | 40 / **50** / 60 | 10 / **20** / 30 |" in finetune.table(values)
    assert "| real tokens/s in training | 2 / **3** / 4 |" in finetune.table(against)


@pytest.mark.parametrize("other", [run_of(0.8, 0.9, tokens=999), run_of(0.8, 0.9, 0.9)])
def test_other_work_is_refused(other):
    with pytest.raises(RuntimeError, match="tokens, steps or evaluations of the runs differ"):
        finetune.compare([{"trainer": run_of(0.8, 0.9), "fixed": other}])


def test_one_benchmark_prints_its_tables(folder, options, monkeypatch, capsys):
    asked = []

    def run_apart(command, log, *, threads):
        (log.parent / "facts.json").write_bytes((folder / "facts.json").read_bytes())

    def run_variant(options, variant, seed, folder, facts):
        asked.append((variant, seed))
        return run_of(0.5, 0.9)

    monkeypatch.setattr(finetune, "run_apart", run_apart)
    monkeypatch.setattr(finetune, "run_variant", run_variant)
    finetune.benchmark(options, [])
    assert asked == [(name, 0) for name in finetune.VARIANTS] + [(name, 1) for name in reversed(finetune.VARIANTS)]
    told = capsys.readouterr().out
    assert "128 texts to learn, 17 to judge, 3 classes; 8 steps of 16, fp32, 1 threads" in told
    assert "target: macro F1 0.882, 0.98 of the lowest final one" in told
    assert "| | buckets against trainer | buckets against grouped | fixed against trainer |" in told
    assert json.loads(told.splitlines()[-1])["target_f1"] == 0.882


def test_a_run_that_fails_ends_the_benchmark(tmp_path):
    with pytest.raises(RuntimeError, match=r"no_such_module ended with 1:\n.*No module named no_such_module"):
        finetune.run_apart(["no_such_module"], tmp_path / "log", threads=1)


def test_without_accelerate_the_trainer_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        finetune.main(["--variants", "grouped"])
    assert "the Trainer needs accelerate" in capsys.readouterr().err
