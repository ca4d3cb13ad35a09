"""Parts that all commands share: help, version, exit codes, and one line for every error."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from running import ROOT
from test_bad_inputs import MAINS

import train
from train import __main__ as program
from train.config import Failure, InputError, Unreachable
from train.machine.torchrun import REJECTION, first_to, leave_rejection
from train.run.command import DONE, FAILED, INTERRUPTED, REJECTED, UNREAD, guarded


def shown(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit, match="0"):
        MAINS[command]([flag])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", MAINS)
def test_help_has_purpose_examples_and_exit_codes_and_the_version_is_ours(command, capsys):
    text = shown(command, "--help", capsys)
    under_torchrun = "-m train " if command == "train" else f"-m train {command} "
    _, purpose, examples, *_ = text.split("\n\n")
    assert len(purpose) > 20
    spelled = [
        line
        for line in examples.splitlines()
        if f"baretrain {command}" in line or under_torchrun in line
    ]
    assert len(spelled) == 3
    assert "exit codes:\n  0    " in text
    assert "hydra" not in text.lower() and "_schema" not in text
    assert shown(command, "--version", capsys) == f"baretrain {train.__version__}\n"


@pytest.mark.parametrize("command", ["train", "prepare", "records"])
def test_help_explains_the_most_used_settings_and_lists_the_groups(command, capsys):
    text = shown(command, "--help", capsys)
    group = "corpus=pydocs" if command == "prepare" else "optim=adamw"
    assert group in text and ("wiki_books" if command == "prepare" else "albert_v1") in text
    settings = text.split("most-used settings")[1].split("\n\n")[0].splitlines()[1:]
    assert len(settings) > 12
    unexplained = [line for line in settings if line[2] != " " and len(line.split(None, 1)) < 2]
    assert not unexplained


def raises(error: BaseException):
    def act() -> int:
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (InputError("seed=x"), REJECTED, "error: seed=x\n"),
        (Failure("no data"), FAILED, "error: no data\n"),
        (Unreachable("S3 is silent"), FAILED, "error: S3 is silent; try again later\n"),
        (
            PermissionError(13, "Permission denied", b"/data/x"),
            FAILED,
            "error: /data/x: Permission denied\n",
        ),
        (OSError("odd"), FAILED, "error: odd\n"),
        (KeyboardInterrupt(), INTERRUPTED, "interrupted\n"),
        (
            BrokenPipeError(32, "Broken pipe"),
            FAILED,
            "error: Broken pipe\n",
        ),  # not of standard output
        (InputError("two\nlines \x1b[31m"), REJECTED, "error: two lines \\x1b[31m\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_whatever_goes_wrong_is_one_line_and_an_exit_code(error, code, says, capsys):
    assert guarded(raises(error)) == code
    assert capsys.readouterr().err == says


def test_a_mistake_of_the_program_has_its_traceback_and_a_line(capsys):
    assert guarded(raises(KeyError("x"))) == FAILED
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and "report it" in lines[-1]


def test_a_rank_that_fails_later_waits_until_the_first_has_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "0").mkdir()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0/error.json"))
    codes: list[int] = []
    later = threading.Thread(target=lambda: codes.append(guarded(raises(InputError("seed=x")))))
    with first_to("report") as is_first:
        assert is_first
        later.start()
        later.join(0.3)
        assert not codes  # once one rank has exited, torchrun ends the others
    later.join()
    assert codes == [REJECTED] and not capsys.readouterr().err


def test_the_first_rejection_is_left_to_the_program_that_started_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0/error.json"))
    leave_rejection("seed=x")
    leave_rejection("seed=y")
    assert (tmp_path / REJECTION).read_text() == "seed=x"


def start(
    words: list[str],
    cwd: Path,
    *,
    flags: tuple[str, ...] = (),
    stdout: Any = subprocess.PIPE,
    **environ: str,
):
    """A process of its own, with nothing in its environment but what is given."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ}
    command = [sys.executable, *flags, "-m", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, stdout=stdout, stderr=pipe)


