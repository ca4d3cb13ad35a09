"""Evaluating what a run has learnt: the numbers of its last evaluation, to the last digit, on any number of ranks."""

import csv
import json
import logging
import re
import shutil
from pathlib import Path

import pytest
from finetuning import asking, train_with, tuning
from running import ROOT, lines, prepare_here, run, train_here
from safetensors.torch import load_file, save_file
from streaming import upload

from train.data.records import tables
from train.tools import evaluate

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
        "multilabel": [
            ("text", *LABELS),
            *((text, len(text) % 2, n % 2) for n, text in enumerate(texts[:60])),
        ],
    }
    for name, rows in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
    settings = {
        name: [f"task={name}", "data=csv", f"data.path={folder / name}.csv", HELD_OUT]
        for name in tables
    }
    settings["multilabel"] += ["data.columns.label=[long,warm]", "task.threshold=[0.4,0.5]"]
    settings["ner"] = [
        "task=ner",
        "data=records",
        f"data.path={ROOT / 'tests/inputs/entities.conll'}",
        HELD_OUT,
    ]
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
            logging.getLogger("train").handlers.clear()  # one writes to the run folder
        return done[task]

    return folder_of


def content_of(settings):
    """Return the text of the file that settings name."""
    return Path(settings[2].removeprefix("data.path=")).read_text()


def metrics_of(line):
    return {name: value for name, value in line.items() if name not in NOT_METRICS}


