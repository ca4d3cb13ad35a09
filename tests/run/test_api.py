"""The commands as functions: what a notebook gets of a run, a rejection, an interruption."""

import functools
import io
from pathlib import Path

import pytest
from finetuning import tuning
from forks import DEVICE, Forked
from rejections import rejects
from running import ROOT, outcome

from train import api

TWEETS = ["task=classify", "data=tweets", f"data.path={ROOT / 'tests/inputs/tweets.csv'}"]
TWEETS += ["data.validation_fraction=0.3", "seq_len=64", "data.lengths=[32]", "eval_every=1", "checkpoint.every=1"]


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
    monkeypatch.setattr(api, "print", functools.partial(print, file=output), raising=False)
    return output


def test_a_run_is_trained_and_asked_with_its_progress_in_the_cell(
    cell: Notebook, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tuning(Path("run"), prepared / "tokenizer", *TWEETS)
    run = api.train(settings)
    assert (run.outcome, run.step, run.export) == ("done", 2, "run/export")
    assert [row["step"] for row in run.metrics] == [1, 2] and {"loss", "accuracy"} <= run.metrics[0].keys()
    assert "step 1/2 " in cell.getvalue() and "done at step 2" in cell.getvalue()
    monkeypatch.setattr(api.processes, "start", Forked)  # the first was a process of its own
    answers = api.predict(run.run_dir, ["so good", "é — bad"], options=["--device", DEVICE])
    assert [answer["id"] for answer in answers] == ["0", "1"] and set(answers[0]["probabilities"]) == {"0", "1", "2"}
    known = api.predict("run", [{"labels": "1", "text": "so good"}], options=["--device", DEVICE])
    assert [(answer["label"], answer["prediction"]) for answer in known] == [("1", answers[0]["prediction"])]
    assert api.predict("run", []) == []
    names = ("loss", "accuracy", "f1_macro", "f1_weighted", "matthews_correlation")
    assert api.evaluate("run") == {name: pytest.approx(run.metrics[-1][name]) for name in names}
    rejects(r"^run belongs to another run \(.*seed: 0 -> 1\); choose ", api.train, [*settings, "seed=1"])
    rejects(r"^'max_steps=1' must be a list of texts, such as \['max_steps=1'\]$", api.train, "max_steps=1")
    rejects(r"^rows\.jsonl[^/]*$", api.predict, "run", [{"other": "so good"}], options=["--device", DEVICE])
    rejects(r"^'so good' must be a list of texts, such as \['so good'\]$", api.predict, "run", "so good")
    rejects(r"^max_stepz is not a setting; did you mean max_steps\?$", api.train, [*settings, "max_stepz=1"])


def test_an_interrupt_of_two_ranks_stops_them_with_a_checkpoint(
    cell: Notebook, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tuning(Path("run"), prepared / "tokenizer", *TWEETS)
    rejects(r"^data\.path=nowhere.csv: ", api.train, [*settings, "run_dir=other", "data.path=nowhere.csv"], ranks=2)
    cell.at = " 3/500 "
    with pytest.raises(KeyboardInterrupt):
        api.train([*settings, "max_steps=500"], ranks=2)
    stopped = outcome(Path("run"))
    assert "2 ranks" in cell.getvalue()
    assert (stopped["outcome"], stopped["kind"]) == ("stopped", "SIGINT") and stopped["checkpoint"] == stopped["step"]
    monkeypatch.setattr(api.processes, "start", Forked)
    run = api.train([*settings, f"max_steps={stopped['step'] + 1}"])
    assert (run.outcome, run.step) == ("done", stopped["step"] + 1)


def test_a_corpus_is_prepared(cell: Notebook, corpus: Path) -> None:
    given = ["corpus=text", f"corpus.path={corpus}", "output=data/mine", "seq_len=32", "tokenizer.vocab_size=120"]
    assert api.prepare([*given, "validation_fraction=0.25"]) == "data/mine"
    assert Path("data/mine/manifest.json").is_file() and "unigram entropy" in cell.getvalue()
    rejects("^seq_len=a: ", api.prepare, [*given[:-2], "seq_len=a"])
