"""The path from a stop request to the exit code.

    1. A signal (`StopRequest.handle`), a notice from EC2, the file STOP or the clock (`Notices`) records a request.
       During start-up, when there is nothing to save (`nothing_to_save`), a signal raises StoppedEarly instead.
    2. `Votes.cast` sends the request before a step, and `Votes.count` receives it on all ranks after that step.
    3. `train.loop` names the ranks (`who_asked`), saves with `is_last=True` and waits until the save is committed.
    4. `attempt.record_end` writes outcome.json, which launchers read, since torchrun returns 1 for every exit code
       but 0.
    5. `train.entry.attempt` returns 75 (`STOPPED` in train/run/command.py), also after StoppedEarly.

A second signal skips 2 to 4: `handle` raises SystemExit(128 + the signal's number), and `train.entry` exits immediately
with that code. During a long C call, the main thread cannot run `handle`. The thread of `listen` then exits with that
code after GRACE_S: on a second signal or, in `nothing_to_save` (a library opens a device or joins ranks), on the first.
When torchrun itself dies, the kernel sends its ranks SIGTERM (train/machine/torchrun.py). Torch is not imported here.

EC2 publishes the notice that it will reclaim a spot instance, at best two minutes later, in the instance metadata
(spot/instance-action), which answers 404 while there is no notice (EC2 user guide). A scheduled stop or reboot sends
SIGTERM itself.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from train.config import TrainConfig
from train.machine.host import is_ec2_machine
from train.machine.metadata import Metadata, metadata_endpoint
from train.machine.torchrun import STOP_SIGNALS

if TYPE_CHECKING:
    from train.parallel.ranks import World

logger = logging.getLogger("train")

GRACE_S = 5.0  # seconds after a second signal in which the main thread may still exit
# The kernel repeats it every second beyond the soft limit of CPU time (setrlimit(2)).
REPEATED = (signal.SIGXCPU,)
REPEAT_S = 2.0  # seconds in which a signal counts as the same request: torchrun repeats the terminal's Ctrl-C
POLL_S = 5.0  # seconds between requests, as AWS recommends; a spot notice comes two minutes before the end
CLOSE_S = 5.0  # seconds to wait for a thread's last request; if S3 takes longer, the thread ends with the process


class StoppedEarly(BaseException):
    """A stop by a signal that came while there was nothing to save. The same command starts the run again."""


class StopRequest:
    """A context manager that catches STOP_SIGNALS; SIGHUP only unless it is ignored (nohup).

    Other threads call `ask`. A signal after `ask` still counts as the first: EC2, Slurm and torchrun send SIGTERM after
    a notice, and the run must not exit before it has saved the checkpoint for which it stops.
    """

    def __init__(self) -> None:
        self.reason: str | None = None  # why to save and exit at the next step; None: no request
        self.kind = ""  # an identifier of the reason, for programs; empty if the reason is one
        self.save_s = 0.0  # how long the last save took
        self.signal: str | None = None  # the name of the first signal
        self.at_s = 0.0  # the time.monotonic() of the first signal
        self.has_nothing_to_save = False
        # It is no Lock, since a signal handler may run in the thread that holds it.
        self.lock = threading.RLock()

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
        self.sender.close()  # this ends the thread of `listen`

    @contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """Raise StoppedEarly on the first signal inside the block, or on entry if a signal came earlier."""
        self.has_nothing_to_save = True
        try:
            if self.signal is not None:
                raise StoppedEarly(self.signal)
            yield
        finally:
            self.has_nothing_to_save = False

    def listen(self) -> None:
        """End the process if the main thread does not. Python's C handler writes each signal's number to the socket."""
        first_s: float | None = None
        with self.receiver:
            while received := self.receiver.recv(1):
                now_s = time.monotonic()
                number = received[0]
                if number not in self.before:
                    continue
                first_s = first_s or now_s
                since_first_s = now_s - first_s
                if not self.must_end(number, since_first_s):
                    continue
                time.sleep(GRACE_S)
                is_closed = self.sender.fileno() < 0
                if self.must_end(number, since_first_s) and not is_closed:
                    os._exit(128 + number)

    def must_end(self, number: int, since_first_s: float) -> bool:
        """Return whether a signal ends the process even if the main thread does not run `handle`."""
        return self.has_nothing_to_save or is_second(number, since_first_s)

    def ask(self, reason: str, *, kind: str = "") -> None:
        """Ask the run to stop at the next step. Only the first reason counts. Any thread may call this."""
        with self.lock:
            if self.reason is None:
                self.reason = reason
                self.kind = kind

    def handle(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal is None:
            self.at_s = now_s
            self.signal = signal.Signals(number).name
            self.ask(self.signal)
        elif is_second(number, now_s - self.at_s):
            sys.exit(128 + number)  # safe: a file gets its name only when it is complete
        if self.has_nothing_to_save:
            raise StoppedEarly(self.signal)


def is_second(number: int, since_first_s: float) -> bool:
    """Return whether a signal is another request to stop, so many seconds after the first, and not its repetition."""
    return since_first_s > REPEAT_S and number not in REPEATED


# ---- requests other than signals -------------------------------------------------------------------------------------


class Notices:
    """A thread that looks for notices and passes them to `stop`; a context manager for local rank 0 of each machine.

    It looks immediately and then every POLL_S. A source that fails is reported once and tried again. Before an end that
    is known in advance, the run stops early enough to save, if that takes as long as last time (`stop.save_s`). Raises
    InputError if an address is invalid.
    """

    def __init__(
        self,
        cfg: TrainConfig,
        stop: StopRequest,
        has_stop_file: Callable[[], bool],
        began_s: float,
    ) -> None:
        """Prepare the thread. `began_s` is the time.monotonic() at which the attempt began."""
        self.max_run_s = cfg.max_run_s
        self.stop = stop
        self.has_stop_file = has_stop_file
        self.began_s = began_s
        self.sources = {"clock": self.look_at_clock}
        if watches_metadata(os.environ):
            self.metadata = Metadata(metadata_endpoint(os.environ))
            self.sources[f"EC2 notices, {self.metadata.endpoint}"] = self.look_at_metadata
        # The last one, because S3 may take a minute to answer. A spot notice leaves two minutes.
        self.sources["stop file"] = self.look_for_file
        self.failing = set[str]()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self.watch, name="notices", daemon=True)

    def __enter__(self) -> Notices:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self.thread.join(CLOSE_S)

    def watch(self) -> None:
        while self.stop.reason is None:
            for name, look in self.sources.items():
                self.look(name, look)
            if self.closed.wait(POLL_S):
                return

    def look(self, name: str, look: Callable[[], None]) -> None:
        try:
            look()
            self.failing.discard(name)
        except Exception as error:  # the run continues without this source
            if name not in self.failing:
                logger.warning("%s: %s; trying again every %g s", name, error, POLL_S)
            self.failing.add(name)

    def look_at_clock(self) -> None:
        run_s = time.monotonic() - self.began_s
        if self.max_run_s is not None and run_s >= self.max_run_s - self.stop.save_s:
            self.stop.ask(f"max_run_s={self.max_run_s:g} has passed", kind="max_run_s")

    def look_for_file(self) -> None:
        if self.has_stop_file():
            self.stop.ask("the file STOP in the run folder", kind="stop_file")

    def look_at_metadata(self) -> None:
        notice = json.loads(self.metadata.get("spot/instance-action") or "null")
        if notice:
            text = f"EC2 spot notice: {notice['action']} at {notice['time']}"
            self.stop.ask(text, kind="spot_notice")


def watches_metadata(environ: Mapping[str, str]) -> bool:
    """Return whether to look for notices in EC2's metadata: on EC2, unless AWS's variables decide otherwise."""
    if environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    return bool(environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT")) or is_ec2_machine()


# ---- all ranks agree -------------------------------------------------------------------------------------------------


class Votes:
    """The ranks' votes on whether the run stops or fails after a step.

    No step waits for the votes, which are sent while the devices compute (benchmarks/notes.md). Every rank must call
    each method at the same steps.
    """

    def __init__(self, world: World, stop: StopRequest) -> None:
        self.world = world
        self.stop = stop
        self.failure: Exception | None = None
        self.counting: Callable[[], list[float]] = list
        self.stops = self.failures = 0.0  # numbers of ranks that voted to stop, and that failed

    def cast(self, failure: Exception | None) -> None:
        """Send this rank's vote. `failure` is the reason why the run cannot continue after the step that begins now."""
        self.failure = failure
        self.counting = self.world.begin_sum([self.stop.reason is not None, failure is not None])

    def count(self) -> None:
        """Count the votes that were cast before the step."""
        self.stops, self.failures = self.counting()

    def raise_failure(self) -> None:
        """If the last count includes a failure, raise one rank's failure on all ranks."""
        if self.failures:
            self.world.raise_failure(self.failure)

    def reasons(self) -> list[tuple[int, str, str, str]]:
        """Return (rank, reason, kind of the reason, host) for each rank that was asked to stop."""
        own = (self.stop.reason, self.stop.kind, platform.node())
        asked = []
        for rank, (reason, kind, host) in enumerate(self.world.all_gather_object(own)):
            if reason is not None:
                asked.append((rank, reason, kind, host))
        return asked
