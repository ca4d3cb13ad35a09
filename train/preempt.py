"""A polite end: who asks the run to stop leaves word, and the loop reads it once a step, on all ranks alike."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 5.0  # from a second signal on, for the main thread to leave by itself
REPEAT_S = 2.0  # torchrun passes on the Ctrl-C that the terminal sent already: the same request within this time


class StoppedEarly(BaseException):
    """A signal while there was nothing to save yet: the run is as it was, and the same command goes on."""


class StopRequest:
    """Catches SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and, unless it is ignored (nohup), SIGHUP while it is open; the second
    signal leaves at once. So it does in a call that waits for other ranks, where Python's handlers do not come to
    their turn: there a thread ends the process.

    Other threads ask by `ask` and `ask_save`. A signal after their word is a first one: EC2, Slurm and torchrun send
    SIGTERM to what they gave notice to, and the run must not leave without the checkpoint that it stops for.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

    def __init__(self) -> None:
        self.reason: str | None = None  # leave at the next step, with a checkpoint
        self.saves_soon: str | None = None  # save at the next step and go on
        self.signal: str | None = None  # the first one's name
        self.at_s = 0.0  # when it came
        self.has_nothing_to_save = False
        self.lock = threading.RLock()  # not a Lock: a signal may interrupt this very thread while it holds it

    def __enter__(self) -> StopRequest:
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in self.SIGNALS if number != signal.SIGHUP or not ignored]
        self.before = {number: signal.signal(number, self.handle) for number in numbers}
        self.ears, self.mouth = socket.socketpair()
        self.mouth.setblocking(False)
        self.fd_before = signal.set_wakeup_fd(self.mouth.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self.listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.fd_before)
        self.mouth.close()  # which ends the thread

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Inside, the first signal leaves at once, by StoppedEarly; so does one that came before."""
        self.has_nothing_to_save = True
        try:
            if self.signal is not None:
                raise StoppedEarly(self.signal)
            yield
        finally:
            self.has_nothing_to_save = False

    def listen(self) -> None:
        """The kernel's handler writes each signal's number, whatever the main thread does."""
        first_s: float | None = None
        with self.ears:
            while found := self.ears.recv(1):
                now_s = time.monotonic()
                if found[0] not in self.before:
                    continue
                is_second = first_s is not None and now_s - first_s > REPEAT_S
                if is_second or self.has_nothing_to_save:
                    time.sleep(GRACE_S)
                    if (is_second or self.has_nothing_to_save) and self.mouth.fileno() >= 0:
                        os._exit(128 + found[0])
                first_s = first_s or now_s

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
        if self.has_nothing_to_save:
            raise StoppedEarly(self.signal)


def leave_signals_to_the_parent(_worker: int) -> None:
    """For loader workers: schedulers and terminals signal every process of a job, but the rank decides what it means.

    A worker that died of the signal would fail the rank before it has saved. Workers end when their rank does.
    """
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
