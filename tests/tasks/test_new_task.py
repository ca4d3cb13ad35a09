"""What a new task and a new optimizer cost: the worked example of CONTRIBUTING.md, added to a copy of the tree."""

import json
import os
import re
import shutil

import pytest
from finetuning import tuning
from forks import launch, run_forked
from run_results import losses
from running import ROOT, lines
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from train.checkpoints.manifest import step_name

EXAMPLE = re.compile(r"`([\w/.]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)  # path and content
TABLES = {  # file: (old text, new text)
    "train/tasks/__init__.py": [
        ("import classify, mlm, ner, qa\n", "import classify, focal, mlm, ner, qa, rating\n"),
        ('    "qa": qa.SPEC,\n', '    "qa": qa.SPEC,\n    "focal": focal.SPEC,\n    "rating": rating.SPEC,\n'),
    ],
    "train/parallel/optimizers.py": [
        ("import adamw, lamb\n", "import adamw, lamb, sgd\n"),
        ('    "lamb": lamb.SPEC,\n', '    "lamb": lamb.SPEC,\n    "sgd": sgd.SPEC,\n'),
    ],
}
RATING = {  # a task whose targets are numbers: the files of a package
    "conf/task/rating.yaml": "defaults: [rating_schema]\n",
    "train/tasks/rating/__init__.py": """
from dataclasses import dataclass

from train.config import HeadSize, TaskConfig
from train.tasks.spec import LOSS, Metric, TaskSpec


@dataclass(kw_only=True)
class RatingConfig(TaskConfig):
    kind: str = "rating"

    def head_size(self, seq_len, labels=0):
        return HeadSize(labels=1)


SPEC = TaskSpec(
    settings=RatingConfig,
    module="train.tasks.rating.task",
    head="SequenceClassification",
    problem_type="regression",
    metrics=(Metric("mse", higher_is_better=False), LOSS),
    pipeline="text-classification",
    sentence="It rates a text.",
    example='"A text."',
    does="rates texts",
    inputs={"text": "to rate"},
)
""",
    "train/tasks/rating/task.py": """
import numpy as np
import torch
from datasets import Value

from train.data.files.errors import BadRow
from train.data.records.featurizer import Featurizer
from train.data.records.kinds import STRING, RowKind
from train.data.records.table_facts import column
from train.system.samples import Answer, Guess, Sample, excerpt
from train.tasks.finetune import TextTask, mean_loss


def read_score(value, texts, is_learnt):
    try:
        return float(value)
    except (TypeError, ValueError):
        raise BadRow(f"{value!r:.40} is no number") from None


class RatingFeaturizer(Featurizer):
    kind = RowKind(
        "rating",
        columns={"text": STRING, "label": Value("float32")},
        read=lambda row: {"text": row.text("text")},
        target="label",
        read_target=read_score,
        split_by="text",
        tokens={"score": Value("float32")},
    )

    def features(self, rows, indices, *, split):
        encoded = self.encode(rows["text"], truncation=True).encodings
        self.count_cut(split, encoded, rows["text"])
        return {**self.columns(split, encoded, indices), "score": rows.get("label", [0.0] * len(indices))}


class Rating(TextTask):
    columns = {"labels": "score"}
    outputs = ["rating"]
    metric_names = ("loss", "mse")
    csv_columns = ["id", "prediction"]

    def __init__(self, cfg, sizes):
        super().__init__(cfg, sizes)
        self.featurizer = RatingFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len)

    def errors(self, logits, inputs):
        assert inputs["labels"].dtype == torch.float32
        is_known, scores = ~inputs["labels"].isnan(), logits.float().squeeze(-1)
        return scores, torch.where(is_known, scores - inputs["labels"].nan_to_num(), 0.0).square()

    def loss_of(self, logits, inputs):
        return self.errors(logits, inputs)[1].sum()

    def statistics(self, logits, inputs):
        return torch.stack(self.errors(logits, inputs)[::-1], -1)

    def evaluate(self, examples, features, statistics):
        return {"loss": mean_loss(statistics), **self.score(column(features, "score"), statistics[:, 1])}

    def score(self, truth, predicted):
        return {"mse": float(np.square(np.subtract(truth, predicted)).mean())}

    def results(self, split, examples, features, statistics):
        return {}, {}

    def predictions(self, rows, features, statistics):
        for row, score in zip(rows, statistics[:, 1].tolist(), strict=True):
            yield {"id": row["id"], "prediction": score}

    def known(self, row, prediction):
        return None if row.get("label") is None else (row["label"], prediction["prediction"])

    def sample(self, row, prediction):
        apart = abs(row["label"] - prediction["prediction"])
        guess = Guess(str(prediction["prediction"]), 1.0)
        return Sample(excerpt(row["text"]), [Answer(str(row["label"]), [guess], float(apart < 0.1))])


TASK = Rating
""",
}
START = """
import os, runpy, sys
sys.path.insert(0, {tree!r})
os.chdir({tree!r})
runpy.run_module(os.environ["MODULE"], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of train and conf with the files of the example and its lines in the tables."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("train", "conf"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = dict(EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text()))
    assert sorted(files) == [
        "conf/optim/sgd.yaml",
        "conf/task/focal.yaml",
        "train/parallel/sgd.py",
        "train/tasks/focal/__init__.py",
        "train/tasks/focal/task.py",
    ]
    for name, content in (files | RATING).items():
        assert not (folder / name).exists()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    for name, changes in TABLES.items():
        text = (folder / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{name} has no line {old}"
            text = text.replace(old, new)
        (folder / name).write_text(text)
    (folder / "start.py").write_text(START.format(tree=str(folder)))
    return folder


def run(tree, *arguments, module="train", ranks=1):
    program = str(tree / "start.py")
    words = ["-c", (tree / "start.py").read_text(), *arguments]
    if ranks > 1:
        words = launch(program, list(arguments), ranks=ranks)
    done = run_forked(words, {**os.environ, "MODULE": module})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def settings(prepared, tmp_path_factory):
    data = [
        "data=tweets",
        f"data.path={ROOT / 'tests/inputs/tweets.csv'}",
        "data.validation_fraction=0.3",
        "seq_len=64",
    ]
    data += ["data.lengths=[32]"]  # by default they differ between devices
    given = ["task=focal", "task.gamma=1", "optim=sgd", "optim.momentum=0.8", "optim.lr=0.1", *data]
    given += ["optim.schedule=constant"]  # on XLA a rate that is a Python number is one more graph
    given += ["max_steps=4", "eval_every=2", "watchdog.step_s=0"]
    return tuning(tmp_path_factory.mktemp("cache") / "run", prepared / "tokenizer", *given)


@pytest.fixture(scope="module")
def trained(tree, settings, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "two"
    run(tree, *settings, f"run_dir={run_dir}", ranks=2)
    return run_dir


def test_a_task_that_resembles_none_is_a_package_a_line_and_a_yaml():
    """Nothing else knows of named entities than the recipes that train on them."""
    names = re.compile(r"\bner(_schema)?\b|\bNER|TokenClassif")
    files = (path for folder in ("train", "launch", "conf") for path in (ROOT / folder).rglob("*"))
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files if path.suffix in (".py", ".yaml", ".j2")}
    found = {name for name, text in texts.items() if names.search(text) and not name.startswith("conf/experiment/")}
    package = {name for name in found if name.startswith("train/tasks/ner/")}
    assert package and found == {*package, "train/tasks/__init__.py", "conf/task/ner.yaml"}
    lines = [line for line in texts["train/tasks/__init__.py"].splitlines() if "ner" in re.split(r"\W+", line)]
    assert len(lines) == 2  # the import, and the line of the table


def test_it_learns_on_two_ranks_and_on_xla_as_on_one(tree, settings, trained, tmp_path):
    run(tree, *settings, f"run_dir={tmp_path / 'one'}")
    for kind, keys in (("train", ("loss", "grad_norm")), ("eval", ("loss", "accuracy"))):
        one, two = ([[line[key] for key in keys] for line in lines(r, kind)] for r in (tmp_path / "one", trained))
        assert len(one) == (4 if kind == "train" else 2) and one != one[:1] * len(one)
        for ours, theirs in zip(one, two, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
    pytest.importorskip("torch_xla")
    run(tree, *settings, "backend=xla", "backend.device=cpu", f"run_dir={tmp_path / 'xla'}")
    assert losses(tmp_path / "xla") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_its_checkpoint_is_exported_and_asked(tree, trained, tmp_path):
    run(tree, str(trained), "export", str(tmp_path / "out"), module="train.checkpoints")
    answer = run(tree, str(trained), "--text", "x", "--device", "cpu", module="train.predict")
    assert set(json.loads(answer)["probabilities"]) == {"0", "1", "2"}
    weights = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", trained / "export")]
    assert weights[0] == weights[1]
    card = (trained / "export/README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "| Optimizer | sgd |" in card


def test_a_task_whose_targets_are_numbers_is_a_package_a_line_and_a_yaml(tree, prepared, tmp_path):
    """The rate is far too high, so that errors rise and fall: the best evaluation is the lowest, and not the last."""
    rows = [(" ".join(["in"] * (1 + row % 7) + [f"n{row}"]), row % 7 / 2 - 2.7) for row in range(60)]
    (tmp_path / "rated.csv").write_text("text,label\n" + "".join(f"{text},{score}\n" for text, score in rows))
    (tmp_path / "bad.csv").write_text("text,label\na,0.5\nb,many\n")
    data = ["task=rating", "data=records", "data.validation_fraction=0.3", "seq_len=32", "data.lengths=[16]"]
    given = ["best.metric=mse", "best.export=true", "checkpoint.best=true", "eval_every=1", "max_steps=6"]
    given += ["optim.schedule=constant", "optim.lr=0.3", "watchdog.step_s=0", *data]
    tuned = lambda name, *more: tuning(tmp_path / name, prepared / "tokenizer", *given, *more)  # noqa: E731
    run(tree, *tuned("two", f"data.path={tmp_path / 'rated.csv'}"), ranks=2)
    scores = {line["step"]: line["mse"] for line in lines(tmp_path / "two", "eval")}
    lowest = min(scores, key=scores.get)
    evaluation = json.loads((tmp_path / "two/evaluation.json").read_text())
    assert lowest < 6 and (tmp_path / "two/checkpoints" / step_name(lowest)).is_dir(), scores
    assert (evaluation["step"], evaluation["splits"]["validation"]["mse"]) == (lowest, scores[lowest])
    assert all(line["loss"] == pytest.approx(line["mse"], rel=1e-5) for line in lines(tmp_path / "two", "eval"))

    table = run(tree, str(tmp_path / "two"), "--input", str(tmp_path / "rated.csv"), module="train.predict")
    answers = [json.loads(line)["prediction"] for line in table.splitlines()]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "two/export").eval()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "two/export")([rows[5][0]], return_tensors="pt")
    assert model.config.problem_type == "regression" and model.config.id2label == {0: "rating"}
    assert answers[5] == pytest.approx(model(**tokens).logits.item(), rel=1e-4)
    with pytest.raises(AssertionError, match="'many' is no number"):
        run(tree, *tuned("bad", f"data.path={tmp_path / 'bad.csv'}"))
