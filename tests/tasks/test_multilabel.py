"""Multi-label classification: any number of labels in and out."""

import json
import shutil

import numpy as np
import pytest
import torch
from finetuning import FP32, read_rows, task_of, train_with, tuning, write_rows
from rejections import rejects
from running import lines

from train.config.tasks import MultiLabelConfig
from train.observe.report.run import final_scores, read_run
from train.run.stopping import StopRequest
from train.run_folder import exported
from train.storage.folders import LocalFolder
from train.tasks.multilabel import best_threshold, positive_weights
from train.tools import checkpoints, predict

NAMES = ["long", "rude", "warm"]
GIVEN = [
    "best.metric=f1_micro",
    "checkpoint.every=1",
    "eval_every=1",
    "max_steps=5",
    "optim.lr=0.01",
    "task.threshold=0.4",
]
GIVEN += [
    "task.positive_weights=balanced",
    "watchdog.step_s=0",
    "global_batch_size=12",
    "samples=4",
]


@pytest.fixture(scope="module")
def rows(texts):
    """Texts whose words say which labels they have; every fourth has none."""
    found = [
        [name for bit, name in enumerate(NAMES) if number % 8 >> bit & 1 and number % 4]
        for number in range(64)
    ]
    return [
        (f"{text} {' '.join(labels)}", labels) for text, labels in zip(texts, found, strict=False)
    ]


@pytest.fixture(scope="module")
def sources(rows, tmp_path_factory):
    """Settings of the same rows as JSON lines, as CSV with a separator, and as CSV with a column for each label."""
    folder = tmp_path_factory.mktemp("labelled")
    tables = {"lists.jsonl": [], "split.csv": [], "columns.csv": []}
    for text, labels in rows:
        tables["lists.jsonl"].append({"text": text, "label": labels})
        tables["split.csv"].append({"text": text, "label": " | ".join(labels)})
        bits = {name: int(name in labels) for name in NAMES}
        tables["columns.csv"].append({"text": text, **bits})
    for name, table in tables.items():
        write_rows(folder / name, table)
    return {
        "lists": [f"data.path={folder}/lists.jsonl"],
        "split": [f"data.path={folder}/split.csv", "data.label_separator=|"],
        "columns": [f"data.path={folder}/columns.csv", f"data.columns.label=[{','.join(NAMES)}]"],
    }


@pytest.fixture(scope="module")
def given(sources, tokenizer_folder, tmp_path_factory):
    data = [
        "task=multilabel",
        "data=records",
        "data.validation_fraction=0.4",
        "seq_len=48",
        "data.lengths=[48]",
    ]
    data += [f"data.cache_dir={tmp_path_factory.mktemp('cache')}", *GIVEN]
    return lambda run_dir, *more, source="lists": tuning(
        run_dir, tokenizer_folder, *data, *sources[source], *more
    )


def test_labels_are_read_from_lists_from_text_and_from_columns(given, rows, tmp_path):
    tasks = [
        task_of(given(tmp_path / "run", source=source)) for source in ("lists", "split", "columns")
    ]
    for task in tasks:
        assert task.labels == NAMES
        train = task.tables.examples("train")
        wanted = dict(rows)
        assert len(train) > 30 and [[NAMES[each] for each in has] for has in train["label"]] == [
            wanted[text] for text in train["text"]
        ]
        values = task.train_data().values["labels"]
        assert values.tolist() == [
            [float(name in wanted[text]) for name in NAMES] for text in train["text"]
        ]
        assert task.weights.tolist() == pytest.approx(
            ((1 - values).sum(0) / values.sum(0)).tolist()
        )
    assert len({task.data_id for task in tasks}) == 1


