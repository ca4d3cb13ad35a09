"""A polite end: who asks the run to stop leaves word, and the loop reads it once a step, on all ranks alike."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType

REPEAT_S = 2.0  # torchrun passes on the Ctrl-C that the terminal sent already: the same request within this time


class StopRequest:
    """Catches SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 while it is open; the second signal leaves at once.

    Other threads ask by `ask` and `ask_save`. A signal after their word is a first one: EC2, Slurm and torchrun send
    SIGTERM to what they gave notice to, and the run must not leave without the checkpoint that it stops for.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self) -> None:
        self.reason: str | None = None  # leave at the next step, with a checkpoint
        self.saves_soon: str | None = None  # save at the next step and go on
        self.signal: str | None = None  # the first one's name
        self.at_s = 0.0  # when it came
        self.lock = threading.RLock()  # not a Lock: a signal may interrupt this very thread while it holds it

    def __enter__(self) -> StopRequest:
        self.before = {number: signal.signal(number, self.handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def ask(self, reason: str) -> None:
        """Have the run leave at the next step. The first reason stays. From any thread."""
        with self.lock:
            self.reason = self.reason or reason

    def ask_save(self, reason: str) -> None:
        """Have the run save at the next step and go on. The first reason stays until `saved`. From any thread."""
        with self.lock:
            self.saves_soon = self.saves_soon or reason

    def saved(self) -> None:
        """The loop's word that it did."""
        with self.lock:
            self.saves_soon = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal is not None and now_s - self.at_s > REPEAT_S:
            sys.exit(128 + number)  # whatever is published stays valid: files are renamed when they are whole
        if self.signal is None:
            self.signal, self.at_s = signal.Signals(number).name, now_s
            self.ask(self.signal)


def leave_signals_to_the_parent(_worker: int) -> None:
    """For loader workers: schedulers and terminals signal every process of a job, but the rank decides what it means.

    A worker that died of the signal would fail the rank before it has saved. Workers end when their rank does.
    """
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
