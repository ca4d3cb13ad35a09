"""One command from a file of rows to a trained model: what it assumes, what it trains, what it rejects."""

import json
import shlex
import shutil
from pathlib import Path

import datasets
import huggingface_hub
import pandas
import pyarrow.parquet
import pytest
import running
import yaml
from finetuning import read_rows, write_rows
from forks import Forked
from rejections import rejects
from toy import BERT

from train import api
from train.config import TrainConfig
from train.models.encoder import build_masked_lm
from train.run import compose as cli
from train.storage import hub_access
from train.tools import evaluate, finetune, predict

QUICK = ["max_steps=4", "eval_every=2", "checkpoint.every=2", "data.num_workers=0", "samples=2"]


@pytest.fixture(scope="module")
def model(tokenizer_folder, tmp_path_factory):
    """A folder of transformers, as published models are."""
    folder = tmp_path_factory.mktemp("published") / "model"
    build_masked_lm(BERT, vocab_size=120, pad_id=0, seq_len=64).export(folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    return folder


def labelled(texts) -> pandas.DataFrame:
    """60 texts with one of two labels."""
    return pandas.DataFrame({"text": texts[:60], "label": ["x", "y"] * 30})


def finetuned(data: Path, model: Path, run: Path, *words: str) -> int:
    flags = ["--model", str(model), "--output", str(run)]
    return finetune.main([str(data), *flags, f"data.cache_dir={run.parent / 'cache'}", *words])


def shown(data: Path, model: Path, capsys, *words: str) -> dict[str, str]:
    """Return the settings that --show prints, as text by key."""
    assert finetuned(data, model, data.parent / "run", "--show", *words) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["baretrain", "train"]
    return {key: text for key, _, text in (word.partition("=") for word in words[2:])}


def test_a_csv_becomes_a_trained_model_and_a_report(texts, model, tmp_path, capsys):
    rows = [{"tweet": text, "sentiment": ("bad", "good")[n % 2]} for n, text in enumerate(texts)]
    data = write_rows(tmp_path / "tweets.csv", rows[:80])
    words = [len(text.split()) for text in texts[:80]]
    mean = sum(words) / len(words)
    run = tmp_path / "run"
    assert finetuned(data, model, run, *QUICK) == 0
    said = capsys.readouterr()
    for line in (
        "task: classify, 2 classes (bad, good)",
        "columns: label=sentiment, text=tweet",
        "rows: 80, of which 10% are held out for validation; ",
        f"; tweet: {mean:.0f} words on average, at most {max(words)} in the first 80",
        "training: 4 steps of batches of 8, learning rate 5e-05, from",
    ):
        assert line in said.err
    assert f"predict: baretrain predict {run} data.path=NEW.csv" in said.out
    assert (run / "report" / "report.html").exists()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["optim"]["lr"] == 5e-5
    assert config["best"]["metric"] == "f1_macro"
    assert config["checkpoint"]["best"]
    answers = tmp_path / "answers.jsonl"
    assert predict.main([str(run), f"data.path={data}", "--output", str(answers)]) == 0
    assert {line["prediction"] for line in read_rows(answers)} <= {"bad", "good"}
    assert evaluate.main([str(run)]) == 0


def test_the_command_that_is_shown_is_the_run(texts, model, tmp_path, capsys):
    rows = [{"text": text, "labels": ["a", "b"][: n % 3]} for n, text in enumerate(texts[:60])]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    settings = shown(data, model, capsys, "seed=3")
    assert settings["task"] == "multilabel"
    assert settings["seed"] == "3"
    assert not (tmp_path / "run").exists()
    cfg = cli.load_config(TrainConfig, [f"{key}={text}" for key, text in settings.items()])
    assert cfg.max_epochs == finetune.EPOCHS
    assert cfg.global_batch_size == 8  # 60 rows would be 6 steps of 32


def test_files_say_their_delimiter_and_folders_their_splits(texts, model, tmp_path, capsys):
    frame = labelled(texts)
    frame.to_csv(tmp_path / "semicolons.csv", sep=";", index=False)
    settings = shown(tmp_path / "semicolons.csv", model, capsys)
    assert settings["data.delimiter"] == '";"'
    escaped = "".join(f'"so \\"{text}\\"",x{n % 2}\n' for n, text in enumerate(texts[:60]))
    (tmp_path / "escaped.csv").write_text("text,label\n" + escaped)
    assert shown(tmp_path / "escaped.csv", model, capsys)["data.quotes"] == "escaped"
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("my_train.tsv", "my_dev.tsv", "my_test.tsv"):
        frame.to_csv(folder / name, sep="\t", index=False)
    settings = shown(folder, model, capsys)
    assert settings["data.train"] == "my_train.tsv"
    assert settings["data.validation"] == "my_dev.tsv"
    assert "data.delimiter" not in settings


def test_a_column_that_cannot_be_read_is_not_needed(texts, model, tmp_path, capsys):
    other = pyarrow.array([{}] * 60, pyarrow.map_(pyarrow.string(), pyarrow.int8()))
    table = pyarrow.Table.from_pandas(labelled(texts)).append_column("other", other)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    assert shown(tmp_path / "rows.parquet", model, capsys)["data.columns.label"] == "label"


def test_columns_of_bits_are_the_labels_of_a_run(texts, model, tmp_path, capsys):
    rows = [
        {"text": text, "toxic": n % 2, "rude": int(n % 3 == 2)}
        for n, text in enumerate(texts[:60])
    ]
    assert finetuned(write_rows(tmp_path / "rows.csv", rows), model, tmp_path / "run", *QUICK) == 0
    assert "task: multilabel" in capsys.readouterr().err
    labels = json.loads((tmp_path / "run" / "data.json").read_text())["labels"]
    assert labels == ["toxic", "rude"]


def test_tags_without_entities_are_judged_by_accuracy(texts, model, tmp_path):
    rows = [{"tokens": text.split()[:2], "tags": ["noun", "article"]} for text in texts[:60]]
    data = write_rows(tmp_path / "rows.jsonl", rows)
    run = tmp_path / "run"
    assert finetuned(data, model, run, *QUICK) == 0
    assert yaml.safe_load((run / "config.yaml").read_text())["best"]["metric"] == "accuracy"


def test_a_data_set_of_the_hub_is_read_from_the_cache_with_its_own_splits(
    texts, model, tmp_path, capsys, monkeypatch
):
    caches = tmp_path / "caches"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", caches)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub_access.silence.cache_clear()
    frame = labelled(texts)
    files = {}
    for split in ("train", "validation"):
        files[split] = str(tmp_path / f"{split}.csv")
        frame.to_csv(files[split], index=False)
    # as the library keeps a data set org/rows that it has fetched
    builder = datasets.load_dataset_builder("csv", data_files=files, cache_dir=tmp_path / "other")
    builder.dataset_name = "rows"
    builder.download_and_prepare(str(caches / "org___rows" / "default" / "0.0.0" / "0123abcd"))
    run = tmp_path / "run"
    assert finetuned(Path("org/rows"), model, run, *QUICK) == 0
    assert "rows: 60 for training; validation on validation" in capsys.readouterr().err
    splits = json.loads((run / "data.json").read_text())["splits"]
    assert {name: split["rows"] for name, split in splits.items()} == {
        "train": 60,
        "validation": 60,
    }
    hub_access.silence.cache_clear()


def test_several_ranks_say_once_what_is_assumed_and_train_the_same(texts, model, tmp_path):
    data = tmp_path / "rows.csv"
    labelled(texts).to_csv(data, index=False)
    losses = []
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        words = [str(data), "--model", str(model), "--output", str(run), *QUICK]
        words += ["model.hidden_dropout=0", "model.attention_dropout=0"]
        words += ["backend.precision=fp32", f"data.cache_dir={tmp_path}/cache"]
        ended = running.run(words, ranks=ranks, module="finetune")
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr.count("task: classify, 2 classes (x, y)") == 1
        assert ended.stdout.count("predict: baretrain predict") == 1
        assert (run / "report" / "report.html").exists()
        assert (run / "report" / "command.txt").read_text().startswith("baretrain train run_dir=")
        losses.append(running.lines(run, "eval")[-1]["loss"])
    # the order of sums differs
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    shown = running.run([*words, "--show"], ranks=2, module="finetune")
    assert shown.stdout == (tmp_path / "run2" / "report" / "command.txt").read_text()


def test_the_same_rows_in_python_are_one_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = [{"text": "so good", "label": "x"}, {"text": "so bad", "label": "y"}]
    frame, table = pandas.DataFrame(rows), datasets.Dataset.from_list(rows)
    (path,) = {api.kept(each) for each in (rows, frame, table)}
    assert read_rows(path) == rows
    assert api.kept(rows[:1]) != path


def test_a_data_set_in_python_keeps_the_names_of_many_labels(
    texts, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = [f"topic {number}" for number in range(20)]
    rows = {"text": texts[:60], "label": [number % 20 for number in range(60)]}
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    given = [datasets.Dataset.from_dict(rows, features=features) for _ in range(2)]
    (path,) = {api.kept(each) for each in given}
    assert finetuned(path, model, tmp_path / "run", "--show") == 0
    assert "task: classify, 20 classes (topic 0, topic 1, " in capsys.readouterr().err
    others = datasets.ClassLabel(names=["another", *names[1:]])
    assert api.kept(given[0].cast_column("label", others)) != path


def test_help_has_the_defaults_of_the_command(capsys):
    for command, shown in {
        finetune: ("task=...", "optim.lr=5e-05", "max_epochs=3", "optim=finetune"),
        predict: ("eval_batch_size=32", "backend.precision=fp32"),
    }.items():
        with pytest.raises(SystemExit):
            command.main(["--help"])
        words = capsys.readouterr().out.split()
        assert set(shown) <= set(words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["data.path=x"], "data.path=x: a flag of finetune sets it"),
        (["data.columns.label=nosuch"], "no column nosuch"),
        (["nosuch=1"], "nosuch is not a setting"),
        (["task=nosuch"], "there is no such task"),
        (["max_epochs=many"], "max_epochs=many: max_epochs must be a number or null"),
    ],
)
def test_what_is_wrong_is_one_line(words, says, texts, model, tmp_path, capsys):
    data = tmp_path / "rows.csv"
    labelled(texts).to_csv(data, index=False)
    assert finetuned(data, model, tmp_path / "run", *QUICK, *words) == 2
    errors = capsys.readouterr().err
    assert errors.count("error: ") == 1
    assert says in errors.splitlines()[-1]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "it has no rows"),
        ("text,label\n", "it has no rows"),
        ("text,label\na b,\nc d,\n", "no row has a value in label"),
        ("${oc.env:HOME},label\na b,x\nc d,y\ne f,x\n", "a name with a reference"),
    ],
)
def test_rows_that_cannot_be_read_are_one_line(content, says, model, tmp_path, capsys):
    data = tmp_path / "rows.csv"
    data.write_text(content)
    assert finetuned(data, model, tmp_path / "run") == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert says in line


