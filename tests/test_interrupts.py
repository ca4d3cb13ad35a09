"""Ctrl-C while a command is still being imported, which takes seconds, is one line as well."""

import os
import signal
import subprocess
import sys

import pytest
from running import ROOT

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


@pytest.mark.parametrize("command", ["train", "train.prepare", "train.report", "train.checkpoints"])
def test_an_interrupt_during_imports_is_one_line(run_with, command):
    done = run_with(command, INTERRUPT)
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, "interrupted\n", "")


def test_of_many_ranks_one_says_that_it_was_interrupted(run_with):
    done = run_with("train", INTERRUPT, RANK="1")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_other_errors_keep_their_traceback(run_with):
    done = run_with("train.report", "raise RuntimeError('no')")
    assert done.returncode == 1 and "Traceback" in done.stderr and "RuntimeError: no" in done.stderr


def test_importing_the_package_changes_nothing_for_others():
    code = "import sys; before = sys.excepthook; import train; assert sys.excepthook is before"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
