"""What a trained model says of new rows: as its run's evaluation, row for row, or one line on what is wrong."""

import csv
import datetime
import json
import shutil

import pyarrow.parquet
import pytest
import torch
import yaml
from finetuning import (
    FP32,
    asking,
    read_rows,
    train_with,
    tuned,
    tuning,
    two_lengths,
    write_rows,
)
from running import train_config
from toy import BERT
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from train.config import to_dict
from train.models.encoder import build_masked_lm
from train.models.heads import build_with_head
from train.run import compose as cli
from train.run_folder import samples
from train.storage.folders import LocalFolder
from train.tasks import predictor
from train.tools import predict

LABELS = ["bad", "fair", "good"]
SHARES = [f"probability_{label}" for label in LABELS]


@pytest.fixture(scope="module")
def labelled(texts, tokenizer_folder, tmp_path_factory):
    """A run on CSV with a dialect and column names of its own, and the rows that it was evaluated on."""
    path = tmp_path_factory.mktemp("labelled")
    lines = [
        (f"row{i}", f'{LABELS[i % 3]} "{text}"', LABELS[i % 3])
        for i, text in enumerate(texts[:60])
    ]
    for name, part in {"train": lines[:40], "dev": lines[40:]}.items():
        with (path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_ALL, doublequote=False, escapechar="\\")
            writer.writerows([("name", "body", "stars"), *part])
    columns = [
        "data.columns.id=name",
        "data.columns.text=body",
        "data.columns.label=stars",
        "data.quotes=escaped",
    ]
    given = [
        "task=classify",
        "data=records",
        "seq_len=64",
        "data.lengths=[16,32]",
        f"data.path={path}",
        "samples=6",
    ]
    files = ["data.train=train.csv", "data.validation=dev.csv"]
    run = tuned(path / "run", tokenizer_folder, *given, *columns, *files)
    return run, path / "dev.csv"


@pytest.fixture(scope="module")
def answering(texts, tokenizer_folder, tmp_path_factory):
    """A run on questions of which every third has no answer, and those it was evaluated on."""
    path = tmp_path_factory.mktemp("answering")
    given = asking(path, texts, train=16, dev=14, v2=True)
    run = tuned(
        path / "run", tokenizer_folder, *given, "seq_len=48", "data.lengths=[16]", "samples=14"
    )
    return run, path / "dev.json"


@pytest.fixture(scope="module")
def folder(tokenizer_folder, tmp_path_factory):
    """A model of transformers that no run of ours made."""
    path = tmp_path_factory.mktemp("folder")
    torch.manual_seed(0)
    build_with_head(
        "SequenceClassification", BERT, labels=LABELS, vocab_size=120, pad_id=0, seq_len=64
    ).export(path)
    shutil.copytree(tokenizer_folder, path, dirs_exist_ok=True)
    return path


def written(model, data, output, *arguments):
    """The rows of a file of predictions."""
    words = [model, f"data.path={data}", *arguments, *FP32, "--output", output]
    assert predict.main(list(map(str, words))) == 0
    return read_rows(output)


def answers(capsys, *arguments):
    """The lines that are printed, and what is said of them."""
    assert predict.main([*map(str, arguments), *FP32]) == 0
    output = capsys.readouterr()
    return [json.loads(line) for line in output.out.splitlines()], output.err


def rejected(capsys, *arguments):
    """The line that says what is wrong. (The runs of the fixtures have turned on what is logged.)"""
    assert predict.main([*map(str, arguments), *FP32]) == cli.REJECTED
    result = capsys.readouterr()
    assert not result.out
    (line,) = [line for line in result.err.splitlines() if "randomly initialised" not in line]
    return line.removeprefix("error: ")


def test_rows_that_were_cut_are_marked_and_what_they_lose_is_said(
    labelled, answering, capsys, tmp_path
):
    text = "ba be " * 100
    given = [{"name": each[:2], "body": each} for each in ("na", text)]
    rows = write_rows(tmp_path / "new.jsonl", given)
    (whole, cut), said = answers(capsys, labelled[0], f"data.path={rows}")
    assert "tokens_cut" not in whole and cut["tokens_cut"] > 100
    assert "1 of 2 rows are cut at 64 tokens" in said
    question = ["--question", text, "--context", "ba be na", "task.null_threshold=0"]
    (one,), said = answers(capsys, answering[0], *question)
    assert "1 of 1 rows are cut at 48 tokens" in said and one["tokens_cut"]


