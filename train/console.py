"""Standard output and error that cannot end the run: what nobody takes (a full disk, `| head`) is dropped."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Console(io.FileIO):
    """A file descriptor that always takes what is written to it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)  # None: a full pipe that does not wait
        except OSError:
            return len(data)


def use_console(*names: str) -> None:
    """For the beginning of what has more to do than to print to these streams, stdout or stderr. Python's own flush at
    exit, which would change the exit code, succeeds as well.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:  # closed by whoever started it: no file may get its number
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
    """What C++ libraries print on standard output inside goes nowhere, and what other threads do."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
