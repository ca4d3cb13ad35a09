"""The commands as functions: what a notebook gets of a run, a rejection, an interruption."""

import datetime
import io
import json
import subprocess
import sys
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas
import pytest
from finetuning import tuning
from forks import DEVICE, Forked
from rejections import rejects
from reported_runs import CONFIG, STEP_S, TOKENS_PER_STEP, eval_line, train_line, write_run
from running import ROOT

from train import api

TWEETS = ["task=classify", "data=tweets", f"data.path={ROOT / 'tests/inputs/tweets.csv'}"]
TWEETS += [
    "data.validation_fraction=0.3",
    "seq_len=64",
    "data.lengths=[32]",
    "eval_every=1",
    "checkpoint.every=1",
]


class Notebook(io.StringIO):
    """A cell's output, whose reader interrupts the kernel where `at` is printed."""

    at = ""

    def write(self, text: str) -> int:
        if self.at and self.at in text:
            self.at = ""
            raise KeyboardInterrupt
        return super().write(text)


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Notebook:
    """A notebook in a folder with a module and a package of our names."""
    (tmp_path / "train.py").write_text("raise SystemExit('of the working folder')")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/__init__.py").write_text("raise SystemExit('of the working folder')")
    monkeypatch.chdir(tmp_path)
    output = Notebook()
    monkeypatch.setattr(api, "sys", SimpleNamespace(stdout=output, executable=sys.executable))
    return output


@pytest.mark.slow
def test_a_run_is_trained_and_asked_with_its_progress_in_the_cell(
    cell: Notebook, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tuning(Path("run"), prepared / "tokenizer", *TWEETS)
    run = api.train(settings)
    assert (run.outcome, run.step, run.export) == ("done", 2, "run/export")
    assert [row["step"] for row in run.metrics] == [1, 2]
    assert {"loss", "accuracy"} <= run.metrics[0].keys()
    assert "step 1/2 " in cell.getvalue() and "done at step 2" in cell.getvalue()
    monkeypatch.setattr(api.processes, "start", Forked)  # the first was a process of its own
    names = ("loss", "accuracy", "f1_macro", "f1_weighted", "matthews_correlation")
    assert api.evaluate("run") == {name: pytest.approx(run.metrics[-1][name]) for name in names}
    assert_predicts()
    assert "predictions: " not in cell.getvalue()  # of a folder that the user does not know
    for changed, says in (
        ([*settings, "seed=1"], r"^run belongs to another run \(.*seed: 0 -> 1\); choose "),
        ("max_steps=1", r"^'max_steps=1' must be a list of texts, such as \['key=value'\]$"),
        ({"max_steps": 1}, "must be a list of texts"),
        ([*settings, "max_stepz=1"], r"^max_stepz is not a setting; did you mean max_steps\?$"),
    ):
        rejects(says, api.train, changed)


def assert_predicts() -> None:
    """The run predicts texts, rows and tables alike, and rejects rows without its column."""
    predict = partial(api.predict, "run", options=[f"backend.device={DEVICE}"])
    answers = predict(["so good", "é — bad"])
    assert [answer["id"] for answer in answers] == ["0", "1"]
    assert [answer["text"] for answer in answers] == ["so good", "é — bad"]
    good = answers[0]
    assert set(good["probabilities"]) == {"0", "1", "2"}
    (known,) = predict([{"labels": "1", "text": "so good"}])
    assert (known["label"], known["prediction"]) == ("1", good["prediction"])
    assert api.predict("run", []) == []
    rejects(r"^rows\.jsonl[^/]*$", predict, [{"other": "so good"}])
    (one,) = predict("so good")
    assert one["probabilities"] == pytest.approx(good["probabilities"])
    frame = pandas.DataFrame({"labels": np.array([1], np.int64), "text": ["so good"]})
    assert predict(frame) == [{**known, "labels": 1}]


@pytest.mark.slow
def test_an_interrupted_cell_has_saved_and_the_same_call_goes_on(
    cell: Notebook, prepared: Path
) -> None:
    endless = ["max_steps=100000", "checkpoint.every=100000", "eval_every=100000"]
    settings = tuning(Path("run"), prepared / "tokenizer", *TWEETS[:5], *endless)
    settings = [word for word in settings if word != "max_steps=2"]
    reached = []
    for _ in range(2):
        cell.at = "left"  # of a line of training
        with pytest.raises(KeyboardInterrupt):
            api.train(settings)
        outcome = json.loads(Path("run/outcome.json").read_text())
        assert (outcome["outcome"], outcome["checkpoint"]) == ("stopped", outcome["step"])
        reached.append(outcome["step"])
    assert 0 < reached[0] < reached[1]


def test_a_command_that_fails_before_it_starts_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], 1, "", "error: MemoryError: 3 GB")
    monkeypatch.setattr(api.subprocess, "run", lambda *words, **options: ended)
    with pytest.raises(api.Failure, match="MemoryError: 3 GB"):
        api.train(["run_dir=run"])