def samples_of(run):
    """What a run shows of its validation data, as the answer to each text."""
    return [(sample, *sample.answers) for sample in samples.read(LocalFolder(run)).samples]


def test_labels_and_samples_are_those_of_the_runs_evaluation(labelled, tmp_path, capsys):
    """As JSON lines, as CSV, and of one text on standard output."""
    run, dev = labelled
    result, rows = (
        written(run, dev, tmp_path / name, "eval_batch_size=7")
        for name in ("out.jsonl", "out.csv")
    )
    wanted = read_rows(run / "predictions/validation.jsonl")
    for one, other in zip(result, wanted, strict=True):
        assert [one[key] for key in ("id", "prediction", "label")] == [
            other[k] for k in ("id", "prediction", "label")
        ]
        assert one["probabilities"] == pytest.approx(other["probabilities"], abs=1e-5)
    of_input = ["name", "body", "stars"]
    assert list(rows[0]) == [*of_input, "id", "label", "prediction", *SHARES, "tokens_cut"]
    assert not rows[0]["tokens_cut"]
    assert [(row["id"], row["prediction"]) for row in rows] == [
        (line["id"], line["prediction"]) for line in wanted
    ]
    with dev.open() as file:
        texts = [row["body"] for row in csv.DictReader(file, escapechar="\\", doublequote=False)]
    assert [row["body"] for row in rows] == texts
    assert f"predictions: {tmp_path}/out.csv (20 rows)" in capsys.readouterr().out
    assert len(samples_of(run)) == 6
    for sample, answer in samples_of(run):
        line = wanted[texts.index(sample.text)]
        assert (answer.truth, answer.guesses[0].text) == (line["label"], line["prediction"])
    capsys.readouterr()
    (line,), said = answers(capsys, run, "--text", texts[0])
    assert list(line) == ["id", "prediction", "probabilities"] and line["id"] == "0"
    assert said.startswith("warning: the tokenizer of ")  # which lacks the quotation mark
    assert line["probabilities"] == pytest.approx(wanted[0]["probabilities"], abs=1e-5)


def test_several_texts_are_several_rows(labelled, answering, capsys):
    run, _ = labelled
    lines, _ = answers(capsys, run, "--text", "na", "--text", "ba be", "--text", "na")
    assert [line["id"] for line in lines] == ["0", "1", "2"]
    _, other, same = (pytest.approx(line["probabilities"], rel=1e-6) for line in lines)
    assert lines[0]["probabilities"] == same
    assert lines[0]["probabilities"] != other
    asked = ["--question", "na", "--question", "be", "--context", "ba be na"]
    assert "2 --question, 1 --context: give each as often" in rejected(
        capsys, answering[0], *asked
    )
    lines, _ = answers(capsys, answering[0], *asked, "--context", "be na")
    assert len(lines) == 2


def test_a_file_of_predictions_has_the_columns_of_the_input(folder, texts, tmp_path, capsys):
    """In their order, also those that the first row lacks, with objects, lists and other columns as JSON."""
    rows = [{"day": "5 May", "text": text, "tags": ["x"]} for text in texts[:3]]
    rows[1] |= {"place": {"town": "Bonn"}}
    data = write_rows(tmp_path / "new.jsonl", rows)
    cells, lines = (written(folder, data, tmp_path / name) for name in ("out.csv", "out.jsonl"))
    assert list(cells[0]) == [*rows[1], "id", "prediction", *SHARES, "tokens_cut"]
    assert [cell["day"] for cell in cells] == ["5 May"] * 3
    assert (cells[1]["tags"], cells[1]["place"]) == ('["x"]', '{"town": "Bonn"}')
    for line, row, cell in zip(lines, rows, cells, strict=True):
        assert list(line) == [*row, "id", "prediction", "probabilities"]
        assert {name: line[name] for name in row} == row
        assert line["prediction"] == cell["prediction"]
        assert float(cell["probability_good"]) == line["probabilities"]["good"]


@pytest.mark.parametrize("name", ["prediction", "probabilities", "tokens_cut"])
def test_a_column_that_predictions_would_replace_is_named(folder, name, tmp_path, capsys):
    (tmp_path / "new.csv").write_text(f"text,{name}\nba,1\n")
    data = [f"data.path={tmp_path}/new.csv"]
    for output in ("out.csv", "out.jsonl"):
        line = rejected(capsys, folder, *data, "--output", tmp_path / output)
        assert line.startswith(f"data.path has a column {name}, and so have predictions")
        assert not (tmp_path / output).exists()
    answers(capsys, folder, *data)  # on standard output, there is nothing to replace


