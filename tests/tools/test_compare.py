"""Runs beside the first one of a report: ratios, equal quality, the same work; and its variants."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import reported_runs
from forks import start_forked
from hostile import changed, quick
from hypothesis import assume, given, settings
from reported_runs import shown
from running import eventually, train_overrides

from train.config import flatten
from train.config.train import CompareConfig
from train.observe.report import comparison
from train.observe.report.figures import panels
from train.observe.report.page import table
from train.observe.report.run import Run, read_run, table_of, tell_apart
from train.run import compose as cli
from train.run.command import DONE, FAILED, REJECTED, STOPPED
from train.run_folder.outcome import read_outcome
from train.storage.folders import LocalFolder
from train.tools import report
from train.tools.compare import main, make_variants

pytest.importorskip("matplotlib")

STEPS, BATCH, TOKENS, BEGAN_S = 40, 28, 400_000, 1.8e9
CONFIG = {
    "task": {"kind": "qa", "stride": 128},
    "model": {"pretrained": "albert", "num_layers": None},
    "backend": {"name": "ddp", "compile": "none"},
    "best": {"metric": "f1"},
}
ENVIRONMENT = {
    "identity": {"data": "sha-of-squad"},
    "first_started_unix_s": BEGAN_S,
    "device": "NVIDIA V100",
    "world_size": 1,
    "seq_len": 384,
}


def write_run(
    folder: Path,
    *,
    train_s: float = 100.0,
    wall_s: float = 125.0,
    f1: float | None = 80.0,
    batch: int = BATCH,
    steps: int = STEPS,
    planned: int = STEPS,
    diverged: bool = False,
    config: Any = None,
    environment: Any = None,
    **end: Any,
) -> Path:
    """Write a finished run: `steps` steps of `batch` sequences, 400,000 tokens in `train_s` of `wall_s` seconds.

    `end` are values of its summary.
    """
    config = CONFIG | (config or {})
    plan = {"global_batch_size": batch, "micro_batch_size": batch, "total_steps": planned}
    described = ENVIRONMENT | {"plan": plan, "compile": config["backend"]["compile"]}
    numbers = {"loss": 2.5, "examples": steps * batch, "train_s": train_s}
    of_end = {"train_s": train_s, "tokens": TOKENS, "reason": "done", "compile_s": 0.0}
    evaluated = {"kind": "eval", "step": steps, "loss": 2.0, "f1": f1}
    lines: list[dict[str, Any]] = [
        {"kind": "train", **numbers, "step": steps // 2, "loss": 4.0},
        {"kind": "train", **numbers, "step": steps},
        evaluated,
        {"kind": "summary", "step": steps, **of_end, **end, "time_unix_s": BEGAN_S + wall_s},
    ]
    if diverged:
        lines.insert(3, evaluated | {"step": steps + 1, "loss": None, "f1": None})
    return reported_runs.write_run(
        folder, lines, config=config, environment=described | (environment or {})
    )


def compiled_run(folder: Path, **changes: Any) -> Path:
    """Write a run of twice the throughput: 50 s in steps and 20 s of compiling, of 80 s in all."""
    known = {"train_s": 50.0, "wall_s": 80.0, "f1": 80.4, "compile_s": 20.0}
    config = {"backend": {"name": "ddp", "compile": "layers"}} | changes.pop("config", {})
    return write_run(folder, **known | changes, config=config)


def compared(*folders: Path) -> list[Run]:
    runs = [read_run(folder) for folder in folders]
    tell_apart(runs)
    return runs


# ---- what the page says --------------------------------------------------------------------------------------------


def test_the_page_has_the_ratios_that_a_hand_computes(tmp_path, capsys):
    native = write_run(tmp_path / "native", cost_usd=2.0, peak_device_bytes=8e9)
    compiled = compiled_run(tmp_path / "compiled", cost_usd=1.28, peak_device_bytes=6e9)
    assert report.main([str(native), str(compiled)]) == DONE
    assert "8,000 (2.00 times)" in capsys.readouterr().out
    html = (tmp_path / "report" / "report.html").read_text()
    assert 'alt="Training loss over time"' in html and "card warning" not in html
    expected = {
        "Tokens/s over the whole run": ["4,000", "8,000 (2.00 times)"],
        "Billable time: since the first start (h:mm:ss)": ["0:02:05", "0:01:20 (0.64 times)"],
        "Cost": ["$2.00", "$1.28 (0.64 times)"],
        "Compiling (s)": ["0.0", "20.0"],
        "Peak device memory of rank 0 (GB)": ["8.00", "6.00"],
    }
    rows = {row[0]: row[1:] for row in table(compared(native, compiled))}
    assert expected.items() <= rows.items()
    assert all(f"{label} {' '.join(texts)}" in shown(html) for label, texts in expected.items())
    unpriced = write_run(tmp_path / "unpriced")
    rows = {row[0]: row[1:] for row in table(compared(unpriced, compiled))}
    assert rows["Cost"] == ["unknown", "$1.28"]


def test_runs_that_differ_in_their_seeds_alone_are_one_row_with_mean_and_spread(tmp_path, capsys):
    def of(name: str, seed: int, kind: str, config: Any = None, **more: Any) -> Path:
        changed = {"seed": seed, "task": {"kind": kind}, **(config or {})}
        return write_run(tmp_path / name, config=changed, **more)

    first = [of(f"squad_{seed}", seed, "qa", f1=f1) for seed, f1 in enumerate([80.0, 81.0, 85.0])]
    other = [of("alone", 7, "qa", {"eval_every": 5}), of("cola_1", 1, "classify", f1=0.5)]
    lost = of("cola_2", 2, "classify", f1=0.75, diverged=True)
    runs = compared(first[0], *other, first[0])
    assert comparison.over_seeds(runs) == []  # no seed differs alone
    assert report.main(list(map(str, [*first, *other, lost]))) == DONE
    said, _, told = capsys.readouterr().out.partition("\n\n")
    wanted = [  # ((80 - 82)^2 + (81 - 82)^2 + (85 - 82)^2) / 2 = 7
        ["over seeds", "validation", "mean", "spread", "runs"],
        ["squad_0, squad_1, squad_2", "f1", "82", f"{7**0.5:.4g}", "3"],
        ["alone", "f1", "80", "unknown", "1"],
        ["cola_1, cola_2", "f1", "0.5", "unknown", "1 of 2"],
    ]
    assert [re.split(r"  +", line) for line in said.splitlines()] == wanted
    assert "not the same" not in told
    assert " ".join(wanted[1]) in shown((tmp_path / "report/report.html").read_text())


OTHER_DATA = {"environment": {"identity": {"data": "other"}}}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"config": {"seed": 7}}, "work (seed)"),
        ({"config": {"task": {"kind": "qa", "stride": 64}}}, "work (task.stride)"),
        ({"config": {"model": {"num_layers": 6}}}, "model.num_layers"),
        ({"config": {"eval_examples": 50}}, "work (eval_examples)"),
        (OTHER_DATA, "work (identity.data)"),
        ({"environment": {"seq_len": 128}}, "work (seq_len)"),
        ({"steps": 80}, "work (sequences consumed)"),
        (
            {"environment": {"device": "NVIDIA A100", "world_size": 8}},
            "machine (device, world_size)",
        ),
        ({"environment": {"device": "NVIDIA V100 through XLA"}}, ""),  # the same machine
        ({"train_s": 40.0, "batch": 56, "steps": 20}, ""),  # the same sequences
    ],
)
def test_other_work_and_another_machine_are_named(changes, names, tmp_path):
    runs = compared(write_run(tmp_path / "a"), compiled_run(tmp_path / "b", **changes))
    said = "\n".join(comparison.warnings(runs))
    assert names in said
    assert ("not the same" in said) == bool(names)


def test_a_run_that_has_not_ended_and_one_with_pauses_are_named(tmp_path):
    stopped = write_run(tmp_path / "stopped", reason="SIGTERM", planned=90)
    resumed = compiled_run(tmp_path / "resumed")
    again = json.loads((resumed / "metrics.jsonl").read_text().splitlines()[-1])
    again |= {"attempt": 2, "time_unix_s": BEGAN_S + 1000}
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    runs = compared(stopped, resumed)
    said = [warning.partition(": its")[0] for warning in comparison.warnings(runs)]
    assert said == ["stopped has not ended: step 40 of 90", "resumed took 2 attempts"]
    assert [run.summary["wall_s"] for run in runs] == [125.0, 1000.0]  # to the newest line
    assert runs[1].summary["compile_s"] == 40.0
    assert report.main([str(stopped), str(resumed)]) == DONE
    assert said[0] in (tmp_path / "report" / "report.html").read_text()


# ---- what others wrote ---------------------------------------------------------------------------------------------


GOOD = {
    "config": {**CONFIG, "seed": 1},
    "environment": {"plan": {"global_batch_size": 28}, "first_started_unix_s": 1.0},
}
LAST = {"kind": "summary", "attempt": 1, "step": 2, "wall_s": 3.0, "tokens": 4, "train_s": 5.0}


@pytest.mark.parametrize(
    "times", [{"wall_s": -5.0}, {"train_s": 5e-324}, {"train_s": 1e-90, "wall_s": 9e99}]
)
def test_what_cannot_have_been_measured_is_no_ratio(times, tmp_path):
    end = {"kind": "summary", "step": STEPS, "tokens": TOKENS, "train_s": 1.0, "wall_s": 1.0}
    bad = reported_runs.write_run(tmp_path / "bad", [end | times])
    folders = write_run(tmp_path / "a"), bad
    runs = compared(*folders)
    for run, baseline in (runs, runs[::-1]):
        ratios = [comparison.times(run, baseline, key) for key in ("wall_s", "tokens_per_s")]
        assert "" in ratios and not re.search(r"inf|-|\d{20}", "".join(ratios))


@pytest.mark.slow
@settings(quick, max_examples=100)
@given(changed(GOOD), changed([LAST]))
def test_no_run_folder_breaks_the_comparison(files, lines):
    """Any content of files that can be read at all."""
    valid = [line for line in lines if isinstance(line, dict) and is_line(line)]
    assume(valid and all(isinstance(files.get(name), dict) for name in GOOD))
    bad, good = run_of("bad", files, valid), run_of("good", GOOD, [LAST])
    good.config["seed"] = 2
    for runs in ([good, bad], [bad, good]):
        tell_apart(runs)
        assert list(comparison.warnings(runs)) is not None and table(runs)
        assert comparison.over_seeds(runs) is not None and list(panels(runs))


def is_line(line: dict[str, Any]) -> bool:
    counts = [line.get(key) for key in ("attempt", "step")]
    return isinstance(line.get("kind"), str) and all(
        type(count) is int and 0 <= count <= 2**53 for count in counts
    )


def run_of(name: str, files: dict[str, Any], lines: list[dict[str, Any]]) -> Run:
    config, environment = (
        dict(flatten({str(key): value for key, value in files[name].items()})) for name in GOOD
    )
    timed = [{**line, "time_unix_s": 1.0} for line in reversed(lines)]
    folder = LocalFolder(Path("runs/a") / name)
    return Run(folder, config, environment, table_of(timed, config, environment))


# ---- variants ------------------------------------------------------------------------------------------------------


FP32 = "fp32: backend.precision=fp32"


def training(runs: Path, data: Path, *more: str) -> list[str]:
    """The settings of a training of a step, without its variants' and its precision."""
    words = [*train_overrides(runs, data, "export=false"), "max_steps=1", *more]
    given = {each.partition("=")[0]: each for each in words}
    return [each for key, each in given.items() if key != "backend.precision"]


