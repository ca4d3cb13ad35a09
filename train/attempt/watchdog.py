"""The watchdog of a rank: it ends a process that makes no progress, so that torchrun can start the run again.

A thread of every rank compares the heartbeats of all ranks of its machine, which are in shared memory. The ranks of a
step wait for each other, so the run is stuck when all local ranks at the lowest step have exceeded their limits: as
long as one of them may still compile, the others may be waiting for it. Then every rank dumps its stacks and exits, and
the exit records name the rank that is least advanced.

No Python thread runs while another one holds Python's lock. For that case heartbeats arm a timer of `faulthandler`,
whose C thread dumps the stacks to standard error and exits. Only Linux is supported; elsewhere nothing is watched. No
torch here.
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
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from train.attempt.heartbeat import PHASE_BYTES, Heartbeat, Seen, open_private, shared_path, step_of
from train.config import WatchdogConfig
from train.host.launched import launched
from train.host.memory import count_oom_kills, find_oom_counter, peak_memory
from train.host.processes import read_process
from train.run_folder.folder import RunFolder
from train.run_folder.outcome import Outcome, may_go_on, write_outcome
from train.storage.folders import canonical_json

ABSENT, ALIVE, LEFT = 0, 1, 2  # states of a rank
STDERR = 2
PERIOD_S = 1.0  # between two looks, or a tenth of the shorter limit
MARGIN_PERIODS = 10  # by which the timer in C is later than the limit, so that the thread can report first
OTHERS_PERIODS = 3  # for the other ranks to see the same before the first one exits
OOM_LOOKS = 60  # the kernel decides to kill a large process long before the process has ended
PEER_ENDS_S = 2.0  # from a broken collective to the end of the process that broke it
EXITED = ("Z", "X")  # states of a process that its parent has yet to collect, see proc(5)
LOST_PEER = ("RuntimeError", "DistBackendError")  # torch's errors of a broken collective

logger = logging.getLogger("train")


class Watchdog:
    """The heartbeats of this rank, and the thread that looks at those of all local ranks. Use it as a context, after
    `RunFolder.open`, which removes the exit records of the attempt before.
    """

    def __init__(self, cfg: WatchdogConfig, folder: RunFolder, *, oom_counter: Path | None = None) -> None:
        self.cfg, self.folder, self.launch = cfg, folder, launched()
        self.is_ours = self.launch.rank == 0  # the run folder; other ranks know once all have joined
        self.has_joined = False
        self.is_open = False
        self.period_s = min(PERIOD_S, cfg.step_s / 10, cfg.start_s / 10)
        self.margin_s = MARGIN_PERIODS * self.period_s
        self.compiles: Callable[[], bool] = lambda: False  # whether a rank does, which may be this one
        self.allows_compiling = False  # in a phase that has the time of a step
        self.rearm_ns = 0  # time from which a heartbeat arms the timer in C again
        self.oom_counter = oom_counter or find_oom_counter()
        self.oom_kills = deque([count_oom_kills(self.oom_counter)], maxlen=OOM_LOOKS)
        self.suspects: list[tuple[int, int]] = []
        self.closed = threading.Event()
        self.path: Path | None = None
        self.own = Heartbeat()  # not shared unless the watchdog is open
        self.heartbeats: Sequence[Heartbeat] = []

    def __enter__(self) -> Watchdog:
        if self.cfg.enabled and sys.platform == "linux":
            self.open_heartbeats()
            self.is_open = True
            self.phase("start", is_start=True)
            self.own.state = ALIVE
            threading.Thread(target=self.watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.is_open:
            return
        if kind is not None and kind.__name__ in LOST_PEER:
            end_s = time.monotonic() + PEER_ENDS_S
            while all(each.state == ALIVE for each in self.heartbeats) and time.monotonic() < end_s:
                self.report_gone(self.read())
                time.sleep(self.period_s / 10)
        self.is_open = False
        self.closed.set()
        faulthandler.cancel_dump_traceback_later()
        self.own.state = LEFT
        self.unlink()

    def phase(self, name: str, *, step: int | None = None, is_start: bool = False) -> None:
        """Note that another phase begins, which is a heartbeat too. `is_start`: the rank joins, loads or compiles, for
        which it has `watchdog.start_s`.
        """
        number = -1 if step is None else step
        if number != self.own.step:
            self.own.marks = 0
        self.own.beat_ns = time.monotonic_ns()  # first, since the next limit may be shorter
        self.allows_compiling = False
        if self.own.is_start != is_start:
            self.rearm_ns = 0
        self.own.is_start, self.own.step, self.own.phase = is_start, number, name.encode()[:PHASE_BYTES]
        self.beat()

    def beat(self) -> None:
        """Note progress: a micro batch, a batch of an evaluation, a file of a checkpoint."""
        now_ns = time.monotonic_ns()
        self.own.marks += 1
        self.own.beat_ns = now_ns
        if now_ns >= self.rearm_ns and self.is_open:
            self.arm()

    def joined(self) -> None:
        """Note that all ranks have met: the run folder is theirs, and nobody else has to open the shared memory. Every
        rank calls it.
        """
        self.is_ours = self.has_joined = True
        self.unlink()

    def arm(self) -> None:
        """Have the timer in C end this process unless it is armed again in time."""
        self.rearm_ns = time.monotonic_ns() + int(1e9 * self.period_s)
        faulthandler.dump_traceback_later(self.limit_s(self.own) + self.margin_s, exit=True, file=STDERR)

    def limit_s(self, beat: Heartbeat) -> float:
        return self.cfg.start_s if beat.is_start else self.cfg.step_s

    # ---- shared memory ---------------------------------------------------------------------------------------------

    def open_heartbeats(self) -> None:
        """Map a heartbeat for each local rank. Without torchrun a process does not know which others belong to the run
        and watches itself alone.
        """
        process = read_process(os.getpid())
        assert process is not None
        count = self.launch.local_world_size if self.launch.is_under_torchrun else 1
        size = count * ctypes.sizeof(Heartbeat)
        if count == 1:
            shared = mmap.mmap(-1, size)
        else:
            self.path = shared_path(self.folder.log, self.launch)
            handle = open_private(self.path)
            try:
                os.ftruncate(handle, size)
                shared = mmap.mmap(handle, size)
            finally:
                os.close(handle)
        self.heartbeats = [Heartbeat.from_buffer(shared, at) for at in range(0, size, ctypes.sizeof(Heartbeat))]
        self.own = self.heartbeats[self.launch.local_rank if count > 1 else 0]
        self.own.state = ABSENT  # an earlier attempt may have left its state
        self.own.pid, self.own.started, self.own.rank = os.getpid(), process.started, self.launch.rank

    def unlink(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def read(self) -> list[Seen]:
        """The local ranks that have started and have not left in order."""
        ranks = []
        for shared in self.heartbeats:
            beat = Heartbeat.from_buffer_copy(shared)
            process = read_process(beat.pid) if beat.state == ALIVE else None
            is_running = process and process.started == beat.started and process.state not in EXITED
            # Until all have joined, the heartbeat of a process that is gone may be an earlier attempt's.
            if beat.state == ALIVE and shared.state == ALIVE and (is_running or self.has_joined):
                ranks.append(Seen(beat, self.limit_s(beat), process.state if process and is_running else ""))
        return ranks

    # ---- the thread ------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        while not self.closed.wait(self.period_s):
            self.look()

    def look(self) -> None:
        """Look at all local ranks once, and end this process if they are stuck."""
        self.allow_compiling()
        self.own.peak_bytes = peak_memory(os.getpid()) or 0
        self.oom_kills.append(count_oom_kills(self.oom_counter))
        ranks = self.read()
        self.report_gone(ranks)
        running = [rank for rank in ranks if rank.process_state]
        stuck = self.find_stuck(running)
        if stuck is not None and self.is_open:
            self.end(stuck, running)
        if any(rank.beat.pid == os.getpid() and rank.age_s > rank.limit_s for rank in running) and self.is_open:
            self.arm()  # this rank waits for another one that still has time

    def allow_compiling(self) -> None:
        """Give this rank the time of a start while a rank compiles, and that of a step from its end on."""
        if self.is_open and self.own.age_s > self.cfg.step_s / 2 and self.compiles():
            self.allows_compiling = self.allows_compiling or not self.own.is_start
            self.own.is_start = 1
            self.arm()
        elif self.is_open and self.allows_compiling:
            self.allows_compiling = False
            self.own.beat_ns, self.own.is_start = time.monotonic_ns(), 0
            self.arm()

    def find_stuck(self, running: Collection[Seen]) -> Seen | None:
        """The least advanced local rank, if no rank at its step has time left in two looks: during the first look a
        rank may be writing its heartbeat.
        """
        lowest = min((rank.beat.step for rank in running), default=-1)
        behind = [rank for rank in running if rank.beat.step == lowest]
        is_late = bool(behind) and all(rank.age_s > rank.limit_s for rank in behind)
        before, self.suspects = self.suspects, [(rank.beat.pid, rank.beat.beat_ns) for rank in behind if is_late]
        if not is_late or before != self.suspects:
            return None
        return min(behind, key=lambda rank: (rank.process_state != "T", rank.beat.marks, rank.beat.beat_ns))

    def end(self, stuck: Seen, running: Sequence[Seen]) -> None:
        """Report that the run is stuck, kill ranks that are stopped and cannot exit themselves, and exit."""
        self.is_open = False  # a heartbeat may no longer arm the timer
        # The timer is needed here too: the file system of the run folder may hang as well.
        faulthandler.dump_traceback_later(self.margin_s, exit=True, file=STDERR)
        reason = self.reason_of(stuck, running)
        self.report("stuck", reason, stuck, ranks=running, lines=[reason, *map(str, running)])
        for rank in running:
            if rank.process_state == "T":
                os.kill(rank.beat.pid, signal.SIGKILL)
        time.sleep(OTHERS_PERIODS * self.period_s)
        self.own.state = LEFT
        os._exit(1)

    def reason_of(self, stuck: Seen, running: Collection[Seen]) -> str:
        limit = f"watchdog.{'start_s' if stuck.beat.is_start else 'step_s'}={stuck.limit_s:g}"
        reason = f"stuck: rank {stuck.beat.rank} has been in {stuck.where} for {stuck.age_s:.0f} s ({limit})"
        absent = [str(number) for number, each in enumerate(self.heartbeats) if each.state == ABSENT]
        alike = len({(rank.beat.step, rank.beat.phase, rank.beat.marks) for rank in running}) == 1
        if absent:
            reason += f"; local rank {', '.join(absent)} has not started"
        elif alike and not self.launch.is_one_machine:
            reason += "; all ranks of this machine are waiting, perhaps for a rank of another machine"
        return f"{reason}; stacks in {self.folder.log.name}/stacks_rank_*.txt"

    def report_gone(self, ranks: Collection[Seen]) -> None:
        """Report local ranks that have ended without an exit record: the kernel, a driver or a person killed them."""
        for gone in (rank for rank in ranks if not rank.process_state):
            kind, advice = "killed", ""
            reason = f"killed: rank {gone.beat.rank} ended without an exit record in {gone.where}"
            if self.oom_kills[0] < count_oom_kills(self.oom_counter):
                kind, advice = "out_of_host_memory", "; lower data.num_workers, data.prefetch or micro_batch_size"
                reason = f"out of host memory: the kernel killed rank {gone.beat.rank} in {gone.where}"
            self.report(kind, f"{reason}; {gone.peak}{advice}", gone, ranks=[gone])
            for shared in self.heartbeats:
                if shared.pid == gone.beat.pid:
                    shared.state = LEFT  # reported

    def report(
        self, kind: str, reason: str, blamed: Seen, *, ranks: Collection[Seen], lines: Sequence[str] = ()
    ) -> None:
        """Write how the run failed, the exit record of each of `ranks` and, if there are `lines`, these with the stacks
        of this process below them. The first rank that records the failure prints it. Nothing is written to a folder
        of another job.
        """
        is_first = True
        with self.folder.logging_failures():
            self.folder.check_owner()
            if lines:
                self.dump_stacks(lines)
            if self.is_ours:
                goes_on = may_go_on(kind, self.folder.previous.get("kind", ""))
                outcome = Outcome("failed", kind, reason, step_of(blamed), None, goes_on=goes_on)
                write_outcome(self.folder.folder, outcome, replaces=LOST_PEER)
            for rank in ranks:
                content = {"reason": reason, "step": step_of(rank), "time_unix_s": round(time.time(), 1)}
                name = f"log/exit_rank_{rank.beat.rank:04d}.json"
                created = self.folder.folder.create(name, canonical_json(content))
                is_first = is_first and (created or rank is not blamed)
        if is_first:
            logger.error("\n".join(f"watchdog: {line}" for line in lines or [reason]))

    def dump_stacks(self, lines: Sequence[str]) -> None:
        header = f"---- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} "
        with (self.folder.log / f"stacks_rank_{self.launch.rank:04d}.txt").open("a") as file:
            file.write(header + "\n".join([*lines, ""]))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
