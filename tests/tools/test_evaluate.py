"""Evaluating what a run has learnt: the numbers of its last evaluation, to the last digit, on any number of ranks."""

import csv
import json

import pytest
from finetuning import asking, train_with, tuning
from running import ROOT, lines, run, train_here

NOT_METRICS = {"kind", "attempt", "time_unix_s", "step", "examples", "eval_s"}
LABELS = ["long", "warm"]
HELD_OUT = "data.validation_fraction=0.3"
STEPS = ["watchdog.step_s=0", "max_steps=3", "checkpoint.every=1", "eval_every=1"]


@pytest.fixture(scope="module")
def sources(texts, tmp_path_factory):
    """Settings of each task and its data."""
    folder = tmp_path_factory.mktemp("sources")
    tables = {
        "classify": [("text", "label"), *((text, LABELS[len(text) % 2]) for text in texts[:60])],
        "regress": [("text", "label"), *((text, 1000 + len(text)) for text in texts[:60])],
        "multilabel": [("text", *LABELS), *((text, len(text) % 2, n % 2) for n, text in enumerate(texts[:60]))],
    }
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    settings = {name: [f"task={name}", "data=csv", f"data.path={folder / name}.csv", HELD_OUT] for name in tables}
    settings["multilabel"] += ["data.columns.label=[long,warm]", "task.threshold=[0.4,0.5]"]
    settings["ner"] = ["task=ner", "data=records", f"data.path={ROOT / 'tests/inputs/entities.conll'}", HELD_OUT]
    (folder / "qa").mkdir()
    settings["qa"] = asking(folder / "qa", texts, train=20, dev=12, v2=True)
    return settings


@pytest.fixture(scope="module")
def trained(sources, tokenizer_folder, prepared, tmp_path_factory):
    """Return the folder of a run that has learnt a task."""
    done = {}

    def folder_of(task):
        if task not in done:
            done[task] = run_dir = tmp_path_factory.mktemp(task) / "run"
            if task == "mlm":
                train_here(run_dir, prepared, "eval_examples=20", "task.sop=true", "max_steps=3")
            else:
                train_with(tuning(run_dir, tokenizer_folder, *sources[task], *STEPS))
        return done[task]

    return folder_of


def metrics_of(line):
    return {name: value for name, value in line.items() if name not in NOT_METRICS}


def evaluated(model, output, *arguments, ranks=1):
    """Return the JSON that an evaluation writes."""
    command = [str(model), *arguments, "--output", str(output), f"data.cache_dir={output.parent}/cache"]
    done = run(command, ranks=ranks, module="train.evaluate")
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


@pytest.mark.parametrize("task", ["classify", "regress", "multilabel", "ner", "qa", "mlm"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_evaluated_as_it_was_in_training(trained, tmp_path, task, ranks):
    run_dir = trained(task)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    result, last = evaluated(run_dir, tmp_path / "scores.json", ranks=ranks), lines(run_dir, "eval")[-1]
    assert (result["step"], result["metrics"]) == (last["step"], metrics_of(last))
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
