"""What ends a command while it is still being imported: Ctrl-C, or a package that is missing, is one line."""

import os
import signal
import subprocess
import sys

import pytest
from running import ROOT

import train

INTERRUPT = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"


@pytest.fixture
def run_with(tmp_path):
    """Run a command that imports `content` in the place of a library that all of them need."""

    def run(command, content, **environment):
        (tmp_path / "yaml.py").write_text(content)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), **environment}
        words = [sys.executable, "-m", command]
        return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    return run


@pytest.mark.parametrize("command", ["train", "train.checkpoints"])
def test_an_interrupt_during_imports_is_one_line(run_with, command):
    done = run_with(command, INTERRUPT)
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, "interrupted\n", "")


def test_of_many_ranks_one_says_that_it_was_interrupted(run_with):
    done = run_with("train", INTERRUPT, RANK="1")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("content", ["raise RuntimeError('no')", "import train.none"])
def test_other_errors_keep_their_traceback(run_with, content):
    done = run_with("train.report", content)
    assert done.returncode == 1 and "Traceback" in done.stderr


@pytest.mark.parametrize("command", ["train", "train.prepare", "launch", "ami"])
def test_python_without_the_environment_is_one_line(command):
    words = [sys.executable, "-S", "-m", command]  # -S: without the packages of the environment
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "has no module " in line
    assert ".venv/bin/python" in line and "source .venv/bin/activate" in line


def test_importing_the_package_changes_nothing_for_others():
    assert sys.excepthook is not train.show