@pytest.mark.slow
def test_variants_are_run_once_and_one_that_fails_hides_no_other(tmp_path, prepared, capfd):
    words, fp32 = training(tmp_path / "runs", prepared), tmp_path / "runs/fp32"
    assert main([*words, f"compare.variants={{gpu: backend.device=cuda, {FP32}}}"]) == FAILED
    said = capfd.readouterr()
    assert "error: gpu: " in said.err and "cuda" in said.err
    assert "gpu is missing here because it failed: " in (fp32 / "report/report.html").read_text()
    shutil.copytree(fp32, fp32.parent / "again")  # the same work
    before = (fp32 / "metrics.jsonl").read_bytes()
    assert main([*words, f"compare.variants={{{FP32}, again: backend.precision=fp32}}"]) == DONE
    said = capfd.readouterr()
    assert said.out.count(" is done\n") == 2 and "(1.00 times)" in said.out
    assert (fp32 / "metrics.jsonl").read_bytes() == before


def test_what_a_variant_lacks_is_found_before_the_first_one_starts(tmp_path, prepared, capfd):
    words = training(
        tmp_path / "runs", prepared, "compare.variants={good: seed=0, bad: data.path=nosuch}"
    )
    assert main(words) == REJECTED
    assert "error: variant bad: " in capfd.readouterr().err and not (tmp_path / "runs").exists()