def test_rows_inside_one_object_are_named(model, tmp_path, capsys):
    data = tmp_path / "rows.json"
    data.write_text(json.dumps({"data": [{"text": "so good", "label": "x"}]}))
    assert finetuned(data, model, tmp_path / "run") == 2
    assert "are the rows in data? Write one per line" in capsys.readouterr().err


@pytest.mark.slow
def test_rows_in_python_become_a_run_a_report_and_predictions(texts, model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(api.processes, "start", Forked)
    frame = labelled(texts)
    settings = {word.partition("=")[0]: word.partition("=")[2] for word in QUICK}
    run = api.finetune(
        frame, model=str(model), run_dir=str(tmp_path / "run"), **settings, **{"optim.lr": 1e-3}
    )
    assert (run.outcome, run.step) == ("done", 4)
    assert {"f1_macro", "loss"} <= run.scores.keys()
    assert {answer["prediction"] for answer in run.predict(texts[:4])} <= {"x", "y"}
    assert run.report == f"{run.run_dir}/report/report.html"
    assert Path(run.report).exists()
    page = api.report(run.run_dir, output=str(tmp_path / "pages"))
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("rows", "says"),
    [(["a text"], "row 1 is a text without a label"), ([], "data has no rows")],
)
def test_rows_without_labels_are_rejected(rows, says, tmp_path):
    rejects(says, api.finetune, rows, model="m", run_dir=str(tmp_path / "run"))
