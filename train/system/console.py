"""Standard output and error that cannot end a run: what cannot be written (a full disk, `| head`) is dropped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class Console:
    """A stream whose writes always succeed, and whose flush at exit does, which would change the exit code."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def use_console(*names: str) -> None:
    """Make writes to these streams ("stdout", "stderr") always succeed. Programs whose purpose is more than their
    output call it when they begin.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # a standard stream was closed: no file may get its number
        pass
    os.close(handle)
    for name in (each for each in names if not isinstance(getattr(sys, each), Console)):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115
        setattr(sys, name, Console(stream))


@contextmanager
def without_stdout() -> Iterator[None]:
    """Drop what is printed on standard output meanwhile, by C++ libraries too, and by all threads."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
