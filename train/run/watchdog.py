"""The watchdog of a rank: it ends a process that makes no progress, so that torchrun can start the run again.

In each rank, a thread watches all ranks of the machine: each has a time limit for its next heartbeat. Ranks wait for
each other in every step, so the run is stuck when all local ranks at the lowest step have exceeded their limits. Then
`outcome.json` names the least advanced rank. The thread also reports ranks that ended without an exit record.

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
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from train.config import WatchdogConfig
from train.machine.launched import launched
from train.machine.memory import count_oom_kills, find_oom_counter
from train.machine.processes import ENDED_STATES, read_process
from train.run_folder.outcome import Outcome, may_continue, write_outcome
from train.run_folder.run_folder import RunFolder
from train.storage.atomic_io import open_alike
from train.storage.folders import canonical_json

STDERR = 2
PERIOD_S = 1.0  # seconds between two checks, or a tenth of the shorter limit if that is less
MARGIN_PERIODS = 10  # periods from a rank's limit to the end of the C timer, so that the thread can report first
OTHERS_PERIODS = 3  # periods for the other ranks to write their stacks: once this rank exits, torchrun kills them
LEFT = 2**62  # the step of a rank whose watchdog was closed: no other rank waits for it
# kill counts to keep: the kernel counts a kill long before a large process has ended
OOM_LOOKS = 60
# seconds to wait, after a collective breaks, for the end of the process that broke it
PEER_ENDS_S = 2.0
LOST_PEER = ("RuntimeError", "DistBackendError")  # torch's errors when a collective breaks
# packages in which the main thread waits for other ranks
WAITING = (
    "torch.autograd",
    "torch.distributed",
)

logger = logging.getLogger("train")


class Heartbeat(ctypes.Structure):
    """The last heartbeat of a rank, in memory that the other ranks of its machine can read."""

    _fields_ = (
        ("at_s", ctypes.c_double),  # by time.monotonic(), which all processes of a machine share
        ("limit_s", ctypes.c_double),
        ("step", ctypes.c_int64),  # -1: the phase belongs to no step
        ("count", ctypes.c_int64),  # heartbeats in this step
        (
            "may_wait",
            ctypes.c_bool,
        ),  # when last checked, the main thread was in a backward pass or collective
        ("phase", ctypes.c_char * 40),
    )

    @property
    def age_s(self) -> float:
        return time.monotonic() - float(self.at_s)

    @property
    def where(self) -> str:
        return f"'{self.phase.decode()}'" + (f" of step {self.step}" * (self.step >= 0))


class Peer(NamedTuple):
    """Another rank of this machine."""

    pid: int
    started: int  # the process's start time, see Process
    memory: mmap.mmap | None  # has the rank's heartbeat; None if this process may not read it


class Watchdog:
    """The heartbeats of this rank, and the thread that checks the heartbeats of all ranks of the machine.

    Use it as a context manager, after `RunFolder.open`, which removes the exit records of the previous attempt.
    """

    def __init__(
        self, cfg: WatchdogConfig, folder: RunFolder, *, oom_counter: Path | None = None
    ) -> None:
        self.cfg, self.folder, self.rank = cfg, folder, launched().rank
        self.own = Heartbeat()  # in private memory until the watchdog opens
        self.handle = -1  # the file descriptor of the shared memory
        self.is_open = False
        self.period_s = min(PERIOD_S, cfg.step_s / 10, cfg.start_s / 10)
        self.is_start = True  # the phase has the time limit of a start
        # heartbeats before this time do not arm the C timer again, which takes 0.1 ms
        self.rearm_s = 0.0
        self.armed_s = 0.0  # the limit for which the C timer was armed
        # returns whether this or another rank is compiling
        self.compiles: Callable[[], bool] = lambda: False
        # some rank is compiling, so this phase has the time limit of a start
        self.is_compiling = False
        self.peers: dict[int, Peer] = {}  # the other ranks of this machine
        self.suspects: dict[
            int, float
        ] = {}  # by rank: the time of a heartbeat that was late at the last check
        self.oom_counter = oom_counter or find_oom_counter()
        self.oom_kills = deque([count_oom_kills(self.oom_counter)], maxlen=OOM_LOOKS)
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
            num_peers, end_s = len(self.peers), time.monotonic() + PEER_ENDS_S
            while len(self.peers) == num_peers > 0 and time.monotonic() < end_s:
                self.report_gone()
                time.sleep(self.period_s / 10)
        self.is_open = False
        self.closed.set()
        faulthandler.cancel_dump_traceback_later()
        self.own.step = LEFT
        os.close(self.handle)

    def phase(self, name: str, *, step: int | None = None, is_start: bool = False) -> None:
        """Begin a phase, which is a heartbeat. `is_start` sets the limit for joining, loading or compiling."""
        number = -1 if step is None else step
        self.own.at_s = time.monotonic()  # set first, since the next limit may be shorter
        if number != self.own.step:
            self.own.count = 0
        self.is_start, self.is_compiling = is_start, False
        if self.limit_s != self.armed_s:
            self.rearm_s = 0.0
        self.own.limit_s, self.own.step, self.own.phase = self.limit_s, number, name.encode()
        self.heartbeat()

    def heartbeat(self) -> None:
        """Record progress, such as a micro batch, an evaluation batch or a checkpoint file."""
        self.own.at_s = now_s = time.monotonic()
        self.own.count += 1
        if now_s >= self.rearm_s and self.is_open:
            self.arm()

    def joined(self, peers: Mapping[int, tuple[int, int, int]]) -> None:
        """Begin to watch the machine's other ranks: `peers` has the process id, start time and `handle` of each."""
        for rank, (pid, started, handle) in peers.items():
            memory = None
            with suppress(OSError), Path(f"/proc/{pid}/fd/{handle}").open("rb") as file:
                memory = mmap.mmap(file.fileno(), ctypes.sizeof(Heartbeat), prot=mmap.PROT_READ)
            self.peers[rank] = Peer(pid, started, memory)

    def arm(self) -> None:
        """Make the C timer end this process unless it is armed again in time."""
        self.rearm_s, self.armed_s = time.monotonic() + self.period_s, self.limit_s
        faulthandler.dump_traceback_later(
            self.limit_s + MARGIN_PERIODS * self.period_s, exit=True, file=STDERR
        )

    @property
    def limit_s(self) -> float:
        return self.cfg.start_s if self.is_start or self.is_compiling else self.cfg.step_s

    # ---- the thread ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        while not self.closed.wait(self.period_s):
            self.allow_compiling()
            self.own.may_wait = is_main_thread_in(WAITING)
            self.oom_kills.append(count_oom_kills(self.oom_counter))
            self.report_gone()
            stuck = self.find_stuck()
            if stuck is not None and self.is_open:
                self.end(stuck)
            if self.own.age_s > self.own.limit_s and self.is_open:
                self.arm()  # not stuck: this rank waits for a rank that still has time

    def allow_compiling(self) -> None:
        """Apply the time limit of a start while any rank compiles, and the limit of a step afterwards."""
        before = self.is_compiling
        self.is_compiling = (
            not self.is_start and self.own.age_s > self.cfg.step_s / 2 and self.compiles()
        )
        if before and not self.is_compiling:
            self.own.at_s = time.monotonic()
        if (before or self.is_compiling) and self.is_open:
            self.own.limit_s = self.limit_s
            self.arm()

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the current heartbeats of this machine's ranks."""
        memories = {
            self.rank: self.own,
            **{rank: peer.memory for rank, peer in list(self.peers.items())},
        }
        return {
            rank: Heartbeat.from_buffer_copy(each)
            for rank, each in memories.items()
            if each is not None
        }

    def find_stuck(self) -> int | None:
        """Return the stuck rank, or None if no rank is stuck.

        The run is stuck if two checks in a row find the same late heartbeats for all ranks at the lowest step. A single
        check could read a heartbeat that is just being written. The result is one of these ranks: a stopped rank
        (SIGSTOP) if there is one, otherwise the least advanced. Among equally advanced ranks, those that may be waiting
        for others in a collective come last.
        """
        ranks = self.heartbeats()
        lowest = min(each.step for each in ranks.values())
        behind = {rank: each for rank, each in ranks.items() if each.step == lowest}
        is_late = all(each.age_s > each.limit_s for each in behind.values())
        before, self.suspects = (
            self.suspects,
            {rank: each.at_s for rank, each in behind.items()} if is_late else {},
        )
        if not is_late or before != self.suspects:
            return None

        def order(rank: int) -> tuple[bool, int, bool, float]:
            last = behind[rank]
            return not self.is_stopped(rank), last.count, last.may_wait, last.at_s

        return min(behind, key=order)

    def is_stopped(self, rank: int) -> bool:
        """Return whether another rank of this machine is stopped (SIGSTOP), so that it cannot exit."""
        peer = self.peers.get(rank)
        process = read_process(peer.pid) if peer is not None else None
        return process is not None and process.state == "T"

    def end(self, stuck: int) -> None:
        """Report which rank is stuck, kill ranks that are stopped (SIGSTOP), and exit."""
        self.is_open = False  # heartbeats must no longer arm the timer
        # The timer limits the time of this report, since the run folder's file system may hang as well.
        faulthandler.dump_traceback_later(MARGIN_PERIODS * self.period_s, exit=True, file=STDERR)
        ranks = self.heartbeats()
        last, is_alike = (
            ranks[stuck],
            len({(each.step, each.phase, each.count) for each in ranks.values()}) == 1,
        )
        limit = f"watchdog.{'step_s' if last.limit_s == self.cfg.step_s else 'start_s'}={last.limit_s:g}"
        reason = f"stuck: rank {stuck} has been in {last.where} for {last.age_s:.0f} s ({limit})"
        if is_alike and not launched().is_one_machine:
            reason += (
                "; all ranks of this machine are waiting, perhaps for a rank of another machine"
            )
        for rank, peer in self.peers.items():
            if self.is_stopped(rank):
                reason += f"; rank {rank} is stopped (SIGSTOP) and was killed"
                os.kill(peer.pid, signal.SIGKILL)
        reason += f"; stacks in {self.folder.log.name}/stacks_rank_*.txt"
        self.report("stuck", reason, {stuck, self.rank}, last, writes_stacks=True)
        time.sleep(OTHERS_PERIODS * self.period_s)
        os._exit(1)

    def report_gone(self) -> None:
        """Report ranks that ended without an exit record: the kernel, a driver or a person killed them."""
        for rank, peer in list(self.peers.items()):
            process = read_process(peer.pid)
            if (
                process is not None
                and process.started == peer.started
                and process.state not in ENDED_STATES
            ):
                continue
            # __exit__ calls this in the main thread, too
            is_reported = self.peers.pop(rank, None) is None
            if is_reported or (self.folder.log / f"exit_rank_{rank:04d}.json").is_file():
                continue
            kind, reason = (
                "killed",
                f"killed: rank {rank} ended without an exit record around {self.own.where}",
            )
            if self.oom_kills[0] < count_oom_kills(self.oom_counter):
                kind = "out_of_host_memory"
                reason = f"out of host memory: the kernel killed rank {rank} around {self.own.where}; lower "
                reason += "data.num_workers or micro_batch_size"
            self.report(kind, reason, {rank}, self.own)

    def report(
        self,
        kind: str,
        reason: str,
        ranks: Collection[int],
        last: Heartbeat,
        *,
        writes_stacks: bool = False,
    ) -> None:
        """Write the outcome with the step of `last`, exit records for `ranks` and, on request, this process's stacks.

        The first rank that records the failure also prints it. Nothing is written if another job owns the folder.
        """
        is_first, step = True, last.step if last.step >= 0 else None
        with self.folder.logging_failures():
            self.folder.ownership.check()
            if writes_stacks:
                with open_alike(
                    self.folder.log / f"stacks_rank_{self.rank:04d}.txt", "ab"
                ) as file:
                    file.write(
                        f"---- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {reason}\n".encode()
                    )
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            if self.folder.ownership.owner is not None:  # None before the ranks have joined
                goes_on = may_continue(kind, self.folder.previous.get("kind", ""))
                outcome = Outcome("failed", kind, reason, step, None, goes_on=goes_on)
                is_first = write_outcome(self.folder.folder, outcome, replaces=LOST_PEER)
            content = {"reason": reason, "step": step, "time_unix_s": round(time.time(), 1)}
            for rank in ranks:
                self.folder.folder.create(
                    f"log/exit_rank_{rank:04d}.json", canonical_json(content)
                )
        if is_first:
            logger.error("watchdog: %s", reason)


def is_main_thread_in(packages: tuple[str, ...]) -> bool:
    """Return whether the innermost Python function of the main thread belongs to one of these packages."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(packages)