def test_ctrl_c_stops_the_variant_that_runs_and_starts_no_other(tmp_path, prepared):
    endless = ["max_steps=100000", "checkpoint.every=100000", "log_every=20"]
    variants = f"compare.variants={{{FP32}, bf16: backend.precision=bf16}}"
    words = ["train", "compare", *training(tmp_path / "runs", prepared, variants, *endless)]
    process, first = (
        start_forked(words, os.environ, err=tmp_path / "said"),
        tmp_path / "runs" / "fp32",
    )
    eventually(lambda: (first / "metrics.jsonl").is_file())
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert (
        "stopped; the same command resumes" in (tmp_path / "said").read_text()
        and process.exitcode == STOPPED
    )
    outcome = read_outcome(LocalFolder(first))
    assert (outcome["outcome"], outcome["kind"]) == ("stopped", "SIGINT") and outcome[
        "checkpoint"
    ] == outcome["step"]
    assert not (tmp_path / "runs" / "bf16").exists()
    assert not [
        each
        for each in psutil.process_iter(["cmdline"])
        if str(tmp_path) in str(each.info["cmdline"])
    ]


def test_a_variant_is_the_run_with_its_own_settings_last():
    common = ["experiment=demo", "run_dir=runs/x", "backend=ddp", "seed=3"]
    given = [*common, "compare.variants={b: backend=xla, a: seed=4}"]
    cli.add_schema(CompareConfig, "compare", [])
    made = make_variants(cli.load_config(CompareConfig, given), given)
    assert [(variant.name, variant.overrides) for variant in made] == [
        ("b", ["experiment=demo", "seed=3", "backend=xla", 'run_dir="runs/x/b"']),
        ("a", ["experiment=demo", "backend=ddp", "seed=4", 'run_dir="runs/x/a"']),
    ]
