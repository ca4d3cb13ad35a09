"""Regression: numbers in, numbers in the same units out."""

import json
from decimal import Decimal

import numpy as np
import pytest
import torch
from finetuning import FP32, batch_of, read_rows, task_of, train_with, tuning, write_rows
from rejections import rejects
from running import lines
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from train.checkpoints.manifest import step_name
from train.data.files.errors import BadRow
from train.tasks.regress import number_of, scores
from train.tools import checkpoints, predict

ROWS = [
    (f"{'ba ' * (row % 7)}be na{' ti' * (row % 3)}", f"{1000 + 50 * (row % 7)}", 0.1 * (row % 3))
    for row in range(60)
]
# The rate is too high, so that errors fall and rise: the best evaluation is the lowest, and not the last.
GIVEN = [
    "best.metric=mse",
    "checkpoint.best=true",
    "checkpoint.every=1",
    "eval_every=1",
]
GIVEN += ["max_steps=6", "optim.schedule=constant", "optim.lr=0.006", "watchdog.step_s=0"]


@pytest.fixture(scope="module")
def rated(tmp_path_factory):
    path = tmp_path_factory.mktemp("rated") / "rated.csv"
    names = ("text", "price", "size")
    return write_rows(path, [dict(zip(names, row, strict=True)) for row in ROWS])


@pytest.fixture(scope="module")
def given(rated, tokenizer_folder):
    data = ["task=regress", "data=records", f"data.path={rated}", "data.columns.label=price"]
    data += [
        "data.validation_fraction=0.3",
        "seq_len=32",
        "data.lengths=[32]",
        f"data.cache_dir={rated.parent}/cache",
    ]
    return lambda run_dir, *more: tuning(run_dir, tokenizer_folder, *data, *GIVEN, *more)


@pytest.fixture(scope="module")
def trained(given, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    assert train_with(given(run_dir)) == ("done", 6)
    return run_dir


def asked(run_dir, source, tmp_path, suffix="jsonl"):
    output = tmp_path / f"out.{suffix}"
    assert predict.main([str(run_dir), f"data.path={source}", "--output", str(output), *FP32]) == 0
    return read_rows(output)


def test_the_best_evaluation_is_that_with_the_lowest_error(trained):
    errors = {line["step"]: line["mse"] for line in lines(trained, "eval")}
    lowest = min(errors, key=errors.get)
    assert lowest < 6 and (trained / "checkpoints" / step_name(lowest)).is_dir(), errors
    evaluation = json.loads((trained / "evaluation.json").read_text())
    assert (evaluation["step"], evaluation["splits"]["validation"]["mse"]) == (
        lowest,
        errors[lowest],
    )


def test_the_export_predicts_in_the_units_of_the_data(trained, rated, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(trained / "export").eval()
    assert model.config.problem_type == "regression" and model.config.id2label == {0: "price"}
    with torch.no_grad():
        read = AutoTokenizer.from_pretrained(trained / "export")
        (wanted,) = model(**read([ROWS[5][0]], return_tensors="pt")).logits[0].tolist()
    assert wanted == pytest.approx(1150, abs=200)
    answers = asked(trained, rated, tmp_path)
    assert answers[5]["prediction"] == pytest.approx(wanted, rel=1e-4)
    assert answers[5]["label"] == 1250
    for line in read_rows(trained / "predictions/validation.jsonl"):
        again = answers[int(line["id"])]["prediction"]
        assert line["prediction"] == pytest.approx(again, rel=1e-4)
    rows = asked(trained, rated, tmp_path, "csv")
    assert list(rows[5]) == ["text", "price", "size", "id", "label", "prediction", "tokens_cut"]
    assert float(rows[5]["prediction"]) == pytest.approx(wanted, rel=1e-4)


def test_a_checkpoint_is_exported_without_the_data_and_learns_on_in_other_units(
    given, trained, rated, tmp_path
):
    step = json.loads((trained / "evaluation.json").read_text())["step"]
    assert (
        checkpoints.main([str(trained), "export", str(tmp_path / "out"), "--step", str(step)]) == 0
    )
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        trained / "export/model.safetensors"
    ).read_bytes()
    config = tmp_path / "out/config.json"
    rated.with_name("half.csv").write_text(
        "".join(rated.read_text().splitlines(keepends=True)[:31])
    )
    given = [
        each for each in given(tmp_path / "on") if not each.startswith(("model", "data.path"))
    ]
    given += [
        "model=any",
        f"model.pretrained={tmp_path / 'out'}",
        f"data.path={rated.with_name('half.csv')}",
    ]
    task = task_of(given)
    model, rows = task.build_model().eval(), task.eval_data()
    inputs = batch_of(rows, [0, 1])
    with torch.no_grad():
        computed = task.numbers(task.eval_statistics(model, inputs).numpy())
    answers = {line["id"]: line for line in asked(trained, rated, tmp_path)}
    ids = task.tables.examples("validation")["id"][:2]
    assert computed == pytest.approx([answers[name]["prediction"] for name in ids], rel=1e-4)
    config.write_text(config.read_text().replace('"problem_type": "regression",', ""))
    wanted = [answer["prediction"] for answer in answers.values()]
    assert [line["prediction"] for line in asked(config.parent, rated, tmp_path)] == wanted


@pytest.mark.filterwarnings("error")
def test_metrics_are_those_of_scipy_and_scikit_learn():
    from scipy.stats import pearsonr, spearmanr
    from sklearn.metrics import mean_absolute_error, mean_squared_error

    rng = np.random.default_rng(0)
    # with ties
    truth, predicted = rng.integers(0, 6, 40) / 2.0, rng.integers(0, 6, 40) / 3.0
    mse = mean_squared_error(truth, predicted)
    wanted = [mse, mean_absolute_error(truth, predicted), mse**0.5]
    wanted += [pearsonr(truth, predicted).statistic, spearmanr(truth, predicted).statistic]
    assert [*scores(truth, predicted).values()] == pytest.approx(wanted)
    assert scores(truth, np.ones_like(predicted))["pearson"] == 0


@pytest.mark.parametrize(
    "value",
    [
        "",
        "many",
        "nan",
        "inf",
        "-Infinity",
        "1_000",
        "1e39",
        "4,5",
        True,
        None,
        float("nan"),
        [0.5],
    ],
)
def test_what_is_no_number_is_named(value):
    rejects(r"^score holds .*not a number", number_of, value, "score", error=BadRow)


def test_numbers_are_read_in_any_form():
    assert [number_of(value, "score") for value in (" -4.5 ", "1e3", 7, Decimal("0.5"))] == [
        -4.5,
        1000.0,
        7.0,
        0.5,
    ]


def test_bad_rows_and_settings_are_rejected(given, tmp_path):
    (tmp_path / "bad.csv").write_text("text,price\na,1\nb,4;5\n")
    (tmp_path / "same.csv").write_text(
        "text,price\n" + "".join(f"text {row},3\n" for row in range(50))
    )
    for name, settings, says in (
        ("bad.csv", [], r"bad\.csv:3: price holds '4;5', not a number"),
        ("same.csv", [], "rows have the number 3 in price, so there is nothing to learn"),
        ("same.csv", ["data.columns.label=size"], r"no column size"),
        ("same.csv", ["data.columns.label=[price,size]"], "task=regress reads one column"),
        (
            "same.csv",
            ["data.columns.label=[price,price]"],
            "must be a column, or a list of different columns",
        ),
        ("same.csv", ["data.labels=[3]"], "task=regress learns numbers"),
    ):
        rejects(
            says, task_of, [*given(tmp_path / "run", *settings), f"data.path={tmp_path / name}"]
        )
