"""profile=true: a trace of some steps and torch's table of them, and a training that does not notice."""

import gzip
import json
import os

import pytest
import torch
from running import lines, run, train_here, train_overrides

from train.observe import profile


def test_a_run_is_traced_and_trains_as_without(prepared, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(profile, "FIRST", 2)
    monkeypatch.setattr(profile, "STEPS", 2)
    for name, settings in (
        ("plain", []),
        ("traced", ["profile=true"]),
        ("short", ["profile=true", "max_steps=3"]),
    ):
        train_here(tmp_path / name, prepared, "backend=ddp", "export=false", *settings)
    losses = [
        [line["loss"] for line in lines(tmp_path / name, "train")] for name in ("plain", "traced")
    ]
    assert losses[0] == losses[1]
    assert not (tmp_path / "plain/profile").exists() and not (tmp_path / "short/profile").exists()
    assert (
        capfd.readouterr().err.count(
            "profile=true traces steps 3 to 4 of an attempt; this attempt had 3"
        )
        == 1
    )
    text = (tmp_path / "traced/profile/table.txt").read_text()
    assert text.startswith("ddp on cpu, fp32: 2 traced steps\n\n---") and "aten::addmm" in text
    with gzip.open(tmp_path / "traced/profile/trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert sum("Optimizer.step" in str(name) for name in names) == 2


@pytest.mark.parametrize(("cuda", "keeps"), [(None, False), ("12.4", True), ("12.6", False)])
def test_tracing_stays_loaded_where_graphs_would_crash_without_it(cuda, keeps, monkeypatch):
    for name in ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    profile.keep_cupti()
    assert (os.environ.get("TEARDOWN_CUPTI") == "0") == keeps
    assert (os.environ.get("DISABLE_CUPTI_LAZY_REINIT") == "1") == keeps


@pytest.mark.slow
def test_a_run_through_xla_adds_what_its_device_says(prepared, tmp_path):
    settings = ["backend=xla", "eval_every=null", "export=false", "profile=true", "max_steps=15"]
    result = run(train_overrides(tmp_path / "run", prepared, *settings))
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "run/profile/table.txt").read_text()
    assert text.startswith("xla on cpu through XLA") and "CompileTime" in text
    assert lines(tmp_path / "run", "summary")[0]["graphs"] == 2  # tracing added none