def test_a_column_that_only_later_rows_have_is_named(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(predict, "ROWS_AT_ONCE", 2)
    rows = [{"text": "ba"}, {"text": "be"}, {"text": "na", "late": 1}]
    data = write_rows(tmp_path / "new.jsonl", rows)
    written(folder, data, tmp_path / "out.csv")
    assert "out.csv lacks late, which only rows after the first 2 have" in capsys.readouterr().err
    lines = written(folder, data, tmp_path / "out.jsonl")
    assert [line.get("late") for line in lines] == [None, None, 1]
    assert "late" not in capsys.readouterr().err


def test_columns_of_parquet_are_kept_but_for_those_that_cannot_be_read(folder, tmp_path, capsys):
    table = pyarrow.table(
        {
            "day": [datetime.date(2024, 1, 5)],
            "text": ["ba be"],
            "other": pyarrow.array([{}], pyarrow.map_(pyarrow.string(), pyarrow.int8())),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "new.parquet")
    (line,) = written(folder, tmp_path / "new.parquet", tmp_path / "out.jsonl")
    assert list(line) == ["day", "text", "id", "prediction", "probabilities"]
    assert line["day"] == "2024-01-05"
    assert (
        "new.parquet: columns left out, whose types cannot be read: other"
        in capsys.readouterr().err
    )


def test_questions_and_their_contexts_are_beside_the_answers(answering, tmp_path, capsys):
    run, dev = answering
    cells, lines = (written(run, dev, tmp_path / name) for name in ("out.csv", "out.jsonl"))
    assert {"question", "context", "answer", "score"} <= cells[0].keys()
    assert [cell["id"] for cell in cells] == [f"q{number}" for number in range(14)]
    for cell, line in zip(cells, lines, strict=True):
        for name in ("id", "question", "context", "answer"):
            assert cell[name] == line[name]


def test_an_architecture_that_reads_padding_answers_the_same_in_an_evaluation_and_alone(
    tokenizer_folder, tmp_path, capsys
):
    settings = [
        *two_lengths(tmp_path),
        "model=any",
        "model.architecture=nystromformer",
        "model.hidden_size=32",
    ]
    sizes = ["model.num_heads=2", "model.intermediate_size=64", "model.max_positions=64"]
    given = [
        each
        for each in tuning(tmp_path / "run", tokenizer_folder, *settings, *sizes)
        if "albert" not in each
    ]
    train_with([each for each in given if "embedding_size" not in each])
    note = "nystromformer reads padding, so every row is padded to seq_len=32 (data.lengths is not used)"
    assert note in (tmp_path / "run/log/rank_0000.txt").read_text()
    assert note in (tmp_path / "run/export/README.md").read_text().replace("\\", "")
    wanted = read_rows(tmp_path / "run/predictions/validation.jsonl")
    capsys.readouterr()
    for text, line in (("na na", wanted[0]), ("na " * 20, wanted[2])):
        (alone,), _ = answers(capsys, tmp_path / "run", "--text", text)
        assert alone["probabilities"] == pytest.approx(line["probabilities"], abs=1e-6)


def test_answers_are_those_of_the_runs_evaluation(answering, tmp_path, capsys, monkeypatch):
    run, dev = answering
    monkeypatch.setattr(predict, "ROWS_AT_ONCE", 5)
    monkeypatch.setattr(predictor, "TOKENISED_TOGETHER", 2)
    out = tmp_path / "out.jsonl"
    result = written(run, dev, out, "task.null_threshold=0", "eval_batch_size=3")
    wanted = json.loads((run / "predictions/validation.json").read_text())
    assert {line["id"]: line["answer"] for line in result} == wanted
    assert [line["id"] for line in result] == [f"q{number}" for number in range(14)]
    for line in result:
        scores = {one["text"]: one["score"] for one in reversed(line["n_best"])}
        assert line["score"] == pytest.approx(scores[line["answer"]], abs=1e-6)
    # By itself it takes the threshold that was best on the validation data.
    best = [line["answer"] for line in written(run, dev, out)]
    assert [answer.guesses[0].text for _, answer in samples_of(run)] == best


def test_the_threshold_decides_whether_there_is_an_answer_and_lies_in_the_export(
    answering, tmp_path, capsys
):
    run, dev = answering
    for threshold, has_answer in (("-1e9", False), ("1e9", True)):
        result, _ = answers(capsys, run, f"data.path={dev}", f"task.null_threshold={threshold}")
        assert {bool(line["answer"]) for line in result} == {has_answer}
    shutil.copytree(
        run, tmp_path / "run", ignore=shutil.ignore_patterns("evaluation.json", "checkpoints")
    )
    found = []
    for folder in (run, tmp_path / "run", run / "export"):
        lines, _ = answers(capsys, folder, f"data.path={dev}")
        assert set(lines[0]) == {"id", "answer", "score", "n_best"}
        found.append([line["answer"] for line in lines])
    assert found[0] == found[1] == found[2] and "" in found[0]


def test_a_model_of_transformers_reads_by_its_own_settings_and_flags(
    folder, texts, tmp_path, capsys
):
    labels = ["bad", "fair", "strange", "strange"]
    rows = [
        {"key": 9 - i, "body": f"{texts[i]} é", "label": label} for i, label in enumerate(labels)
    ]
    data = write_rows(tmp_path / "new.jsonl", rows)
    columns = ["data.columns.text=body", "data.columns.id=key"]
    lines, _ = answers(capsys, folder, f"data.path={data}", *columns)
    assert [line["id"] for line in lines] == ["9", "8", "7", "6"]
    assert [line["label"] for line in lines] == ["bad", "fair", None, None]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    theirs = pipeline(
        "text-classification", model, tokenizer=AutoTokenizer.from_pretrained(folder), top_k=None
    )
    for line, row in zip(lines, rows, strict=True):
        wanted = {one["label"]: one["score"] for one in theirs([row["body"]])[0]}
        assert line["probabilities"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"name,body\n", "has no rows"),
        (b"name,body\nrow1,ba\nrow2,b\xff\n", "new.csv:3: byte 0xff is not utf-8"),
        (
            b"name,text\nrow1,ba\n",
            "no column body (data.columns.text); the columns are: name, text",
        ),
    ],
    ids=["header_alone", "not_utf8", "wrong_column"],
)
def test_bad_input_is_one_line_and_leaves_no_file(
    labelled, content, line, tmp_path, capsys, monkeypatch
):
    # the first row is done with when the second turns out bad
    monkeypatch.setattr(predict, "ROWS_AT_ONCE", 1)
    run, _ = labelled
    (tmp_path / "new.csv").write_bytes(content)
    (tmp_path / "out.jsonl").write_text("older")
    assert line in rejected(
        capsys, run, f"data.path={tmp_path}/new.csv", "--output", tmp_path / "out.jsonl"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"new.csv", "out.jsonl"}
    assert (tmp_path / "out.jsonl").read_text() == "older"


