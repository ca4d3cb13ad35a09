"""Requests to stop: signals and notices leave one, and the loop reads it once a step. All ranks agree on it."""

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

from train.host.torchrun import STOP_SIGNALS

GRACE_S = 5.0  # after a second signal, for the main thread to leave by itself
REPEAT_S = 2.0  # torchrun repeats the Ctrl-C that the terminal has sent: within this time it is the same request


class StoppedEarly(BaseException):
    """A signal came while there was nothing to save: the run is as it was, and the same command continues it."""


class StopRequest:
    """While open, this catches SIGTERM, SIGINT, SIGUSR1, SIGUSR2 and, unless it is ignored (nohup), SIGHUP. The second
    signal ends the process at once; while the main thread is in a call that runs no Python handler, a thread does.

    Other threads call `ask` and `ask_save`. A signal after that counts as the first: EC2, Slurm and torchrun send
    SIGTERM after a notice, and the run must not leave without the checkpoint that it stops for.
    """

    def __init__(self) -> None:
        self.reason: str | None = None  # leave at the next step, with a checkpoint
        self.kind = ""  # an identifier of the reason, for programs; empty where the reason itself is one
        self.saves_soon: str | None = None  # save at the next step and continue; the loop sets it back
        self.save_s = 0.0  # seconds that the last save took
        self.signal: str | None = None  # the first one's name
        self.at_s = 0.0  # when it came
        self.has_nothing_to_save = False
        self.lock = threading.RLock()  # not a Lock: a signal may interrupt this very thread while it holds it

    def __enter__(self) -> StopRequest:
        ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        numbers = [number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored]
        self.before = {number: signal.signal(number, self.handle) for number in numbers}
        self.receiver, self.sender = socket.socketpair()
        self.sender.setblocking(False)
        self.fd_before = signal.set_wakeup_fd(self.sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self.listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.fd_before)
        self.sender.close()  # which ends the thread

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Inside, the first signal raises StoppedEarly at once; so does entering after one."""
        self.has_nothing_to_save = True
        try:
            if self.signal is not None:
                raise StoppedEarly(self.signal)
            yield
        finally:
            self.has_nothing_to_save = False

    def listen(self) -> None:
        """End the process if the main thread does not. Python's C handler writes each signal's number in any case."""
        first_s: float | None = None
        with self.receiver:
            while number := self.receiver.recv(1):
                now_s = time.monotonic()
                if number[0] not in self.before:
                    continue
                is_second = first_s is not None and now_s - first_s > REPEAT_S
                if is_second or self.has_nothing_to_save:
                    time.sleep(GRACE_S)
                    if (is_second or self.has_nothing_to_save) and self.sender.fileno() >= 0:
                        os._exit(128 + number[0])
                first_s = first_s or now_s

    def ask(self, reason: str, *, kind: str = "") -> None:
        """Have the run leave at the next step. The first reason stays. From any thread."""
        with self.lock:
            if self.reason is None:
                self.reason, self.kind = reason, kind

    def ask_save(self, reason: str) -> None:
        """Have the run save at the next step and continue. The first reason stays until then. From any thread."""
        self.saves_soon = self.saves_soon or reason

    def handle(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal is not None and now_s - self.at_s > REPEAT_S:
            sys.exit(128 + number)  # what is published stays valid: files are renamed once they are whole
        if self.signal is None:
            self.signal, self.at_s = signal.Signals(number).name, now_s
            self.ask(self.signal)
        if self.has_nothing_to_save:
            raise StoppedEarly(self.signal)
