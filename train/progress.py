"""Lines on standard error while long work goes on, for logs and for people who wait."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

FIRST_S, EVERY_S = 1.5, 10.0  # until the first line, and between lines


@dataclass
class Stage:
    name: str
    total: int | None = None  # of what `advance` counts, if it is known
    unit: str = "rows"  # or bytes
    has_bar: bool = False  # on terminals, where it takes the place of lines
    done: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        waited = f"{time.monotonic() - self.began_s:.0f} s"
        if not self.done:
            return f"{self.name} ({waited})"
        total = "" if self.total is None else f" of {self.amount(self.total)}"
        return f"{self.name}: {self.amount(self.done)}{total} ({waited})"

    def amount(self, number: int) -> str:
        return f"{number / 1e6:,.1f} MB" if self.unit == "bytes" else f"{number:,} {self.unit}"


_stage = Stage("starting")


def begin(stage: Stage) -> None:
    """What this process does from now on."""
    global _stage
    _stage = stage


def advance(count: int) -> None:
    """So much more of the stage is done."""
    _stage.done += count


@contextmanager
def reported(*, speaks: bool = True) -> Iterator[None]:
    """While this lasts, a line says every few seconds which stage is on and how far it is, if this process `speaks`."""
    ends = threading.Event()

    def report() -> None:
        wait_s = FIRST_S
        while not ends.wait(wait_s):
            wait_s = EVERY_S
            with suppress(OSError, ValueError):  # a closed or full standard error stops no work
                if not (_stage.has_bar and sys.stderr.isatty()):
                    print(f"... {_stage}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=report, name="progress", daemon=True)
    if speaks:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        if speaks:
            thread.join()
