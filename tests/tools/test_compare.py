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
from train.observe.report.figures import bars_of
from train.observe.report.page import table
from train.observe.report.run import Run, read_run, tell_apart
from train.run import compose as cli
from train.run.command import DONE, FAILED, REJECTED, STOPPED
from train.run_folder.outcome import read_outcome
from train.storage.folders import LocalFolder
from train.tools.compare import main
from train.tools.variants import make_variants

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

STEPS, BATCH, TOKENS, BEGAN_S = 40, 28, 400_000, 1.8e9
CONFIG = {
    "task": {"kind": "qa", "stride": 128},
    "model": {"pretrained": "albert", "num_layers": None},
    "backend": {"name": "ddp", "compile": "none"},
    "best": {"metric": "f1"},
}


def write_run(
    folder,
    *,
    train_s=100.0,
    wall_s=125.0,
    f1=80.0,
    batch=BATCH,
    steps=STEPS,
    lines=None,
    diverged=False,
    **more,
):
    """A finished run: `steps` steps of `batch` sequences, 400,000 tokens in `train_s` of `wall_s` seconds. `more`:
    changes of its config and environment, and values of its summary.
    """
    config = CONFIG | more.pop("config", {})
    plan = {
        "global_batch_size": batch,
        "micro_batch_size": batch,
        "total_steps": more.pop("planned", steps),
    }
    described = {
        "identity": {"data": "sha-of-squad"},
        "first_started_unix_s": BEGAN_S,
        "plan": plan,
    }
    described |= {
        "device": "NVIDIA V100",
        "world_size": 1,
        "seq_len": 384,
        "compile": config["backend"]["compile"],
    }
    described |= more.pop("environment", {})
    numbers = {
        "loss": 2.5,
        "examples": steps * batch,
        "tokens_per_s": TOKENS / train_s,
        "train_s": train_s,
    }
    end = {"train_s": train_s, "tokens": TOKENS, "reason": "done", "graphs": 0, "compile_s": 0.0}
    evaluated = {
        "kind": "eval",
        "time_unix_s": BEGAN_S + wall_s - 1,
        "step": steps,
        "loss": 2.0,
        "f1": f1,
    }
    written = [
        {"kind": "train", "time_unix_s": BEGAN_S + 30, **numbers, "step": steps // 2, "loss": 4.0},
        {"kind": "train", "time_unix_s": BEGAN_S + wall_s - 2, **numbers, "step": steps},
        evaluated,
        *([evaluated | {"step": steps + 1, "loss": None, "f1": None}] if diverged else []),
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
    says = "compiled reaches 2.00 times the tokens/s of native in 0.64 times the billable time "
    says += f"(0.48 without compiling, which pays off after {0.4 * STEPS:,.0f} steps), "
    says += "equal quality (f1 0.5% apart, tolerance 1%)"
    assert says in capsys.readouterr().out.splitlines()
    page = tmp_path / "report"
    html = (page / "report.html").read_text()
    assert f'<div class="card headline">{says}</div>' in html
    assert "$1.28 (0.64 times) \u2605 best" in shown(html.replace("&#9733;", "\u2605"))
    names = {"throughput_by_run", "time_by_run", "cost_by_run", "training_loss_over_time"}
    assert names <= {path.stem for path in page.glob("*.png")}
    expected = {
        "Tokens/s over the whole run": ["4,000", "8,000 (2.00 times)"],
        "Billable time: since the first start (h:mm:ss)": ["0:02:05", "0:01:20 (0.64 times)"],
        "Billable time without compiling (h:mm:ss)": ["0:02:05", "0:01:00 (0.48 times)"],
        "Cost": ["$2.00", "$1.28 (0.64 times)"],
        "Compiling (s)": ["0.0", "20.0"],
        "Peak device memory of rank 0 (GB)": ["8.00", "6.00"],
        "backend.compile": ["none", "layers"],
    }
    assert expected.items() <= rows(native, compiled).items()
    unpriced = write_run(tmp_path / "unpriced")
    assert rows(unpriced, compiled)["Cost"] == ["unknown", "$1.28"]
    assert "cost_by_run" not in {bars.name for bars in bars_of(compared(unpriced, unpriced)[0])}


def test_runs_that_differ_in_their_seeds_alone_are_one_row_with_mean_and_spread(tmp_path, capsys):
    def of(name: str, seed: int, task: dict[str, str], **more) -> Path:
        return write_run(
            tmp_path / name, config={"seed": seed, "task": task, **more.pop("config", {})}, **more
        )

    squad, cola = {"kind": "qa"}, {"kind": "classify"}
    first = [of(f"squad_{seed}", seed, squad, f1=f1) for seed, f1 in enumerate([80.0, 81.0, 85.0])]
    other = [of("alone", 7, squad, config={"eval_every": 5}), of("cola_1", 1, cola, f1=0.5)]
    lost = of("cola_2", 2, cola, f1=0.75, diverged=True)
    # no seed differs alone
    assert comparison.over_seeds(compared(*first[:1], *other, first[0])[0]) == []
    assert main(list(map(str, [*first, *other, lost]))) == DONE
    said, _, told = capsys.readouterr().out.partition("\n\n")
    wanted = [  # ((80 - 82)^2 + (81 - 82)^2 + (85 - 82)^2) / 2 = 7
        ["over seeds", "validation", "mean", "spread", "runs"],
        ["squad_0, squad_1, squad_2", "f1", "82", f"{7**0.5:.4g}", "3"],
        ["alone", "f1", "80", "unknown", "1"],
        ["cola_1, cola_2", "f1", "0.5", "unknown", "1 of 2"],
    ]
    assert [
        re.split(r"  +", line) for line in said.splitlines()
    ] == wanted and "tokens/s of" not in told
    assert " ".join(wanted[1]) in shown((tmp_path / "report/report.html").read_text())


@pytest.mark.parametrize(
    ("device", "kinds"),
    [("NVIDIA V100", {"device", "host"}), ("cpu", {"host"}), ("cpu through XLA", {"host"})],
)
def test_memory_of_cpus_is_that_of_the_host(tmp_path, device, kinds):
    line = {
        "kind": "train",
        "time_unix_s": BEGAN_S + 30,
        "step": 1,
        "loss": 4.0,
        "device_memory_bytes": 3e9,
    }
    end = {"kind": "summary", "time_unix_s": BEGAN_S + 60, "step": 1, "peak_host_bytes": 2e9}
    known = rows(write_run(tmp_path / "run", environment={"device": device}, lines=[line, end]))
    assert {label.split(" memory")[0].split()[-1] for label in known if "memory" in label} == kinds


NO_SCORE = {"lines": [{"kind": "train", "step": STEPS, "loss": 1.0, "examples": STEPS * BATCH}]}
OTHER_DATA = {"environment": {"identity": {"data": "other"}}}


@pytest.mark.parametrize(
    ("changes", "tolerance", "says"),
    [
        ({"f1": 80.0}, 0.01, ", equal quality (f1 the same, tolerance 1%)"),
        ({"f1": 78.4}, 0.02, ", equal quality (f1 2% apart, tolerance 2%)"),
        ({"f1": None}, 0.01, ", equal quality (loss the same, tolerance 1%)"),  # which both have
        (
            {"f1": 80.4},
            0.004,
            ", unequal quality (f1 80.4 against 80, 0.5% better, tolerance 0.4%)",
        ),
        ({"f1": 78.4}, 0.01, ", unequal quality (f1 78.4 against 80, 2% worse, tolerance 1%)"),
        (NO_SCORE, 0.01, "quality unknown"),
        (OTHER_DATA, 0.01, "f1 80.4 against 80, on different data"),
        ({"config": {"eval_examples": 50}}, 0.01, "f1 80.4 against 80, on different data"),
        ({"diverged": True}, 0.01, "quality: no number (f1 no number against 80)"),
    ],
)
def test_quality_is_equal_within_its_tolerance_and_never_where_it_cannot_be_compared(
    changes, tolerance, says, tmp_path
):
    folders = write_run(tmp_path / "a"), compiled_run(tmp_path / "b", **changes)
    (sentence,), (reverse,) = (
        compared(*pair, tolerance=tolerance)[1] for pair in (folders, folders[::-1])
    )
    assert says in sentence
    assert says.startswith(", equal") or ", equal quality" not in sentence + reverse


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"config": {"seed": 7}}, "seed: 0 there, 7 here"),
        ({"environment": {"seq_len": 128}}, "seq_len: 384 there, 128 here"),
        ({"config": {"task": {"kind": "qa", "stride": 64}}}, "task.stride: 128 there, 64 here"),
        (
            {"config": {"model": {"pretrained": "albert", "num_layers": 6}}},
            "num_layers: unknown there, 6 here",
        ),
        (OTHER_DATA, "data: sha-of-squad there, other here"),
        ({"steps": 80}, "sequences consumed: 1,120 there, 2,240 here"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_work_is_named(changes, names, tmp_path):
    _, sentences = compared(write_run(tmp_path / "a"), compiled_run(tmp_path / "b", **changes))
    assert f"not the same work ({names})" in sentences[0].replace("model.num", "num")


def test_another_machine_is_named_and_xla_on_the_same_one_is_not(tmp_path):
    native = write_run(tmp_path / "native", environment={"device": "cpu"})
    there = compiled_run(
        tmp_path / "there", environment={"device": "NVIDIA A100", "world_size": 8}
    )
    here = compiled_run(tmp_path / "here", environment={"device": "cpu through XLA"})
    _, sentences = compared(native, there, here)
    assert (
        "not the same machine (device: cpu there, NVIDIA A100 here; world_size: 1 there, 8 here)"
        in sentences[0]
    )
    assert "machine" not in sentences[1]


def test_the_same_sequences_in_larger_batches_are_the_same_work(tmp_path):
    larger = {"train_s": 40.0, "wall_s": 70.0, "batch": 56, "steps": 20}
    _, sentences = compared(
        write_run(tmp_path / "native"), compiled_run(tmp_path / "compiled_56", **larger)
    )
    assert "2.50 times the tokens/s of native in 0.56 times the billable time" in sentences[0]
    assert (
        "with batches of 56 instead of 28, equal" in sentences[0]
        and "not the same" not in sentences[0]
    )


def test_a_run_that_has_not_ended_and_one_with_pauses_are_named(tmp_path, capsys):
    stopped = write_run(tmp_path / "stopped", reason="SIGTERM", planned=90)
    resumed, goes_on = compiled_run(tmp_path / "resumed"), write_run(tmp_path / "goes on")
    again = json.loads((resumed / "metrics.jsonl").read_text().splitlines()[-1])
    again |= {"attempt": 2, "time_unix_s": BEGAN_S + 1000}
    later = {
        "kind": "train",
        "attempt": 2,
        "step": STEPS + 10,
        "train_s": 900.0,
        "time_unix_s": BEGAN_S + 1000,
    }
    for folder, line in ((resumed, again), (goes_on, later)):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    runs, _ = compared(stopped, resumed, goes_on)
    said = [warning.partition(": its")[0] for warning in comparison.warnings(runs)]
    assert said[:2] == ["stopped has not ended: step 40 of 90", "resumed took 2 attempts"]
    assert said[2:] == ["goes on has not ended: step 50 of 40", "goes on took 2 attempts"]
    assert [run.summary["wall_s"] for run in runs] == [125.0, 1000.0, 1000.0]  # to the newest line
    assert runs[1].summary["compile_s"] == 40.0
    assert main([str(stopped), str(resumed)]) == DONE
    page = (tmp_path / "report" / "report.html").read_text()
    assert said[0] in page and said[0] in capsys.readouterr().out.splitlines()


# ---- what others wrote ---------------------------------------------------------------------------------------------


GOOD = {
    "config": {**CONFIG, "seed": 1},
    "environment": {"plan": {"global_batch_size": 28}, "first_started_unix_s": 1.0},
}


@pytest.mark.parametrize(
    "times", [{"wall_s": -5.0}, {"train_s": 5e-324}, {"train_s": 1e-90, "wall_s": 9e99}]
)
def test_what_cannot_have_been_measured_is_no_ratio(times, tmp_path):
    end = {
        "kind": "summary",
        "step": STEPS,
        "tokens": TOKENS,
        "train_s": 1.0,
        "wall_s": 1.0,
        **times,
    }
    folders = write_run(tmp_path / "a"), write_run(tmp_path / "bad", lines=[end])
    for said in (compared(*folders)[1][0], compared(*folders[::-1])[1][0]):
        assert "inf" not in said and " in -" not in said and not re.search(r"\d{20}", said)


@settings(quick, max_examples=100)
@given(
    changed(GOOD),
    changed(
        [{"kind": "summary", "attempt": 1, "step": 2, "wall_s": 3.0, "tokens": 4, "train_s": 5.0}]
    ),
)
def test_no_run_folder_breaks_the_comparison(files, lines):
    """Any content of files that can be read at all."""
    folder = Path("runs/a")
    valid = [
        line for line in lines if isinstance(line, dict) and isinstance(line.get("kind"), str)
    ]
    valid = [
        line
        for line in valid
        if all(isinstance(line.get(key), int) for key in ("attempt", "step"))
    ]
    assume(valid and all(isinstance(files.get(name), dict) for name in GOOD))
    bad = run_of(folder / "bad", files, valid)
    good = run_of(
        folder / "good", GOOD, [{"kind": "summary", "attempt": 1, "step": 2, "wall_s": 3.0}]
    )
    good.config["seed"] = 2
    for runs in ([good, bad], [bad, good]):
        tell_apart(runs)
        assert (
            comparison.sentences(runs, 0.01)
            and table(runs)
            and comparison.over_seeds(runs) is not None
        )
        assert all(isinstance(bars.name, str) for bars in bars_of(runs))


def run_of(folder: Path, files: dict[str, Any], lines: list[dict[str, Any]]) -> Run:
    tables = [
        dict(flatten({str(key): value for key, value in files[name].items()})) for name in GOOD
    ]
    run = Run(LocalFolder(folder), *tables)
    run.add({**line, "time_unix_s": 1.0} for line in reversed(lines))
    return run


# ---- variants ------------------------------------------------------------------------------------------------------


VARIANTS = "compare.variants={fp32: backend.precision=fp32, bf16: backend.precision=bf16, gpu: backend.device=cuda, "
VARIANTS += "again: backend.precision=fp32}"


def training(runs: Path, data: Path, *more: str) -> list[str]:
    """The settings of a training of a step, without its variants' and its precision."""
    words = [*train_overrides(runs, data, "export=false"), "max_steps=1", *more]
    given = {each.partition("=")[0]: each for each in words}
    return [each for key, each in given.items() if key != "backend.precision"]


def test_variants_are_run_once_and_one_that_fails_hides_no_other(tmp_path, prepared, capfd):
    words, fp32 = training(tmp_path / "runs", prepared, VARIANTS), tmp_path / "runs/fp32"
    assert main([*words, "compare.run=[gpu,fp32]"]) == FAILED
    said = capfd.readouterr()
    assert "error: gpu: " in said.err and "cuda" in said.err
    assert "gpu is missing here because it failed: " in (fp32 / "report/report.html").read_text()
    shutil.copytree(fp32, fp32.parent / "again")  # the same work
    before = (fp32 / "metrics.jsonl").read_bytes()
    assert main([*words, "compare.run=[fp32,again]"]) == DONE
    said = capfd.readouterr()
    assert (
        said.out.count(" is done\n") == 2
        and "again reaches 1.00 times the tokens/s of fp32" in said.out
    )
    assert (fp32 / "metrics.jsonl").read_bytes() == before


def test_what_a_variant_lacks_is_found_before_the_first_one_starts(tmp_path, prepared, capfd):
    words = training(
        tmp_path / "runs", prepared, "compare.variants={good: seed=0, bad: data.path=nosuch}"
    )
    assert main([*words, "compare.run=[good,bad]"]) == REJECTED
    assert "error: variant bad: " in capfd.readouterr().err and not (tmp_path / "runs").exists()


def test_ctrl_c_stops_the_variant_that_runs_and_starts_no_other(tmp_path, prepared):
    endless = ["max_steps=100000", "checkpoint.every=100000", "log_every=20"]
    words = training(tmp_path / "runs", prepared, VARIANTS, *endless)
    words = ["train", "compare", *words, "compare.run=[fp32,bf16]"]
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


def variants_of(*given: str) -> dict[str, list[str]]:
    overrides = ["experiment=demo", "run_dir=runs/x", *given]
    cli.add_schema(CompareConfig, "compare", [])
    made = make_variants(cli.load_config(CompareConfig, overrides), overrides)
    return {variant.name: variant.overrides for variant in made}


def test_a_variant_is_the_run_with_its_own_settings_last():
    made = variants_of(
        "backend=ddp",
        "seed=3",
        "compare.variants={a: seed=4, b: backend=xla}",
        "compare.run=[b,a]",
    )
    assert list(made) == ["b", "a"]
    assert made["b"] == ["experiment=demo", "seed=3", "backend=xla", 'run_dir="runs/x/b"']
    assert made["a"] == ["experiment=demo", "backend=ddp", "seed=4", 'run_dir="runs/x/a"']


def test_the_experiment_is_the_work_of_the_published_comparison_and_the_variants_that_come_along_compose():
    cli.add_schema(CompareConfig, "compare", [])
    cfg = cli.load_config(CompareConfig, ["experiment=compare_squad"])
    assert (cfg.seq_len, cfg.micro_batch_size, cfg.max_epochs, cfg.data.max_train_examples) == (
        384,
        28,
        20,
        15000,
    )
    assert (
        cfg.compare.names == ["none", "layers"] and cfg.model.pretrained == "albert/albert-base-v2"
    )
    assert list(variants_of("compare.run=[none,layers,model,xla]")) == [
        "none",
        "layers",
        "model",
        "xla",
    ]
