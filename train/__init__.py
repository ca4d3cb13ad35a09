"""The training code of baretrain. Start reading at `train/loop.py`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType

from train.machine.console import begin_program, say, trace_of
from train.machine.home import settle

__version__ = "0.1.0"


def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report the error that ends the program."""
    # Ctrl-C (even while torch is being imported) and a missing package get one line instead of a traceback.
    if isinstance(error, ModuleNotFoundError):
        missing = error.name or ""
    else:
        missing = ""
    if missing and missing.split(".")[0] not in ("train", "launch", "ami", "conf"):
        how = (
            "use .venv/bin/python, or first `source .venv/bin/activate` (make setup creates .venv)"
        )
        say(f"error: {sys.executable} has no module {missing}: {how}", file=sys.stderr)
    elif not issubclass(kind, KeyboardInterrupt):
        sys.stderr.write(f"{trace_of(error.with_traceback(trace))}\n")
    elif os.environ.get("RANK", "0") == "0":
        say("interrupted", file=sys.stderr)


def begin() -> None:
    """Prepare this process for a command before torch is imported: output, errors, and idle OpenMP threads that sleep.

    Raises SystemExit if the working folder is gone: neither relative paths nor libraries would work.

    GNU OpenMP's idle threads spin 300,000 times by default, which keeps cores busy: two runs on two cores fell to a
    third of their speed (benchmarks/notes.md). https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    begin_program()
    sys.excepthook = show
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"
    settle(os.environ)
    try:
        Path.cwd()
    except OSError as error:
        what = "the working folder cannot be used: cd to another one"
        say(f"error: {what} ({error.strerror})", file=sys.stderr)
        raise SystemExit(2) from error


# `python -m` is about to run a command; an import by another program has no effect
if sys.argv[:1] == ["-m"]:
    begin()
