"""The model card: what it says, in words and for the Hub's machines, and what it keeps to itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import finished_run
import pytest
import yaml
from finetuning import tuned, two_lengths
from finished_run import SECRETS, write
from huggingface_hub import ModelCard

from train.observe import card
from train.observe.report.run import read_run, settled
from train.tools import report


def made(run: Path) -> tuple[dict[str, Any], str]:
    """Head and body."""
    _, head, body = card.card(run, "tweets").split("---\n", 2)
    return yaml.safe_load(head), body


def row(body: str, label: str) -> list[str]:
    """The cells of the first row of a table with this label."""
    result = next(line for line in body.splitlines() if line.startswith(f"| {label} |"))
    return [cell.strip() for cell in result.strip("|").split("|")][1:]


def test_the_head_says_what_it_is_and_how_good(tmp_path):
    head, _ = made(write(tmp_path / "run"))
    kind = (head["library_name"], head["pipeline_tag"], head["tags"])
    assert kind == ("transformers", "text-classification", ["baretrain"])
    assert not {"license", "language", "base_model", "datasets"} & set(head)  # not known
    (model,) = head["model-index"]
    assert model["name"] == "tweets"
    by_split = {result["dataset"]["split"]: result for result in model["results"]}
    assert by_split["validation"]["dataset"]["name"] == "tweets.csv"
    answer = {
        (split, metric["name"]): metric
        for split, result in by_split.items()
        for metric in result["metrics"]
    }
    assert answer["validation", "f1_macro"] == {"type": "f1", "name": "f1_macro", "value": 0.75}
    assert answer["other", "accuracy"] == {"type": "accuracy", "name": "accuracy", "value": 0.66}
    assert ("validation", "eval_s") not in answer
    read = ModelCard(card.card(tmp_path / "run", "tweets"))  # by the Hub's own reader
    assert {result.metric_name for result in read.data.eval_results} >= {
        "f1_macro",
        "accuracy",
        "loss",
    }


def test_the_price_of_a_run_is_no_score_of_it(prepared, tmp_path):
    settings = [*two_lengths(tmp_path), "instance.usd_per_hour=4", "eval_every=1"]
    run = tuned(tmp_path / "run", prepared / "tokenizer", *settings)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["kind"] == "eval"]
    assert all(line["cost_usd"] > 0 for line in evaluated)
    head = yaml.safe_load((run / "export/README.md").read_text().split("---\n", 2)[1])
    results = head["model-index"][0]["results"][0]["metrics"]
    scores = {"loss", "accuracy", "f1", "f1_macro", "f1_weighted", "matthews_correlation"}
    assert {metric["name"] for metric in results} == scores
    assert report.main([str(run)]) == 0
    assert set(read_run(run).summary["scores"]) == scores


@pytest.mark.parametrize(("weights", "f1"), [(10, 0.5), (30, 0.7), (15, None)])
def test_the_results_are_of_the_weights_that_are_there(tmp_path, weights, f1):
    head, body = made(write(tmp_path / "run", weights=weights))
    if f1 is None:
        assert "The exported weights are those of step 15, which was not evaluated." in body
        assert "model-index" not in head
        return
    assert f"The exported weights are those of step {weights}." in body
    assert settled(read_run(tmp_path / "run").summary["scores"]["f1_macro"]) == (f1, weights)
    metrics = {
        metric["name"]: metric["value"]
        for metric in head["model-index"][0]["results"][0]["metrics"]
    }
    assert metrics["f1_macro"] == f1


def test_the_body_shows_data_results_settings_hardware_and_cost(tmp_path):
    _, body = made(write(tmp_path / "run"))
    for words in (
        "one of 3 labels: negative, neutral, positive",
        "began from pretrained. It has 1,234,567 parameters",
        "The evaluation at step 20:",
        "| neutral | 300 (30.0%) | 30 (30.0%) |",
        "sha-of-the-data",
        "tweets.csv",
        'pipeline("text-classification", model="path/to/this/folder")',
    ):
        assert words in body
    expected = {
        "f1 macro": ["0.7500 at step 20", "0.7500 at step 20", "0.7000 at step 30"],
        "loss": ["0.8000 at step 20", "0.7000 at step 30", "0.7000 at step 30"],
        "neutral": ["0.7000", "0.8000", "0.7467", "30"],
        "Bad rows, left out": ["2", "0"],
        "Peak learning rate": ["0.002"],
        "Epochs": ["0.24"],
        "Precision": ["bf16"],
        "Training time (h:mm:ss)": ["2:00:00"],
        "Cost": ["$2.68"],
        "Versions": ["baretrain 0.6, commit abc123def456, torch 2.9.1, transformers 5.0"],
    }
    assert {label: row(body, label) for label in expected} == expected


def test_ids_on_the_hub_are_whole_and_linked_and_paths_and_hosts_left_out(tmp_path, monkeypatch):
    run = write(
        tmp_path / "run",
        model={"pretrained": "lab/bert"},
        data={"path": "lab/reviews", "format": "hub", "name": "en", "revision": "0123abc"},
    )
    head, body = made(run)
    assert (head["base_model"], head["datasets"]) == ("lab/bert", "lab/reviews")
    dataset = head["model-index"][0]["results"][0]["dataset"]
    assert (dataset["type"], dataset["config"], dataset["revision"]) == (
        "lab/reviews",
        "en",
        "0123abc",
    )
    assert "began from lab/bert." in body
    monkeypatch.chdir(tmp_path)
    # a folder of that name comes first, as in transformers
    (tmp_path / "lab" / "bert").mkdir(parents=True)
    head, body = made(run)
    assert "base_model" not in head and "began from bert." in body
    text = card.card(
        write(tmp_path / "paths", data={"path": "s3://private-bucket/sets/tweets.csv"}), "tweets"
    )
    assert (
        not [secret for secret in (*SECRETS, str(tmp_path)) if secret in text]
        and "tweets.csv" in text
    )


def test_a_pretraining_has_a_card_too_and_what_is_unknown_is_called_so(tmp_path):
    run = write(tmp_path / "run", task={"kind": "mlm"}, model={"pretrained": None})
    lines = [line for line in finished_run.lines() if line["kind"] not in ("summary", "eval")]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("data.json", "evaluation.json"):
        (run / name).unlink()
    head, body = made(run)
    assert head["pipeline_tag"] == "fill-mask" and "model-index" not in head
    assert "began from random weights (albert)" in body and "pipe.tokenizer.mask_token" in body
    assert "The run was not evaluated." in body and row(body, "Cost") == ["unknown"]


EVIL_IDS = ['a/b")\n```\n# Run this', "a/b\n", 'a/b", revision="x', "/home/me", "a/b/c", "a/b`"]


@pytest.mark.parametrize("to", [*EVIL_IDS, "jane/tweets-bert"])
def test_only_an_id_on_the_hub_gets_into_the_code_of_the_card(tmp_path, to):
    _, body = made(write(tmp_path / "run", hub={"push_to": to}))
    assert body.count("```") == 2
    assert f'model="{card.HERE if to in EVIL_IDS else to}")\n' in body


def test_names_are_shown_as_they_are_and_break_nothing(tmp_path):
    run = write(tmp_path / "run")
    odd = "a|b\n<i>*x*</i>"
    (run / "data.json").write_text(
        json.dumps({"labels": [odd], "splits": {"train": {"label_counts": {odd: 5}}}})
    )
    body = made(run)[1]
    assert r"| a\|b" in body and "<i>" not in body.replace(r"\<i\>", "")
    assert r"\<i\>\*x\*\</i\>" in body