def unread():
    """A pipe whose reader has left, as of `| head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    return os.fdopen(write_end, "w")  # closing flushes, as Python does at exit


@pytest.mark.parametrize(
    ("length", "code", "expected"),
    [
        (10, DONE, UNREAD),
        (10**6, DONE, UNREAD),
        (10, FAILED, FAILED),
    ],  # a long text is flushed before the end
)
def test_a_reader_that_leaves_hides_no_error_and_is_none(length, code, expected, capfd):
    with unread() as stream, redirect_stdout(stream):
        assert guarded(lambda: print("x" * length) or code) == expected
    assert capfd.readouterr().err == ""


# ---- where it runs -------------------------------------------------------------------------------------------------

SMALL = [
    "model=albert_tiny",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.embedding_size=16",
]
SMALL += [
    "model.num_heads=2",
    "max_steps=1",
    "global_batch_size=8",
    "data.num_workers=0",
    "telemetry.trackers=[]",
]
SMALL += ["backend.device=cpu", "backend.precision=fp32", "eval_examples=8", "checkpoint.every=1"]


@pytest.mark.slow
def test_a_run_needs_no_asserts_no_home_and_no_folder_of_its_own(prepared, tmp_path):
    """As `python -O` in somebody's folder, where HOME is not set: rejected, and run."""
    (tmp_path / "conf").mkdir()  # somebody's own
    (tmp_path / "conf" / "train.yaml").write_text("max_steps: 1000000\n")
    words = ["train", *SMALL, f"data.path={prepared}"]
    run, rejected = (
        start([*words, *own], tmp_path, flags=("-O",))
        for own in (["run_dir=run"], ["run_dir=b", "task.kind=qa"])
    )
    out, err = run.communicate(timeout=90)
    assert run.returncode == DONE, out + err
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    _, err = rejected.communicate(timeout=90)
    assert (
        rejected.returncode == REJECTED
        and err.startswith("error: task.kind=qa")
        and err.count("\n") == 1
    )


SECRETS = [
    f"http://user:{password}@host"
    for password in ("SECRET", "pa=SECRET", "pa,SECRET", "pa'SECRET")
]
SECRETS += ["[http://u:SECRET@h]", "http://host/?key=SECRET", "http://host/#SECRET"]


@pytest.mark.parametrize("endpoint", SECRETS)
def test_no_rejection_repeats_a_password(endpoint, capsys):
    for override in (
        f"s3.endpoint={endpoint}",
        f"s3.endpoint='{endpoint}'",
        f"+s3.endpoint={endpoint}",
    ):
        assert (
            MAINS["train"](
                ["run_dir=x", "max_steps=1", "micro_batch_size=1", "data.path=d", override]
            )
            == REJECTED
        )
        assert "SECRET" not in capsys.readouterr().err


# ---- what ends a command while it is still being imported ------------------------------------------------------------


def test_an_interrupt_during_imports_is_one_line(tmp_path):
    """In the place of a library that all commands need there is one that is interrupted."""
    (tmp_path / "yaml.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    words = [sys.executable, "-m", "train", "prepare"]
    done = subprocess.run(
        words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, "interrupted\n", "")


@pytest.mark.parametrize("command", ["train report", "launch", "ami"])
def test_python_without_the_environment_is_one_line(command):
    # -S: without the packages of the environment
    words = [
        sys.executable,
        "-S",
        "-m",
        *command.split(),
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "has no module " in line
    assert ".venv/bin/python" in line and "source .venv/bin/activate" in line


def test_the_flag_quiet_may_stand_before_the_command(monkeypatch, capsys):
    given = []
    monkeypatch.setattr(program, "run", lambda command, words: given.append((command, words)) or 0)
    assert program.main(["--quiet", "records", "data.path=x"]) == 0
    assert program.main(["--quiet", "run_dir=x"]) == 0
    assert given == [("records", ["data.path=x", "--quiet"]), ("train", ["run_dir=x", "--quiet"])]
    assert program.main(["--quiet", "trian"]) == 2
    assert "no command trian" in capsys.readouterr().err
