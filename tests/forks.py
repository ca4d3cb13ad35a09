"""Programs that are run in forks of one process, which has loaded torch and all else that takes seconds each time.

All else is as if they had been started from the command line: arguments, environment, standard output, exit status. The
ranks of a launch are forks of torchrun, by its own options. Only what libraries read from the environment when they are
imported is that of the first program.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from services.process import free_port as free_port

ROOT = Path(__file__).parent.parent
NOWHERE = Path(os.devnull)
TORCHRUN = "torch.distributed.run"
DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # cuda: what trains does so on GPUs
HEAVY = [
    "torch",
    TORCHRUN,
    "hydra",
    "safetensors.torch",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.albert.modeling_albert",
    "torch_xla.distributed.parallel_loader",
    "datasets",
    "sklearn.metrics",
    "warm",
]
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(HEAVY)


def run_forked(
    words: list[str], env: Mapping[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run([sys.executable, "-m", *words], cwd=cwd, env=env)` returns."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = start_forked(words, env, out, err, cwd)
        process.join()
        return subprocess.CompletedProcess(
            words, process.exitcode, out.read_text(), err.read_text()
        )


def start_forked(
    words: list[str],
    env: Mapping[str, str],
    out: Path = NOWHERE,
    err: Path = NOWHERE,
    cwd: Path = ROOT,
) -> ForkServerProcess:
    """The same in the background; what it prints goes to files, or nowhere."""
    load()
    process = forks.Process(target=become, args=(words, dict(env), out, err, cwd))
    process.start()
    return process


class Forked:
    """A command of `train.api` in a fork: what it asks of a `subprocess.Popen` whose output is a pipe."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], output: int) -> None:
        assert command[1] == "-m" and output == subprocess.PIPE
        with tempfile.TemporaryDirectory() as folder:
            pipe = Path(folder) / "pipe"
            os.mkfifo(pipe)
            self.process = start_forked(command[2:], env, pipe, pipe, Path.cwd())
            self.stdout = pipe.open("rb")  # waits until the fork has opened it

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> None:
        self.process.join()

    terminate = wait  # the server of forks may tell of an end after the pipe does
    returncode = property(poll)


@functools.cache
def load() -> None:
    """Wait until all is loaded: whoever starts a program waits for what that does, not for this."""
    from pytest import MonkeyPatch  # late: forks import this module too

    first = forks.Process(target=fail_unless_warm)
    # where the server looks for `warm`, and never in the working folder
    with MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{Path(__file__).parent}")
        patch.setenv("PYTHONSAFEPATH", "1")
        first.start()
    first.join()
    assert first.exitcode == 0, "the server of forks has not loaded tests/warm.py"


def fail_unless_warm() -> None:
    sys.exit("warm" not in sys.modules)  # the server passes over what it cannot import


def become(words: list[str], env: dict[str, str], out: Path, err: Path, cwd: Path) -> None:
    """In the fork: be `python -m MODULE ...`, `python FILE.py ...` or `python -c CODE ...`."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # TMPDIR may be another one
    here = [] if env.get("PYTHONSAFEPATH") else [""]
    sys.path[0:0] = [*here, *env.get("PYTHONPATH", "").split(os.pathsep)]
    for path, number in ((out, 1), (err, 2)):
        is_open = number == 2 and path == out
        os.dup2(1 if is_open else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    if DEVICE == "cuda":  # cannot be opened in a fork
        os.execve(
            sys.executable, [sys.executable, *(words if words[0] == "-c" else ["-m", *words])], env
        )
    multiprocessing.set_start_method(None, force=True)  # which is that of the server else
    module, *sys.argv[1:] = words
    if module == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    elif module.endswith(".py"):
        runpy.run_path(module, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def launch(program: str, arguments: list[str], *, ranks: int, restarts: int = 0) -> list[str]:
    """The words of a torchrun on this machine that forks its ranks, of a module or a file."""
    if not program.endswith(".py"):
        result = importlib.util.find_spec(f"{program}.__main__" if program == "train" else program)
        assert result is not None and result.origin is not None
        program = result.origin
    options = [
        f"--nproc-per-node={ranks}",
        f"--max-restarts={restarts}",
        f"--master-port={free_port()}",
    ]
    if DEVICE == "cuda":
        return [
            TORCHRUN,
            *options,
            str(Path(__file__).parent / "sharing_gpus.py"),
            program,
            *arguments,
        ]
    return [TORCHRUN, *options, "--start-method=fork", "--run-path", program, *arguments]


# `baretrain train`, in which something happens before each loss.
CHANGED = """
import itertools, os, signal, sys, time
from train.tasks.mlm import MaskedLMTask
calls, before = itertools.count(1), MaskedLMTask.loss
def loss(self, *arguments):
    {}
    return before(self, *arguments)
MaskedLMTask.loss = loss
from train.__main__ import main
sys.exit(main())
"""


def start_changed(
    folder: Path, change: str, arguments: list[str], *, restarts: int = 0
) -> ForkServerProcess:
    """Start two ranks that do `change` before each loss. The file `err` in the folder gets what they print."""
    program = folder / "program.py"
    program.write_text(CHANGED.format(change))
    return start_forked(
        launch(str(program), arguments, ranks=2, restarts=restarts), os.environ, err=folder / "err"
    )