def test_the_loss_is_torchs_with_weights_and_without_in_an_evaluation(given, tmp_path):
    task = task_of(given(tmp_path / "run", "task.positive_weights=[1,2,3]"))
    drawn = task.train_data().draw(np.array([[0, 1, 2, 3]]))
    logits, targets = torch.randn(4, 3), drawn["inputs"]["labels"][0]
    wanted = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]))(logits, targets)
    assert task.loss_of(logits, {"labels": targets}) / drawn["count"][0] == pytest.approx(
        wanted.item()
    )
    plain = torch.nn.BCEWithLogitsLoss()(logits, targets).item()
    assert task.statistics(logits, {"labels": targets})[:, 0].mean() == pytest.approx(plain)
    padded = {"labels": torch.cat([targets, torch.full((1, 3), torch.nan)])}
    assert task.loss_of(torch.cat([logits, torch.ones(1, 3)]), padded) == task.loss_of(
        logits, {"labels": targets}
    )


@pytest.mark.filterwarnings("error")
def test_metrics_worked_out_by_hand(given, tmp_path):
    task = task_of(given(tmp_path / "run"))
    truth = [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    shares = [[0.9, 0.5, 0.1], [0.3, 0.8, 0.1], [0.2, 0.1, 0.1]]
    # At 0.4: of long 1 is found and 1 missed (F1 2/3), of rude 1 is found and 1 wrong (2/3), of warm there is none (0).
    wanted = {
        "f1_micro": 2 / 3,
        "f1_macro": 4 / 9,
        "average_precision": 1.0,
        "subset_accuracy": 1 / 3,
    }
    assert task.scores(np.array(truth, bool), np.array(shares)) == pytest.approx(wanted)
    # all 3 are found, and 1 is wrong: F1 6/7
    assert best_threshold(np.array(truth, bool), np.array(shares)) == pytest.approx(0.25)


def validated(run_dir):
    """The answers to the validation data."""
    return read_rows(run_dir / "predictions/validation.jsonl")


def chosen(evaluated):
    """The threshold that such answers choose."""
    shares = np.array([[*line["probabilities"].values()] for line in evaluated])
    truth = np.array([[name in line["label"] for name in NAMES] for line in evaluated])
    return best_threshold(truth, shares)


def limit_of(export):
    return json.loads((export / "baretrain_task.json").read_text())["settings"]["threshold"]


@pytest.mark.slow
def test_the_threshold_that_the_validation_data_chose_is_that_of_exports_and_predictions(
    given, rows, tmp_path, capsys
):
    run_dir = tmp_path / "run"
    of_run = given(run_dir, "task.threshold=best", "max_steps=3")
    train_with(of_run)
    evaluated = validated(run_dir)
    limit = chosen(evaluated)
    assert limit != 0.5
    shutil.rmtree(run_dir / "export")
    train_with(of_run)  # nothing is left to do but to export
    assert (
        checkpoints.main([str(run_dir), "export", str(tmp_path / "exported"), "--step", "3"]) == 0
    )
    for folder in (run_dir / "export", tmp_path / "exported"):
        assert limit_of(folder) == limit
    write_rows(tmp_path / "new.jsonl", [{"text": "no", "label": [name]} for name in NAMES])
    for flags, used in (([], limit), (["task.threshold=0.001"], 0.001)):
        capsys.readouterr()
        assert predict.main([str(run_dir), f"data.path={tmp_path}/new.jsonl", *flags, *FP32]) == 0
        for line in map(json.loads, capsys.readouterr().out.splitlines()):
            shares = line["probabilities"].items()
            assert line["prediction"] == [name for name, share in shares if share >= used]
    # In evaluations it is 0.5 still: a threshold that the same rows chose says too much.
    assert [line["prediction"] for line in evaluated] == [
        [name for name, share in line["probabilities"].items() if share >= 0.5]
        for line in evaluated
    ]


@pytest.mark.slow
@pytest.mark.parametrize("best", [True, False])
def test_thresholds_predictions_and_scores_are_those_of_the_exported_step(given, tmp_path, best):
    """Also after a stop, with fewer checkpoints kept than made, and in exports of other steps."""
    run_dir, asked = tmp_path / "run", StopRequest()
    settings = [
        "task.threshold=best",
        "optim.lr=0.3",
        "optim.schedule=constant",
        "eval_every=1",
        "max_steps=7",
    ]
    settings = given(
        run_dir, *settings, "checkpoint.every=1", "checkpoint.keep=2", f"checkpoint.best={best}"
    )
    asked.reason = "SIGTERM"
    for _ in range(4):  # a step each
        train_with(settings, asked)
    assert train_with(settings) == ("done", 7)
    scores = {line["step"]: line["f1_micro"] for line in lines(run_dir, "eval")}
    top = max(scores, key=scores.get)
    assert top < 6, scores  # else this shows nothing: choose another rate
    step = top if best else 7
    assert exported.marked(LocalFolder(run_dir), "weights") == step
    assert json.loads((run_dir / "evaluation.json").read_text())["step"] == step
    assert limit_of(run_dir / "export") == chosen(validated(run_dir))
    assert final_scores(read_run(run_dir))["f1_micro"] == scores[step]
    said = (
        f"the export has the weights of step {step}, the {'best by f1_micro' if best else 'last'}"
    )
    assert said in (run_dir / "log/rank_0000.txt").read_text()
    for each in (6, step):
        assert (
            checkpoints.main(
                [str(run_dir), "export", str(tmp_path / str(each)), "--step", str(each)]
            )
            == 0
        )
    of_step = limit_of(tmp_path / str(step))
    assert of_step == limit_of(run_dir / "export") != limit_of(tmp_path / "6")


def test_weights_and_thresholds_fit_the_labels(given, tmp_path):
    has_label = np.array([[1, 0], [1, 0], [1, 1], [0, 0]], np.float32)
    assert positive_weights("balanced", ["a", "b"], has_label).tolist() == pytest.approx(
        [1 / 3, 3]
    )
    rejects(
        "all or no training rows have the label a, b",
        positive_weights,
        "balanced",
        ["a", "b"],
        has_label[:2],
    )
    for says, settings in (
        ("positive_weights=some must be", {"positive_weights": "some"}),
        ("positive_weights=.* above 0", {"positive_weights": [1, -1]}),
        ("threshold=1.5 must be a number between 0 and 1", {"threshold": 1.5}),
        ("threshold=.* must be", {"threshold": [0.5, "x"]}),
    ):
        rejects(says, MultiLabelConfig, **settings)
    for setting in ("threshold", "positive_weights"):
        says = rf"task.{setting} has 2 numbers for 3 labels \(long, rude, warm\)"
        rejects(says, task_of, given(tmp_path / "run", f"task.{setting}=[0.5,0.5]"))


@pytest.mark.parametrize(
    ("table", "settings", "says"),
    [
        (
            "text,label\na,x|y\n",
            [],
            r"bad\.csv:2: label holds 'x\|y', not a list; data\.label_separator splits",
        ),
        (
            "text,label\na,x|z\nb,y\n",
            ["data.label_separator=|", "data.labels=[x,y]"],
            r"bad\.csv:2: unknown label z",
        ),
        (
            "text,x,y\na,1,0\nb,2,1\n",
            ["data.columns.label=[x,y]"],
            r"bad\.csv:3: x holds '2', not 0 or 1",
        ),
        (
            "text,x,y\na,1,0\nb,,1\n",
            ["data.columns.label=[x,y]"],
            r"bad\.csv:3: x holds '', not 0 or 1",
        ),
        ("text,label\na,x\n,y\n", ["data.label_separator=|"], r"bad\.csv:3: an empty text"),
        ("text,label\na,\nb,\n", ["data.label_separator=|"], "no row has a label"),
        ("text,label\na,x\n", ["data.label_separator=''"], r"data\.label_separator=? is empty"),
    ],
)
def test_bad_rows_are_named(given, tmp_path, table, settings, says):
    (tmp_path / "bad.csv").write_text(table)
    rejects(
        says, task_of, [*given(tmp_path / "run"), f"data.path={tmp_path / 'bad.csv'}", *settings]
    )
