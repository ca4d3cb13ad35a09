"""Runs beside the first one of a report: ratios, equal quality, the same work; and its variants."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import reported_runs
from finetuning import squad, tuning
from hostile import changed, quick
from hypothesis import assume, given
from hypothesis import strategies as st
from reported_runs import shown
from running import ROOT, command, eventually, train_overrides

from train.cli import compose as cli
from train.cli.command import DONE, FAILED, REJECTED, STOPPED
from train.compare.__main__ import main
from train.compare.variants import make_variants
from train.config import InputError, flatten
from train.config.train import CompareConfig
from train.report import comparison
from train.report.figures import bars_of
from train.report.page import table
from train.report.run import Run, drop_superseded, read_run, split_attempts, tell_apart
from train.report.texts import percent
from train.run_folder.outcome import read_outcome
from train.storage.folders import LocalFolder

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

STEPS, BATCH, TOKENS, BEGAN_S = 40, 28, 400_000, 1000.0
CONFIG = {
    "global_batch_size": None,
    "seq_len": 384,
    "task": {"kind": "qa", "stride": 128},
    "model": {"pretrained": "albert", "num_layers": None},
    "backend": {"name": "ddp", "compile": "none"},
    "best": {"metric": "f1"},
}


def write_run(folder, *, train_s=100.0, wall_s=125.0, f1=80.0, batch=BATCH, steps=STEPS, lines=None, **more):
    """A finished run: `steps` steps of `batch` sequences, 400,000 tokens in `train_s` of `wall_s` seconds. `more`:
    changes of its config and environment, and values of its summary.
    """
    plan = {"global_batch_size": batch, "micro_batch_size": batch, "accumulation": 1}
    described = {"identity": {"data": "sha-of-squad"}, "first_started_unix_s": BEGAN_S, "plan": plan}
    described |= {"device": "NVIDIA V100", "world_size": 1, "seq_len": None, **more.pop("environment", {})}
    config = CONFIG | more.pop("config", {})
    numbers = {"loss": 2.5, "examples": steps * batch, "tokens_per_s": TOKENS / train_s, "train_s": train_s}
    end = {"train_s": train_s, "tokens": TOKENS, "steps_total": steps, "reason": "done", "graphs": 0, "compile_s": 0.0}
    written = [
        {"kind": "train", "time_unix_s": BEGAN_S + 30, **numbers, "step": steps // 2, "loss": 4.0},
        {"kind": "train", "time_unix_s": BEGAN_S + wall_s - 2, **numbers, "step": steps},
        {"kind": "eval", "time_unix_s": BEGAN_S + wall_s - 1, "step": steps, "loss": 2.0, "f1": f1},
        {"kind": "summary", "time_unix_s": BEGAN_S + wall_s, "step": steps, **end, **more},
    ]
    return reported_runs.write_run(folder, lines or written, config=config, environment=described)


def compiled_run(folder, **changes):
    """Twice the throughput: 50 s in steps and 20 s of compiling, of 80 s in all."""
    known = {"train_s": 50.0, "wall_s": 80.0, "f1": 80.4, "compile_s": 20.0, "graphs": 2}
    config = {"backend": {"name": "ddp", "compile": "layers"}} | changes.pop("config", {})
    return write_run(folder, **known | changes, config=config)


def compared(*folders: Path, tolerance: float = 0.01) -> tuple[list[Run], list[str]]:
    runs = [read_run(folder) for folder in folders]
    tell_apart(runs)
    return runs, comparison.sentences(runs, tolerance)


def rows(*folders: Path) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in table(compared(*folders)[0])}


# ---- what the page says --------------------------------------------------------------------------------------------


def test_the_page_has_the_ratios_that_a_hand_computes(tmp_path, capsys):
    native = write_run(tmp_path / "native", cost_usd=2.0, peak_device_bytes=8e9)
    compiled = compiled_run(tmp_path / "compiled", cost_usd=1.28, peak_device_bytes=6e9)
    assert main([str(native), str(compiled)]) == DONE
    says = "compiled does 2.00 times the tokens/s of native in 0.64 of the time (0.48 without compiling), "
    says += "equal quality (f1 0.5 % apart, tolerance 1 %)"
    assert says in capsys.readouterr().out.splitlines()
    page = tmp_path / "report"
    html = (page / "report.html").read_text()
    assert f'<div class="card headline">{says}</div>' in html
    assert "$1.28 (0.64 times) \u2605 best" in shown(html.replace("&#9733;", "\u2605"))
    names = {"throughput_by_run", "time_by_run", "cost_by_run", "memory_by_run", "training_loss_over_time"}
    assert names <= {path.stem for path in page.glob("*.png")}
    known = rows(native, compiled)
    expected = {
        "Tokens/s over the whole run": ["4,000", "8,000 (2.00 times)"],
        "Sequences/s": ["11.2", "22.4 (2.00 times)"],
        "Billable time: since the first start (h:mm:ss)": ["0:02:05", "0:01:20 (0.64 times)"],
        "Billable time without compiling (h:mm:ss)": ["0:02:05", "0:01:00 (0.48 times)"],
        "Cost": ["$2.00", "$1.28 (0.64 times)"],
        "Compiling (s)": ["0.0", "20.0"],
        "Compiled graphs": ["0", "2"],
        "Peak device memory of rank 0 (GB)": ["8.00", "6.00"],
        "Micro batch (sequences)": ["28", "28"],
        "Versions": ["torch 2.9"] * 2,
        "backend.compile": ["none", "layers"],
    }
    assert {label: known[label] for label in expected} == expected


@pytest.mark.parametrize(
    ("device", "kinds"),
    [("NVIDIA V100", {"device", "host"}), ("cpu", {"host"}), ("cpu through XLA", {"host"})],
)
def test_memory_of_cpus_is_that_of_the_host(tmp_path, device, kinds):
    line = {"kind": "train", "time_unix_s": BEGAN_S + 30, "step": 1, "loss": 4.0, "device_memory_bytes": 3e9}
    end = {"kind": "summary", "time_unix_s": BEGAN_S + 60, "step": 1, "peak_host_bytes": 2e9}
    known = rows(write_run(tmp_path / "run", environment={"device": device}, lines=[line, end]))
    assert {label.split(" memory")[0].split()[-1] for label in known if "memory" in label} == kinds


@pytest.mark.parametrize(
    ("f1", "tolerance", "says"),
    [
        (80.0, 0.01, "equal quality (f1 the same, tolerance 1 %)"),
        (80.4, 0.004, "unequal quality (f1 80.4 against 80, 0.5 % better, tolerance 0.4 %)"),
        (78.4, 0.01, "unequal quality (f1 78.4 against 80, 2 % worse, tolerance 1 %)"),
        (78.4, 0.02, "equal quality (f1 2 % apart, tolerance 2 %)"),
        (None, 0.01, "equal quality (loss the same, tolerance 1 %)"),  # which both have
    ],
)
def test_quality_is_equal_within_its_tolerance(f1, tolerance, says, tmp_path):
    folders = write_run(tmp_path / "a"), compiled_run(tmp_path / "b", f1=f1)
    _, sentences = compared(*folders, tolerance=tolerance)
    assert sentences[0].endswith(f", {says}")


def test_without_a_common_score_quality_is_unknown(tmp_path):
    lines = [{"kind": "train", "step": STEPS, "loss": 1.0, "examples": STEPS * BATCH}]
    _, sentences = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", lines=lines))
    assert "quality unknown" in sentences[0] and "unknown number of tokens/s" in sentences[0]


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"config": {"seed": 7}}, "seed: 0 there, 7 here"),
        ({"config": {"seq_len": 128}}, "seq_len: 384 there, 128 here"),
        ({"config": {"task": {"kind": "qa", "stride": 64}}}, "task.stride: 128 there, 64 here"),
        ({"config": {"model": {"pretrained": "albert", "num_layers": 6}}}, "num_layers: unknown there, 6 here"),
        ({"environment": {"identity": {"data": "other"}}}, "data: sha-of-squad there, other here"),
        ({"steps": 80}, "sequences consumed: 1,120 there, 2,240 here; steps: 40 there, 80 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_work_is_named(changes, names, tmp_path):
    _, sentences = compared(write_run(tmp_path / "a"), compiled_run(tmp_path / "b", **changes))
    assert f"not the same work ({names})" in sentences[0].replace("model.num", "num")


@pytest.mark.parametrize(
    "changes",
    [{"environment": {"identity": {"data": "other"}}}, {"config": {"eval_examples": 50}}],
    ids=["data", "part"],
)
def test_runs_that_were_validated_on_different_data_are_never_of_equal_quality(changes, tmp_path):
    _, sentences = compared(write_run(tmp_path / "a"), compiled_run(tmp_path / "b", **changes))
    assert "equal quality" not in sentences[0] and "f1 80.4 against 80, on different data" in sentences[0]


def test_another_machine_is_named_and_xla_on_the_same_one_is_not(tmp_path):
    native = write_run(tmp_path / "native", environment={"device": "cpu"})
    there = compiled_run(tmp_path / "there", environment={"device": "NVIDIA A100", "world_size": 8})
    here = compiled_run(tmp_path / "here", environment={"device": "cpu through XLA"})
    _, sentences = compared(native, there, here)
    assert "not the same machine (device: cpu there, NVIDIA A100 here; world_size: 1 there, 8 here)" in sentences[0]
    assert "machine" not in sentences[1]


def test_a_cost_that_is_not_known_has_no_figure(tmp_path):
    native, compiled = write_run(tmp_path / "native"), compiled_run(tmp_path / "compiled")
    assert "cost_by_run" not in {bars.name for bars in bars_of(compared(native, compiled)[0])}
    priced = compiled_run(tmp_path / "priced", cost_usd=3.0)
    assert rows(native, priced)["Cost"] == ["unknown", "$3.00"]
    assert "cost_by_run" in {bars.name for bars in bars_of(compared(native, priced)[0])}


def test_each_variant_at_its_own_largest_batch_is_told_apart_from_the_same_batch(tmp_path):
    larger = {"train_s": 40.0, "wall_s": 70.0, "batch": 56, "steps": 20}
    runs = [write_run(tmp_path / "native"), compiled_run(tmp_path / "compiled")]
    runs += [compiled_run(tmp_path / "compiled_batch_56", **larger), write_run(tmp_path / "again", batch=14, steps=80)]
    _, sentences = compared(*runs)
    assert [sentence.split(" does ")[0] for sentence in sentences] == ["compiled", "compiled_batch_56"]
    assert "2.50 times the tokens/s of native in 0.56 of the time" in sentences[1]
    assert "each at its own largest batch (56 against 28)" in sentences[1] and "not the same" not in sentences[1]
    only_largest = compared(runs[0], runs[2])[1]
    assert len(only_largest) == 1 and only_largest[0] == sentences[1]


def test_a_run_that_has_not_ended_and_one_with_pauses_are_named(tmp_path, capsys):
    stopped = write_run(tmp_path / "stopped", reason="SIGTERM", steps_total=90)
    resumed = compiled_run(tmp_path / "resumed")
    text = (resumed / "metrics.jsonl").read_text().splitlines()
    again = json.dumps(json.loads(text[-1]) | {"attempt": 2, "time_unix_s": 2000.0})
    (resumed / "metrics.jsonl").write_text("\n".join([*text, again]) + "\n")
    runs, _ = compared(stopped, resumed)
    said = [warning.partition(": its")[0] for warning in comparison.warnings(runs)]
    assert said == ["stopped has not ended: step 40 of 90", "resumed took 2 attempts"]
    assert runs[1].summary["compile_s"] == 40.0 and runs[1].summary["wall_s"] == 1000.0
    assert main([str(stopped), str(resumed)]) == DONE
    page = (tmp_path / "report" / "report.html").read_text()
    assert said[0] in page and said[0] in capsys.readouterr().out.splitlines()


def test_an_attempt_that_goes_on_is_measured_to_its_newest_line(tmp_path):
    resumed = write_run(tmp_path / "resumed", reason="done", wall_s=125.0)
    later = {"kind": "train", "attempt": 2, "step": STEPS + 10, "train_s": 900.0, "time_unix_s": BEGAN_S + 1000}
    with (resumed / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(later) + "\n")
    native = write_run(tmp_path / "native")
    text = (native / "metrics.jsonl").read_text().replace('"reason": "done"', '"reason": "done", "wall_s": 125.0')
    (native / "metrics.jsonl").write_text(text)
    runs, _ = compared(native, resumed)
    assert [run.summary["wall_s"] for run in runs] == [125.0, 1000.0]
    assert "resumed has not ended: step 50 of 40" in comparison.warnings(runs)


@pytest.mark.parametrize("which", ["native", "compiled"])
def test_a_quality_that_became_no_number_is_not_equal(which, tmp_path):
    folders = {"native": write_run(tmp_path / "native"), "compiled": compiled_run(tmp_path / "compiled", f1=80.0)}
    path = folders[which] / "metrics.jsonl"
    lines = path.read_text().splitlines()
    diverged = json.loads(lines[2]) | {"step": STEPS + 1, "f1": None, "loss": None}
    path.write_text("\n".join([*lines[:3], json.dumps(diverged), lines[3]]) + "\n")
    _, sentences = compared(*folders.values())
    assert "quality: no number (f1 " in sentences[0] and "equal" not in sentences[0]
    assert "no number at step 41" in rows(*folders.values())["Validation f1, last"]


def test_the_length_of_sequences_is_what_the_run_recorded(tmp_path):
    config = {"seq_len": None}
    runs = [write_run(tmp_path / "old", config=config)]  # which did not record it, at another share of padding
    for name, seq_len, train_s in (("new", 512, 100.0), ("same", 512, 10.0), ("longer", 1024, 100.0)):
        runs.append(write_run(tmp_path / name, config=config, environment={"seq_len": seq_len}, train_s=train_s))
    assert "not the same work" not in compared(runs[0], runs[1])[1][0] + compared(runs[1], runs[2])[1][0]
    assert "not the same work (seq_len: 512 there, 1024 here)" in compared(runs[1], runs[3])[1][0]


# ---- what others wrote ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"wall_s": -5.0}, {"train_s": 5e-324}, {"train_s": 1e-90, "wall_s": 9e99}])
def test_what_cannot_have_been_measured_is_no_ratio(changes, tmp_path):
    bad = write_run(tmp_path / "bad")
    text = (bad / "metrics.jsonl").read_text().splitlines()
    (bad / "metrics.jsonl").write_text("\n".join([*text[:-1], json.dumps(json.loads(text[-1]) | changes)]) + "\n")
    for said in (compared(write_run(tmp_path / "a"), bad)[1][0], compared(bad, tmp_path / "a")[1][0]):
        assert "inf" not in said and " in -" not in said and not re.search(r"\d{20}", said)


GOOD = {
    "config": CONFIG,
    "environment": {"plan": {"global_batch_size": 28}, "first_started_unix_s": 1.0, "device": "x"},
}


@quick
@given(
    changed(GOOD), changed([{"kind": "summary", "attempt": 1, "step": 2, "wall_s": 3.0, "tokens": 4, "train_s": 5.0}])
)
def test_no_run_folder_breaks_the_comparison(files, lines):
    """Any content of files that can be read at all."""
    folder = Path("runs/a")
    valid = [line for line in lines if isinstance(line, dict) and isinstance(line.get("kind"), str)]
    valid = [line for line in valid if all(isinstance(line.get(key), int) for key in ("attempt", "step"))]
    assume(valid and all(isinstance(files.get(name), dict) for name in GOOD))
    bad = run_of(folder / "bad", files, valid)
    good = run_of(folder / "good", GOOD, [{"kind": "summary", "attempt": 1, "step": 2, "wall_s": 3.0}])
    for runs in ([good, bad], [bad, good]):
        tell_apart(runs)
        assert comparison.sentences(runs, 0.01) and table(runs)
        for bars in bars_of(runs):
            assert isinstance(bars.name, str)


def run_of(folder: Path, files: dict[str, Any], lines: list[dict[str, Any]]) -> Run:
    tables = [dict(flatten({str(key): value for key, value in files[name].items()})) for name in GOOD]
    return Run(LocalFolder(folder), *tables, split_attempts(lines), drop_superseded(lines))


@quick
@given(st.floats(0, 1e6))
def test_a_share_is_written_without_exponents(share):
    assert re.fullmatch(r"(less than )?\d+(\.\d+)? %", percent(share))


# ---- variants ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def questions(tmp_path_factory, texts, tokenizer_folder) -> tuple[Path, list[str]]:
    """A folder, and a fine-tuning of two steps on questions in it, without its variants."""
    folder = tmp_path_factory.mktemp("questions")
    for name, seed, number in (("train", 1, 20), ("dev", 2, 9)):
        (folder / f"{name}.json").write_text(json.dumps(squad(texts, seed=seed, questions=number)))
    own = ["task=qa", "task.stride=8", "task.max_question_tokens=12", "data=squad_json", "seq_len=48", "export=false"]
    own += [f"data.path={folder}", "data.train=train.json", "data.validation=dev.json", "watchdog.enabled=false"]
    dropped = ("backend.precision", "global_batch_size")
    settings = [each for each in tuning(folder / "runs", tokenizer_folder) if not each.startswith(dropped)]
    return folder, [*settings, *own, "micro_batch_size=8"]


VARIANTS = "compare.variants={fp32: backend.precision=fp32, bf16: backend.precision=bf16, gpu: backend.device=cuda}"


def test_variants_are_run_once_and_one_that_fails_hides_no_other(questions, capfd):
    folder, settings = questions
    settings = [*settings, VARIANTS]
    assert main([*settings, "compare.run=[fp32,gpu,bf16]"]) == FAILED
    said = capfd.readouterr()
    assert "error: gpu: " in said.err and "cuda" in said.err
    assert "bf16 does " in said.out
    html = (folder / "runs" / "report" / "report.html").read_text()
    assert "gpu is missing here, it failed: " in html
    runs = {path.name: (path / "metrics.jsonl").read_bytes() for path in (folder / "runs").glob("*[26]")}
    assert runs.keys() == {"fp32", "bf16"}
    assert main([*settings, "compare.run=[fp32,bf16]"]) == DONE
    said = capfd.readouterr()
    assert said.out.count(" is done\n") == 2 and "gpu" not in said.out
    assert all((folder / "runs" / name / "metrics.jsonl").read_bytes() == content for name, content in runs.items())


@pytest.mark.parametrize("missing", ["model.tokenizer=/nosuch", "data.train=nosuch.json"])
def test_what_a_variant_lacks_is_found_before_the_first_one_starts(missing, questions, tmp_path, capfd):
    settings = [each for each in questions[1] if each.partition("=")[0] not in (missing.partition("=")[0], "run_dir")]
    settings += [f"run_dir={tmp_path}/runs", "compare.run=[good,bad]"]
    settings += ["compare.variants={good: seed=0, bad: " + missing + "}"]
    settings += [each for each in questions[1] if each.startswith(missing.partition("=")[0])]
    assert main(settings) == REJECTED
    assert "error: variant bad: " in capfd.readouterr().err and not (tmp_path / "runs").exists()


def test_ctrl_c_stops_the_variant_that_runs_and_starts_no_other(tmp_path, prepared):
    given = {each.partition("=")[0]: each for each in train_overrides(tmp_path / "runs", prepared, "max_steps=100000")}
    given |= {"checkpoint.every": "checkpoint.every=100000", "log_every": "log_every=20"}
    words = command([*given.values(), VARIANTS, "compare.run=[fp32,bf16]"], module="train.compare")
    process = subprocess.Popen(words, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True)
    first = tmp_path / "runs" / "fp32"
    eventually(lambda: (first / "metrics.jsonl").is_file())
    process.send_signal(signal.SIGINT)
    assert "stopped; the same command resumes" in process.communicate()[1] and process.returncode == STOPPED
    outcome = read_outcome(LocalFolder(first))
    assert (outcome["outcome"], outcome["kind"]) == ("stopped", "SIGINT") and outcome["checkpoint"] == outcome["step"]
    assert not (tmp_path / "runs" / "bf16").exists()
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])]


def variants_of(*given: str) -> dict[str, list[str]]:
    overrides = ["experiment=demo", "run_dir=runs/x", *given]
    cli.add_schema(CompareConfig, "compare", [])
    made = make_variants(cli.load_config(CompareConfig, overrides), overrides)
    return {variant.name: variant.overrides for variant in made}


def test_the_variants_that_come_along_compose():
    assert list(variants_of("compare.run=[none,layers,model,xla]")) == ["none", "layers", "model", "xla"]


def test_a_variant_is_the_run_with_its_own_settings_last():
    made = variants_of("backend=ddp", "seed=3", "compare.variants={a: seed=4, b: backend=xla}", "compare.run=[b,a]")
    assert list(made) == ["b", "a"]
    assert made["b"] == ["experiment=demo", "seed=3", "backend=xla", 'run_dir="runs/x/b"']
    assert made["a"] == ["experiment=demo", "backend=ddp", "seed=4", 'run_dir="runs/x/a"']


def test_a_variant_runs_at_its_largest_batch_too_unless_that_is_the_batch_of_all():
    given = ["compare.variants={a: seed=4}", "compare.run=[xla,a]", "compare.largest_batch={xla: 16, a: 52}"]
    made = variants_of(*given, "micro_batch_size=16", "global_batch_size=null")
    assert list(made) == ["xla", "a", "a_batch_52"]
    batch = ["seed=4", 'run_dir="runs/x/a_batch_52"', "micro_batch_size=52", "global_batch_size=null"]
    assert made["a_batch_52"] == ["experiment=demo", *batch]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["compare.variants={a: nosuch=1}", "compare.run=[a]"], "variant a: nosuch is not a setting"),
        (["compare.variants={../a: seed=1}", "compare.run=[../a]"], "is not the name of a file"),
        (["compare.variants={a: 'seed=\"1'}", "compare.run=[a]"], "No closing quotation"),
        (["compare.run=[nosuch]"], "compare.run names nosuch; compare.variants has: none, layers"),
        (["compare.largest_batch={nosuch: 3}"], "compare.largest_batch names nosuch"),
        (["compare.largest_batch={xla: 0}"], "compare.largest_batch has 0"),
        (["compare.largest_batch={xla: x}"], "must be a whole number"),
        (["compare.run=[xla,xla]"], "names a variant twice"),
        (["compare.tolerance=-1"], "compare.tolerance=-1"),
        (["compare.ranks=0"], "compare.ranks=0"),
    ],
)
def test_variants_that_are_none_are_rejected(given, says):
    with pytest.raises(InputError, match=re.escape(says)):
        variants_of(*given)


def test_the_experiment_is_the_work_of_the_published_comparison():
    cli.add_schema(CompareConfig, "compare", [])
    cfg = cli.load_config(CompareConfig, ["experiment=compare_squad"])
    assert (cfg.seq_len, cfg.micro_batch_size, cfg.max_epochs, cfg.data.max_train_examples) == (384, 28, 20, 15000)
    assert cfg.compare.names == ["none", "layers"] and cfg.model.pretrained == "albert/albert-base-v2"