def evaluated(model, output, *arguments, ranks=1):
    """Return the JSON that an evaluation writes."""
    command = [
        str(model),
        *arguments,
        "--output",
        str(output),
        f"data.cache_dir={output.parent}/cache",
    ]
    if ranks == 1:
        assert evaluate.main(command) == 0
    else:
        done = run(command, ranks=ranks, module="evaluate")
        assert done.returncode == 0, done.stderr
    return json.loads(output.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classify", "regress", "multilabel", "ner", "qa", "mlm"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_is_evaluated_as_it_was_in_training(trained, tmp_path, task, ranks):
    run_dir = trained(task)
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    result, last = (
        evaluated(run_dir, tmp_path / "scores.json", ranks=ranks),
        lines(run_dir, "eval")[-1],
    )
    if task == "qa":  # at the threshold that the export keeps
        last["f1"] = last["best_f1"]
        of_answers = [name for name in last if "answer" in name]
        assert result["metrics"]["f1"] == pytest.approx(last["f1"])
        last |= {name: result["metrics"][name] for name in (*of_answers, "exact_match", "f1")}
    assert (result["step"], result["metrics"]) == (last["step"], metrics_of(last))
    assert before == {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}


@pytest.mark.parametrize("task", ["classify", "regress"])
def test_rows_that_were_trained_on_are_not_tokenised(trained, tmp_path, task, monkeypatch):
    run_dir = trained(task)
    made = []
    before = tables.make_features

    def make_features(featurizer, split, examples, scratch):
        made.append((split, len(examples)))
        return before(featurizer, split, examples, scratch)

    monkeypatch.setattr(tables, "make_features", make_features)
    result = evaluated(run_dir, tmp_path / "scores.json")
    assert made == [("validation", result["rows"])]
    assert 0 < result["rows"] < 30  # of 60, of which 30 % were held out
    last = lines(run_dir, "eval")[-1]
    assert result["metrics"] == metrics_of(last)


def test_other_ways_to_the_same_model_and_rows_lead_to_the_same_numbers(
    trained, sources, tmp_path
):
    """A new file by the run and by its export alone, and a target of another name."""
    new, run_dir = tmp_path / "new.csv", trained("classify")
    new.write_text("".join(content_of(sources["classify"]).splitlines(keepends=True)[:30]))
    by_run = evaluated(run_dir, tmp_path / "run.json", f"data.path={new}")
    by_export = evaluated(
        run_dir / "export", tmp_path / "export.json", f"data.path={new}", "eval_batch_size=8"
    )
    assert by_run["rows"] == 29 and by_run["metrics"] == pytest.approx(
        by_export["metrics"], rel=1e-5
    )
    renamed = tmp_path / "renamed.csv"
    renamed.write_text(content_of(sources["regress"]).replace("label", "rating", 1))
    rated = evaluated(
        trained("regress"),
        tmp_path / "rated.json",
        f"data.path={renamed}",
        "data.columns.label=rating",
    )
    assert rated["rows"] == 60 and rated["metrics"]["loss"] != rated["metrics"]["mse"], (
        "the targets are standardised"
    )
    asked = evaluated(
        trained("regress") / "export",
        tmp_path / "scaled.json",
        f"data.path={renamed}",
        "data.columns.label=rating",
    )
    assert asked["metrics"] == pytest.approx(rated["metrics"], rel=1e-3)


def test_an_export_masks_as_its_run_did(prepared, tmp_path):
    masks = [
        "task.mask_rate=0.3",
        "task.max_ngram=1",
        "task.whole_word=true",
        "seed=5",
    ]
    train_here(tmp_path / "run", prepared, *masks, "max_steps=1", "eval_every=1")
    last = metrics_of(lines(tmp_path / "run", "eval")[-1])
    for more in ([], ["task=mlm"]):
        result = evaluated(
            tmp_path / "run/export",
            tmp_path / "scores.json",
            f"data.path={prepared}",
            *more,
            "eval_batch_size=8",
        )
        assert result["metrics"] == pytest.approx(last, rel=1e-4)


def test_a_run_in_s3_and_its_text_are_evaluated_from_there(trained, prepared, bucket, tmp_path):
    remote, data = upload(bucket, trained("mlm"), "run"), upload(bucket, prepared)
    keys = bucket.keys()
    result = evaluated(
        remote,
        tmp_path / "scores.json",
        f"data.path={data}",
        "eval_examples=20",
        *bucket.overrides(),
        ranks=2,
    )
    assert (
        result["metrics"] == metrics_of(lines(trained("mlm"), "eval")[-1])
        and bucket.keys() == keys
    )
    cached = {path.name for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert any("validation" in name for name in cached) and not any(
        "train" in name for name in cached
    ), cached


def test_what_cannot_be_evaluated_is_rejected_in_one_line(
    trained, sources, corpus, capsys, tmp_path
):
    run_dir, headless = trained("classify"), tmp_path / "headless"
    rows = {
        "unknown": "text,label\nba,cold\n",
        "empty": "text,label\n",
    }
    files = {name: tmp_path / f"{name}.csv" for name in rows}
    for name, file in files.items():
        file.write_text(rows[name])
    shutil.copytree(run_dir / "export", headless)
    weights = {
        name: value
        for name, value in load_file(headless / "model.safetensors").items()
        if "classifier" not in name
    }
    save_file(weights, headless / "model.safetensors", {"format": "pt"})
    prepare_here(tmp_path / "other", corpus, "tokenizer.vocab_size=110")
    cases = [
        (
            run_dir,
            [f"data.path={files['unknown']}"],
            "unknown label cold; the labels are long, warm",
        ),
        (run_dir, [f"data.path={files['empty']}"], "validation: no row is left"),
        (run_dir, ["data.train=x.csv"], "nothing is trained"),
        (run_dir, ["model.new_head=true"], "is used as it is"),
        (run_dir, ["--output", f"{tmp_path}/none/x.json"], "there is no folder"),
        (
            headless,
            [sources["classify"][2]],
            "holds no weights for classifier.bias, classifier.weight",
        ),
        (trained("mlm"), [f"data.path={files['empty']}"], "manifest.json: Not a directory"),
        (
            trained("mlm"),
            [f"data.path={tmp_path}/other"],
            "has a different tokenizer than the data",
        ),
    ]
    for model, arguments, says in cases:
        code = evaluate.main([str(model), *arguments, f"data.cache_dir={tmp_path}/cache"])
        *_, error = capsys.readouterr().err.splitlines()
        assert code == 2 and re.match(f"error: .*{says}", error), error
