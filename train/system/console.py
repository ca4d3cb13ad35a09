"""Standard output and error that cannot end a run: text that cannot be written (full disk, `| head`) is dropped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class Console:
    """A stream whose writes and flushes always succeed: a failed flush at exit would change the exit code."""

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
    """Make writes to these streams ("stdout", "stderr") always succeed, for programs that do more than print."""
    for name in (each for each in names if not isinstance(getattr(sys, each), Console)):
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115
        setattr(sys, name, Console(stream))


@contextmanager
def without_stdout() -> Iterator[None]:
    """Drop everything that this process prints to standard output in the block, from any thread or C++ library."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