def test_the_input_is_not_the_output_typed_texts_are_checked_and_it_is_one_process(
    folder, tmp_path, capsys, monkeypatch
):
    rows = tmp_path / "new.jsonl"
    rows.write_text('{"text": "ba"}\n')
    assert "is the input" in rejected(capsys, folder, f"data.path={rows}", "--output", rows)
    assert rejected(capsys, folder, "--text", "b\udcff").startswith(
        "--text: byte 0xff is not utf-8"
    )
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert "start it without torchrun" in rejected(capsys, "model", "--text", "x")


def test_what_a_model_is_not_for(labelled, answering, capsys):
    asks, labels = ["--question", "x", "--context", "y"], ["--text", "x"]
    assert "give --text, or data.path=FILE" in rejected(capsys, labelled[0], *asks)
    assert "give --question and --context, or data" in rejected(capsys, answering[0], *labels)
    pair = [*labels, "--text-pair", "y"]
    assert "without text_pair: leave out --text-pair" in rejected(capsys, labelled[0], *pair)
    rows = f"data.path={labelled[1]}"
    wrong = rejected(capsys, labelled[0], rows, "data.columns.label=nosuch")
    assert "no column nosuch (data.columns.label)" in wrong


def test_a_pretraining_has_no_head_and_a_run_that_has_just_begun_no_model(
    tmp_path, tokenizer_folder, capsys
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    config = to_dict(train_config(run, tmp_path, "task=classify", "data=records", "data.path=x"))
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert "has no export or checkpoint yet" in rejected(capsys, run, "--text", "x")
    build_masked_lm(BERT, vocab_size=120, pad_id=0, seq_len=64).export(tmp_path / "export")
    shutil.copytree(tokenizer_folder, tmp_path / "export", dirs_exist_ok=True)
    line = rejected(capsys, tmp_path / "export", "--text", "x")
    assert "is a model of task=mlm, which has no head for predictions" in line
