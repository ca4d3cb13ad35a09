"""A polite end: signals that ask the run to stop set a flag, which the loop reads once a step, on all ranks alike."""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

REPEAT_S = 2.0  # torchrun passes on the Ctrl-C that the terminal sent already: the same request within this time


class StopRequest:
    """Catches SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 while it is open; the second request leaves at once."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self.reason: str | None = None
        self.at_s = 0.0

    def __enter__(self) -> StopRequest:
        self.before = {number: signal.signal(number, self.handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.reason is not None and now_s - self.at_s > REPEAT_S:
            sys.exit(128 + number)  # whatever is published stays valid: files are renamed when they are whole
        if self.reason is None:
            self.reason, self.at_s = signal.Signals(number).name, now_s


def leave_signals_to_the_parent(_worker: int) -> None:
    """For loader workers: schedulers and terminals signal every process of a job, but the rank decides what it means.

    A worker that died of the signal would fail the rank before it has saved. Workers end when their rank does.
    """
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
