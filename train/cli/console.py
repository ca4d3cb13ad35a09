"""Standard output and error that cannot end a run: what cannot be written (a full disk, `| head`) is dropped."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Console(io.FileIO):
    """A file whose writes always succeed."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)  # None: a full pipe in non-blocking mode
        except OSError:
            return len(data)


def use_console(*names: str) -> None:
    """Make writes to these streams ("stdout", "stderr") always succeed, and Python's flush at exit too, whose failure
    would change the exit code. Programs whose purpose is more than their output call it when they begin.
    """
    while (
        handle := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # a standard stream was closed: no other file may get its number
        pass
    os.close(handle)
    for handle, name in ((1, "stdout"), (2, "stderr")):
        if name not in names:
            continue
        before = getattr(sys, name)
        raw = Console(handle, "w", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=before.encoding if before else "utf-8",
            errors="backslashreplace",
            line_buffering=name == "stderr" or raw.isatty(),
        )
        if before:
            before.flush()
        setattr(sys, name, stream)


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
