"""What a new task, metric, optimizer and schedule cost: a file outside of the tree, docs/focal.py, for --import."""

import json
import os
import re
import subprocess
import sys

import pytest
from finetuning import tuning
from forks import launch, run_forked
from rejections import rejects
from run_results import losses
from running import ROOT, lines

from train.parallel.optim import OPTIMIZERS, SCHEDULES
from train.run import help as settings_help
from train.run import own
from train.storage import imported
from train.tasks import TASKS

# In the same file for all runs: as this variable says, a rank dies before one of its losses.
DIES = """
import itertools, os, signal
calls, loss_of = itertools.count(1), Focal.loss_of
def dying(self, *arguments):
    if os.environ.get("DIES") == f"{os.environ.get('RANK')}:{next(calls)}":
        os.kill(os.getpid(), signal.SIGKILL)
    return loss_of(self, *arguments)
Focal.loss_of = dying
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    path = tmp_path_factory.mktemp("mine") / "focal.py"
    path.write_text((ROOT / "docs/focal.py").read_text() + DIES)
    return path


def run(arguments, *, module="train", ranks=1, **env):
    words = list(arguments) if module == "train" else [module, *arguments]
    if ranks > 1:
        return run_forked(launch("train", words, ranks=ranks), {**os.environ, **env})
    return run_forked(["train", *words], {**os.environ, **env})


def done(*arguments, **how):
    ended = run(arguments, **how)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def settings(prepared, tmp_path_factory):
    tweets = ROOT / "tests/inputs/tweets.csv"
    data = ["data=tweets", f"data.path={tweets}", "data.validation_fraction=0.3", "seq_len=64"]
    data += ["data.lengths=[32]"]  # by default they differ between devices
    given = [
        "task=focal",
        "task.gamma=1",
        "optim=sgd",
        "optim.momentum=0.8",
        "optim.lr=0.1",
        *data,
    ]
    given += ["max_steps=4", "eval_every=2", "checkpoint.every=2", "watchdog.step_s=0"]
    return tuning(tmp_path_factory.mktemp("cache") / "run", prepared / "tokenizer", *given)


@pytest.fixture(scope="module")
def trained(code, settings, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "two"
    done(f"--import={code}", *settings, "optim.schedule=steps", f"run_dir={run_dir}", ranks=2)
    return run_dir


@pytest.mark.slow
def test_it_learns_on_two_ranks_and_on_xla_as_on_one(code, settings, trained, tmp_path):
    done("--import", str(code), *settings, "optim.schedule=steps", f"run_dir={tmp_path / 'one'}")
    for kind, keys in (
        ("train", ("loss", "grad_norm", "lr")),
        ("eval", ("loss", "accuracy", "kappa")),
    ):
        one, two = (
            [[line[key] for key in keys] for line in lines(r, kind)]
            for r in (tmp_path / "one", trained)
        )
        assert len(one) == (4 if kind == "train" else 2) and one != one[:1] * len(one)
        for ours, theirs in zip(one, two, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
    assert [line["lr"] for line in lines(trained, "train")] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01]
    )
    pytest.importorskip("torch_xla")
    # There a rate that is a Python number is one more graph.
    constant = [f"--import={code}", *settings, "optim.schedule=constant", "max_steps=2"]
    for name, device in (("xla", ["backend=xla", "backend.device=cpu"]), ("constant", [])):
        done(*constant, *device, f"run_dir={tmp_path / name}")
    assert losses(tmp_path / "xla") == pytest.approx(losses(tmp_path / "constant"), rel=1e-3)


def test_a_killed_run_resumes_with_the_same_file_alone(code, settings, trained, tmp_path):
    command = [*settings, "optim.schedule=steps", f"run_dir={tmp_path / 'run'}"]
    assert run([f"--import={code}", *command], ranks=2, DIES="1:4").returncode != 0
    assert [line["step"] for line in lines(tmp_path / "run", "train")] == [1, 2, 3]
    written = (tmp_path / "run/metrics.jsonl").read_bytes()

    def rejected(*arguments, module="train"):
        ended = run(arguments, module=module)
        assert (ended.returncode, ended.stderr.count("error: ")) == (2, 1), ended.stderr
        return ended.stderr.strip().splitlines()[-1]

    missing = f"error: {tmp_path / 'run'} belongs to a run with --import focal.py; repeat the flag with the file's path"
    assert "there is no such" in rejected(*command)
    assert rejected(str(tmp_path / "run"), "--text", "x", module="predict") == missing
    (tmp_path / "focal.py").write_text(
        code.read_text().replace("self.cfg.gamma", "(self.cfg.gamma + 1)")
    )
    changed = rejected(f"--import={tmp_path / 'focal.py'}", *command)
    assert (
        "belongs to another run (--import focal.py: " in changed and "resume.force=true" in changed
    )
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == written

    done(f"--import={code}", *command, ranks=2)
    assert losses(tmp_path / "run")[-2:] == losses(trained)[-2:]
    environment = json.loads((tmp_path / "run/environment.json").read_text())
    assert environment["identity"]["--import focal.py"] == imported.sha256_bytes(code.read_bytes())


def test_its_checkpoint_is_exported_and_asked(code, trained, tmp_path):
    own_code = f"--import={code}"
    done(
        str(trained),
        "export",
        str(tmp_path / "out"),
        "--step=4",
        own_code,
        module="checkpoints",
    )
    answer = done(own_code, str(trained), "--text", "x", "backend.device=cpu", module="predict")
    assert set(json.loads(answer)["probabilities"]) == {"0", "1", "2"}
    weights = [
        (folder / "model.safetensors").read_bytes()
        for folder in (tmp_path / "out", trained / "export")
    ]
    assert weights[0] == weights[1]
    card = (trained / "export/README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "| Optimizer | sgd |" in card


def test_its_scores_are_compared_with_its_file_alone(code, trained):
    compare = f"from train import api; table = api.compare({str(trained)!r}, imports=IMPORTS)"
    for imports, shows in (([], False), ([str(code)], True)):
        script = f"IMPORTS = {imports}; {compare}; print('kappa' in table)"
        said = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
        assert said.stdout.decode().strip() == str(shows), said.stderr
    page = done(f"--import={code}", str(trained), module="report")
    assert "kappa" in page and "is not known" not in page


def test_its_options_are_those_of_the_command_line(code):
    """Its own defaults win over a recipe's, as those of a YAML file do."""
    recipe = ["experiment=tweets_trainium", "data.path=x", "model.pretrained=x", "optim=sgd"]
    assert re.search(
        "^optim:(\n  .*)*\n  lr: 0.01$", done(f"--import={code}", *recipe, "--cfg", "job"), re.M
    )
    assert re.search(r"task=mlm.*\| focal", done(f"--import={code}", "--help"))


