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

EXAMPLE = re.compile(r"`([\w/.]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)  # path and content
TABLES = {  # file: (old text, new text)
    "train/tasks/__init__.py": [
        ("import classify, mlm, multilabel,", "import classify, focal, mlm, multilabel,"),
        ('    "qa": qa.SPEC,\n', '    "qa": qa.SPEC,\n    "focal": focal.SPEC,\n'),
    ],
    "train/parallel/optimizers.py": [
        ("import adamw, lamb\n", "import adamw, lamb, sgd\n"),
        ('    "lamb": lamb.SPEC,\n', '    "lamb": lamb.SPEC,\n    "sgd": sgd.SPEC,\n'),
    ],
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
    for name, content in files.items():
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
