"""The watchdog of a rank: it ends a process that makes no progress, so that torchrun can start the run again.

In each rank, a thread watches all ranks of the machine: each has a time limit for its next heartbeat. Ranks wait for
each other in every step, so the run is stuck when all local ranks at the lowest step have exceeded their limits. Then
`outcome.json` names the least advanced rank. The thread also reports ranks that ended without closing their watchdog.

The thread cannot run while another thread holds the GIL. Therefore, heartbeats also arm a timer of `faulthandler`:
its C thread dumps the stacks to standard error and ends the process. Only Linux is supported. This module does not
import torch.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from train.config import WatchdogConfig
from train.machine.launched import launched
from train.machine.memory import count_oom_kills, find_oom_counter
from train.machine.processes import ENDED_STATES, read_process
from train.run_folder.outcome import Outcome, may_continue, write_outcome
from train.run_folder.run_folder import RunFolder

STDERR = 2
PERIOD_S = 1.0  # seconds between two checks, or a tenth of the shorter limit if that is less
MARGIN_PERIODS = 10  # from a rank's limit to the end of the C timer: the thread can report first
OTHERS_PERIODS = 3  # for the others' stacks: once this rank exits, torchrun kills them
LEFT = 2**62  # the step of a rank whose watchdog was closed: no other rank waits for it
PEER_ENDS_S = 2.0  # after a collective breaks: seconds to wait for the end of its culprit
LOST_PEER = ("RuntimeError", "DistBackendError")  # torch's errors when a collective breaks
WAITING = ("torch.autograd", "torch.distributed")  # packages in which a rank waits for others

logger = logging.getLogger("train")


class Heartbeat(ctypes.Structure):
    """The last heartbeat of a rank, in memory that the other ranks of its machine can read."""

    _fields_ = (
        ("at_s", ctypes.c_double),  # by time.monotonic(), which all processes of a machine share
        ("limit_s", ctypes.c_double),
        ("step", ctypes.c_int64),  # -1: the phase belongs to no step
        ("count", ctypes.c_int64),  # heartbeats in this step
        ("may_wait", ctypes.c_bool),  # the main thread was in a backward pass or collective
        ("phase", ctypes.c_char * 40),
    )

    @property
    def age_s(self) -> float:
        return time.monotonic() - float(self.at_s)

    @property
    def is_late(self) -> bool:
        return self.age_s > self.limit_s

    @property
    def where(self) -> str:
        if self.step >= 0:
            step = f" of step {self.step}"
        else:
            step = ""
        return f"'{self.phase.decode()}'{step}"


@dataclass(frozen=True)
class Peer:
    """Another rank of this machine."""

    pid: int
    started: int  # the process's start time, see Process
    memory: mmap.mmap | None  # has the rank's heartbeat; None if this process may not read it

    @property
    def last(self) -> Heartbeat | None:
        if self.memory is None:
            return None
        return Heartbeat.from_buffer_copy(self.memory)

    @property
    def is_gone(self) -> bool:
        process = read_process(self.pid)
        if process is None or process.started != self.started:
            return True
        return process.state in ENDED_STATES


class Watchdog:
    """The heartbeats of this rank, and the thread that checks the heartbeats of all ranks of the machine.

    Use it as a context manager, after `RunFolder.open`.
    """

    def __init__(
        self, cfg: WatchdogConfig, folder: RunFolder, *, oom_counter: Path | None = None
    ) -> None:
        self.cfg = cfg
        self.folder = folder
        self.rank = launched().rank
        self.own = Heartbeat()  # in private memory until the watchdog opens
        self.handle = -1  # the file descriptor of the shared memory
        self.is_open = False
        self.period_s = min(PERIOD_S, cfg.step_s / 10)
        # The phase has the time limit of a start if it is one, or while a graph is compiled in it.
        self.is_start = True
        self.is_compiling = False
        self.rearm_s = 0.0  # earlier heartbeats do not arm the C timer, which takes 0.1 ms
        self.compiles: Callable[[], bool] = lambda: False  # is this rank compiling?
        self.peers: dict[int, Peer] = {}  # the other ranks of this machine
        self.oom_counter = oom_counter or find_oom_counter()
        self.oom_kills = count_oom_kills(self.oom_counter)
        self.closed = threading.Event()

    def __enter__(self) -> Watchdog:
        if self.cfg.step_s > 0 and sys.platform == "linux":
            self.handle = os.memfd_create("heartbeat")
            os.ftruncate(self.handle, ctypes.sizeof(Heartbeat))
            self.own = Heartbeat.from_buffer(mmap.mmap(self.handle, ctypes.sizeof(Heartbeat)))
            self.is_open = True
            self.phase("start", is_start=True)
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.is_open:
            return
        if kind is not None and kind.__name__ in LOST_PEER:
            self.wait_for_culprit()
        self.is_open = False
        self.closed.set()
        faulthandler.cancel_dump_traceback_later()
        self.own.step = LEFT
        os.close(self.handle)

    def joined(self, peers: Mapping[int, tuple[int, int, int]]) -> None:
        """Begin to watch the machine's other ranks: `peers` has the process id, start time and `handle` of each."""
        for rank, (pid, started, handle) in peers.items():
            memory = None
            with suppress(OSError), Path(f"/proc/{pid}/fd/{handle}").open("rb") as file:
                size = ctypes.sizeof(Heartbeat)
                memory = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
            self.peers[rank] = Peer(pid, started, memory)

    def phase(self, name: str, *, step: int | None = None, is_start: bool = False) -> None:
        """Begin a phase, which is a heartbeat. `is_start` sets the limit for joining, loading or compiling."""
        self.own.at_s = time.monotonic()  # set first, since the next limit may be shorter
        number = -1 if step is None else step
        if number != self.own.step:
            self.own.count = 0
        self.is_start = is_start
        self.is_compiling = False
        self.set_limit()
        self.own.step = number
        self.own.phase = name.encode()
        self.heartbeat()

    def set_limit(self) -> None:
        limit_s = self.cfg.step_s
        if self.is_start or self.is_compiling:
            limit_s = self.cfg.start_s
        if limit_s != self.own.limit_s:
            self.own.limit_s = limit_s
            self.rearm_s = 0.0  # the next heartbeat arms the timer with this limit

    def heartbeat(self) -> None:
        """Record progress, such as a micro batch, an evaluation batch or a checkpoint file."""
        now_s = time.monotonic()
        self.own.at_s = now_s
        self.own.count += 1
        if now_s >= self.rearm_s and self.is_open:
            self.arm()

    def arm(self) -> None:
        """Make the C timer end this process unless it is armed again in time."""
        self.rearm_s = time.monotonic() + self.period_s
        timeout_s = self.own.limit_s + MARGIN_PERIODS * self.period_s
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=STDERR)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        while not self.closed.wait(self.period_s):
            self.allow_compiling()
            self.own.may_wait = is_main_thread_in(WAITING)
            self.report_gone()
            stuck = self.find_stuck()
            if stuck is not None and self.is_open:
                self.end(stuck)
            if self.own.is_late and self.is_open:
                self.arm()  # not stuck: this rank waits for a rank that still has time

    def allow_compiling(self) -> None:
        """Apply the time limit of a start while this rank compiles, and that of a step, counted anew, afterwards."""
        was_compiling = self.is_compiling
        is_young = self.own.age_s < self.cfg.step_s / 2
        if self.is_start or (is_young and not was_compiling):
            return
        self.is_compiling = self.compiles()
        if was_compiling and not self.is_compiling:
            self.own.at_s = time.monotonic()
        self.set_limit()
        if self.is_open:
            self.arm()

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the current heartbeats of this machine's ranks."""
        ranks = {self.rank: Heartbeat.from_buffer_copy(self.own)}
        for rank, peer in list(self.peers.items()):
            last = peer.last
            if last is not None:
                ranks[rank] = last
        return ranks

    def find_stuck(self) -> int | None:
        """Return the stuck rank, or None if no rank is stuck.

        The run is stuck if all ranks at the lowest step are late. The result is the least advanced of them. Among
        equally advanced ranks, those that may be waiting for others in a collective come last.
        """
        ranks = self.heartbeats()
        lowest = min(each.step for each in ranks.values())
        behind = {rank: each for rank, each in ranks.items() if each.step == lowest}
        if not all(each.is_late for each in behind.values()):
            return None

        def order(rank: int) -> tuple[int, bool, float]:
            last = behind[rank]
            return last.count, last.may_wait, last.at_s

        return min(behind, key=order)

    def end(self, stuck: int) -> None:
        """Report which rank is stuck, and exit."""
        self.is_open = False  # heartbeats must no longer arm the timer
        # The timer limits the time of this report, since the run folder's file system may hang as well.
        faulthandler.dump_traceback_later(MARGIN_PERIODS * self.period_s, exit=True, file=STDERR)
        ranks = self.heartbeats()
        last = ranks[stuck]
        reason = f"stuck: rank {stuck} has been in {last.where} for {last.age_s:.0f} s"
        reason += f" (watchdog.step_s={self.cfg.step_s:g})"
        are_alike = len({(each.step, each.phase, each.count) for each in ranks.values()}) == 1
        if are_alike and not launched().is_one_machine:
            reason += (
                "; all ranks of this machine are waiting, perhaps for a rank of another machine"
            )
        reason += f"; stacks in {self.folder.log.name}/stacks_rank_*.txt"
        self.report("stuck", reason, last, writes_stacks=True)
        time.sleep(OTHERS_PERIODS * self.period_s)
        os._exit(1)

    # ---- ranks that are gone ---------------------------------------------------------------------------------------

    def report_gone(self) -> None:
        """Report ranks that ended without closing their watchdog: the kernel, a driver or a person killed them."""
        for rank, peer in list(self.peers.items()):
            if not peer.is_gone:
                continue
            is_reported = self.peers.pop(rank, None) is None  # by the other thread
            if is_reported or (peer.last is not None and peer.last.step == LEFT):
                continue
            where = self.own.where
            kind = "killed"
            reason = f"killed: rank {rank} ended without an outcome around {where}"
            if self.oom_kills < count_oom_kills(self.oom_counter):
                kind = "out_of_host_memory"
                reason = f"out of host memory: the kernel killed rank {rank} around {where}; "
                reason += "lower data.num_workers or micro_batch_size"
            self.report(kind, reason, self.own)

    def wait_for_culprit(self) -> None:
        """After a collective broke, wait a little for the end of the process that broke it, and report that."""
        num_peers = len(self.peers)
        end_s = time.monotonic() + PEER_ENDS_S
        while len(self.peers) == num_peers > 0 and time.monotonic() < end_s:
            self.report_gone()
            time.sleep(self.period_s / 10)

    def report(
        self, kind: str, reason: str, last: Heartbeat, *, writes_stacks: bool = False
    ) -> None:
        """Write the outcome with the step of `last` and, on request, this process's stacks.

        The first rank that records the failure also prints it. Nothing is written if another job owns the folder.
        """
        is_first = True
        with self.folder.logging_failures():
            self.folder.ownership.check()
            if writes_stacks:
                self.write_stacks(reason)
            if self.folder.ownership.owner is not None:  # None before the ranks have joined
                outcome = Outcome(
                    outcome="failed",
                    kind=kind,
                    reason=reason,
                    step=last.step if last.step >= 0 else None,
                    checkpoint=None,
                    goes_on=may_continue(kind, self.folder.previous.get("kind", "")),
                )
                is_first = write_outcome(self.folder.folder, outcome, replaces=LOST_PEER)
        if is_first:
            logger.error("watchdog: %s", reason)

    def write_stacks(self, reason: str) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        path = self.folder.log / f"stacks_rank_{self.rank:04d}.txt"
        with path.open("ab") as file:
            file.write(f"---- {now} {reason}\n".encode())
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def is_main_thread_in(packages: tuple[str, ...]) -> bool:
    """Return whether the innermost Python function of the main thread belongs to one of these packages."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(packages)