@pytest.fixture
def no_code(monkeypatch):
    """Tables that are as they were after the test."""
    monkeypatch.setattr(imported, "IMPORTED", {})
    for table in (TASKS, OPTIMIZERS, SCHEDULES, settings_help.OWN_OPTIONS):
        for name in list(table):
            monkeypatch.setitem(table, name, table[name])
    yield
    settings_help.groups.cache_clear()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nimport nix", r"line 2: ModuleNotFoundError: No module named 'nix'"),
        ("x = (", r"line 1: SyntaxError: "),
        ("x = 1", r"it has no table; define one of TASKS, OPTIMIZERS, SCHEDULES"),
        ("TASKS = [1]", r"TASKS must be a table"),
        ("TASKS = {'a': 3}", r"TASKS: a must be of type TaskSpec, not 3"),
        ("SCHEDULES = {'linear': max}", r"SCHEDULES: optim.schedule=linear exists already"),
        (
            "from train.tasks import TASKS as KNOWN\nTASKS = {'a': KNOWN['classify']}",
            r"TASKS: ClassifyConfig must have kind: str",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_rejected_in_a_line(no_code, tmp_path, text, said):
    (tmp_path / "mine.py").write_text(text)
    rejects(f"^--import {tmp_path / 'mine.py'}: {said}", own.take, str(tmp_path / "mine.py"))


def test_names_of_files_are_told_apart(no_code, tmp_path):
    rejects("there is no file", own.take, str(tmp_path / "no.py"))
    rejects("must be a Python file", own.take, "package.module")
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text("SCHEDULES = {'mine': max}")
    own.take(str(tmp_path / "a/mine.py"))
    own.take(str(tmp_path / "a/mine.py"))  # once more is the same
    rejects("have the same file name; rename one of them", own.take, str(tmp_path / "b/mine.py"))
    SCHEDULES.pop("mine")