def test_runs_are_a_table_with_what_differs_and_their_scores(tmp_path: Path) -> None:
    for name, rate, accuracy in (("low", 1e-4, 0.5), ("high", 1e-3, 0.75)):
        config = {**CONFIG, "run_dir": f"runs/{name}", "optim": {"name": "adamw", "lr": rate}}
        lines = [train_line(20), train_line(40), eval_line(40, masked_accuracy=accuracy)]
        write_run(tmp_path / name, lines, config=config)
    table = api.compare(str(tmp_path / "low"), str(tmp_path / "high"))
    assert list(table.index) == ["low", "high"]
    assert list(table["optim.lr"]) == [1e-4, 1e-3]
    assert list(table["masked_accuracy"]) == [0.5, 0.75]
    assert table.loc["high", "tokens_per_s"] == TOKENS_PER_STEP / STEP_S
    assert table["cost_usd"].isna().all()
    assert not {"run_dir", "seed", "optim.name"} & set(table.columns)
    rejects("is not a folder; name the run_dir", api.compare, str(tmp_path / "nosuch"))
    rejects("give the run_dir of each run", api.compare)


TEXTS = ["so good", "so bad"]
ROWS = [{"text": "so good", "n": 1}, {"text": "so bad", "n": 2}]
FRAME = pandas.DataFrame(ROWS)
KINDS = {
    "a text": ("so good", TEXTS[:1]),
    "a row": (ROWS[0], ROWS[:1]),
    "a list": (TEXTS, TEXTS),
    "a tuple": (tuple(TEXTS), TEXTS),
    "a generator": ((text for text in TEXTS), TEXTS),
    "a generator of rows": ((row for row in ROWS), ROWS),
    "an array": (np.array(TEXTS), TEXTS),
    "a series": (FRAME["text"], TEXTS),
    "a data frame": (FRAME, ROWS),
    "a data frame with missing values": (
        pandas.DataFrame({"n": [1, None], "at": [pandas.NaT, pandas.NaT]}),
        [{"n": 1, "at": None}, {"n": None, "at": None}],
    ),
    "rows of numpy": ([{"text": np.str_("so good"), "n": np.int64(1)}], ROWS[:1]),
    "a data set": (datasets.Dataset.from_list(ROWS), ROWS),
    "a time": (
        [{"at": datetime.date(2024, 1, 5), 3: np.array([1, 2])}],
        [{"at": "2024-01-05", "3": [1, 2]}],
    ),
    "a decimal": ([{"n": Decimal("1.5")}], [{"n": "1.5"}]),
    "nothing": ([], []),
}


@pytest.mark.parametrize(("given", "rows"), KINDS.values(), ids=KINDS)
def test_rows_of_any_kind_are_the_same_rows(given: Any, rows: list[Any]) -> None:
    written = api.json_text(api.lines_of(given)).splitlines()
    assert [json.loads(line) for line in written] == [
        {"text": row} if isinstance(row, str) else row for row in rows
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "^rows are of type int: give texts, or mappings"),
        (None, "^rows are of type NoneType: "),
        (b"so good", "^row 1 is of type int: "),
        ({"so good"}, "^rows are of type set: "),
        (np.array([["a", "b"]]), "^row 1 is of type ndarray: "),
        (["so good", float("nan")], "^row 2 is of type float: "),
        ([["so", "good"]], "^row 1 is of type list: "),
        (
            "rows.csv",
            r"^'rows.csv' seems to be a file: give it as a Path, or a text as a list, \['rows.csv'\]$",
        ),
        (["so good", {"text": "so bad"}], "^some rows are texts and others are not"),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
            "JSON: Dataset is neither text nor number$",
        ),
        (
            [{"text": object()}],
            "^a row cannot be written as JSON: object is neither text nor number$",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_rows_is_rejected_before_a_process_starts(given: Any, message: str) -> None:
    rejects(message, api.predict, "run", given)


@pytest.mark.parametrize(
    "call",
    [
        lambda flag: api.predict(flag, ["x"]),
        lambda flag: api.predict("run", ["x"], options=["backend.device=cpu", *flag.split("=")]),
        lambda flag: api.predict("run", ["x"], options=[flag]),
        lambda flag: api.evaluate(flag),
        lambda flag: api.evaluate("run", [flag]),
        lambda flag: api.train(["run_dir=run", flag]),
        lambda flag: api.prepare([flag]),
    ],
)
def test_no_value_is_read_as_a_flag_that_runs_a_file(
    cell: Notebook, tmp_path: Path, call: Any
) -> None:
    (tmp_path / "evil.py").write_text("open('executed', 'w')")
    rejects(
        r"^'--import.*' begins with '-'",
        call,
        "--import=./evil.py",
    )
    assert not (tmp_path / "executed").exists()
