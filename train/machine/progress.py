"""Progress lines on standard error for slow work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from train.machine.console import note

FIRST_S, EVERY_S = 1.5, 10.0  # seconds until the first line, and between lines


@dataclass
class Phase:
    name: str
    total: int | None = None  # the value of `done` at the end of the phase; None if unknown
    unit: str = "rows"  # "bytes" are shown in MB
    has_bar: bool = False  # on a terminal, a progress bar replaces the lines
    done: int = 0
    began_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        waited = f"{time.monotonic() - self.began_s:.0f} s"
        if not self.done:
            return f"{self.name} ({waited})"
        total = ""
        if self.total:
            total = f" of {self.amount(self.total)}, {self.done / self.total:.0%}"
        return f"{self.name}: {self.amount(self.done)}{total} ({waited})"

    def amount(self, number: int) -> str:
        if self.unit == "bytes":
            return f"{number / 1e6:,.1f} MB"
        return f"{number:,} {self.unit}"


_phase = Phase("starting")


def begin(phase: Phase) -> None:
    """Make `phase` the current one."""
    global _phase
    _phase = phase


def advance(count: int) -> None:
    """Add `count` to the current phase's `done`."""
    _phase.done += count


@contextmanager
def reported(*, speaks: bool = True) -> Iterator[None]:
    """While the block runs, print the current phase and its progress every few seconds, unless `speaks` is False."""
    ends = threading.Event()

    def report() -> None:
        wait_s = FIRST_S
        while not ends.wait(wait_s):
            wait_s = EVERY_S
            with suppress(OSError, ValueError):  # standard error may be closed or full
                if not (_phase.has_bar and sys.stderr.isatty()):
                    note(f"... {_phase}")

    thread = threading.Thread(target=report, name="progress", daemon=True)
    if speaks:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        if speaks:
            thread.join()
