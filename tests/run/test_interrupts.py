"""What ends a command while it is still being imported: Ctrl-C, or a package that is missing, is one line."""

import os
import signal
import subprocess
import sys

import pytest
from running import ROOT

import train


def test_an_interrupt_during_imports_is_one_line(tmp_path):
    """In the place of a library that all commands need there is one that is interrupted."""
    (tmp_path / "yaml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [sys.executable, "-m", "train.prepare"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=90)
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, "interrupted\n", "")


@pytest.mark.parametrize(
    ("error", "rank", "says"),
    [
        (KeyboardInterrupt(), "0", "interrupted\n"),
        (KeyboardInterrupt(), "1", ""),  # of many ranks one says it
        (RuntimeError("no"), "1", "RuntimeError: no\n"),
        (ModuleNotFoundError("none of ours", name="train.none"), "0", "ModuleNotFoundError: none of ours\n"),
    ],
)
def test_an_interrupt_is_said_once_and_other_errors_keep_their_report(monkeypatch, capsys, error, rank, says):
    monkeypatch.setenv("RANK", rank)
    train.show(type(error), error, None)
    assert capsys.readouterr().err == says
    assert sys.excepthook is not train.show  # importing the package changes nothing for others


@pytest.mark.parametrize("command", ["train", "launch", "ami"])
def test_python_without_the_environment_is_one_line(command):
    words = [sys.executable, "-S", "-m", command]  # -S: without the packages of the environment
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "has no module " in line
    assert ".venv/bin/python" in line and "source .venv/bin/activate" in line
