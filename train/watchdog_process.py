"""The watchdog of a machine: `python -m train.watchdog_process ORDERS`, started by local rank 0, ends with the ranks.

Ranks of a step wait for each other, so the run is stuck when all local ranks at the lowest step are over their limits:
while one of them still may compile, the others may be waiting for it. Then every rank's stacks and an exit file are
left in the log, and all local ranks are killed, so that torchrun starts them again or ends. A rank that vanishes gets
an exit file as well. No torch here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from train.config import S3Config
from train.console import use_console
from train.host_memory import count_oom_kills, find_oom_counter, peak_memory
from train.machine import Process, read_process
from train.outcome import Outcome, may_go_on, write_outcome
from train.ownership import LeaseLost, check_owner
from train.preempt import leave_signals_to_the_parent
from train.storage import Folder, LocalFolder, canonical_json, open_folder
from train.watchdog import ABSENT, ALIVE, Orders, Slot, open_slots, remove_leftovers, stacks_path, stacks_signal

PERIOD_S = 0.25  # between two looks, or a tenth of the limits
MAX_GAP_S = 5.0  # a longer one says that this process did not run: the machine or the job was suspended, ranks as well
WAITING = ("join", "load", "agree")  # phases that wait for other ranks, or have nothing to lose
ORPHAN_S = 30.0  # without a heartbeat: torchrun's SIGTERM does not reach a rank in a call that waits for others
DUMP_S = 2.0  # for a rank to dump its stacks
WORD_S = 10.0  # for the log, which may be on a network file system that hangs; the ranks' end does not wait for it
RECENT_S = 60.0  # between the kernel's decision to kill for memory and the end of a large process
LOST_PEER = ("RuntimeError", "DistBackendError")  # torch's errors of a broken collective
OVER_STATES = ("Z", "X")  # of a process whose parent has yet to take note


@dataclass
class Rank:
    """A local rank as it was last seen."""

    local_rank: int
    rank: int
    pid: int
    started: int
    step: int | None
    phase: str
    is_start: bool
    marks: int
    beat_ns: int
    beat_at_s: float  # on the watchdog's clock
    launcher: int = 0  # its parent at first sight, under torchrun
    peak_bytes: int = 0  # most host memory so far
    process_state: str = ""
    is_orphan: bool = False  # torchrun is gone

    @property
    def place(self) -> str:
        return f"'{self.phase}'" + ("" if self.step is None else f" of step {self.step}")


class WatchdogProcess:
    def __init__(self, orders: Orders, *, oom_counter: Path | None) -> None:
        self.orders, self.oom_counter = orders, oom_counter
        self.folder, self.log = Path(orders.folder), Path(orders.log)
        self.slots = open_slots(self.folder, orders.num_ranks)
        self.period_s = min(PERIOD_S, orders.step_s / 10, orders.start_s / 10)
        self.alive: dict[int, Rank] = {}  # by local rank
        self.over: set[tuple[int, int]] = set()  # pid and start of processes that have ended
        self.suspects: list[tuple[int, int]] = []
        self.now_s, self.looked_s = 0.0, time.monotonic()
        self.oom_kills = deque([count_oom_kills(oom_counter)], maxlen=max(2, int(RECENT_S / self.period_s)))

    def run(self) -> None:
        while self.look():
            time.sleep(self.period_s)

    def look(self) -> bool:
        """Look at all ranks once and do what has to be done. False: there is nobody left to watch."""
        before_s, self.looked_s = self.looked_s, time.monotonic()
        self.now_s += min(self.looked_s - before_s, MAX_GAP_S)
        self.oom_kills.append(count_oom_kills(self.oom_counter))
        gone = self.see()
        stuck = self.find_stuck()
        if not self.alive or stuck is not None:
            ending = [*self.alive.values()]
            if stuck is not None:
                in_time(lambda: self.report_stuck(stuck))
            # Before the ranks end: their successors may share the name.
            shutil.rmtree(self.folder, ignore_errors=True)
            for rank in ending:
                self.kill(rank)
            self.alive.clear()
        if gone:
            in_time(lambda: self.report_gone(gone))
        return bool(self.alive)

    def see(self) -> list[Rank]:
        """Bring `alive` up to date. Gives those who are gone without having left in order."""
        gone = []
        before, self.alive = self.alive, {}
        for local_rank, shared in enumerate(self.slots):
            slot = Slot.from_buffer_copy(shared)
            life = (slot.pid, slot.started)
            if slot.state != ALIVE or life in self.over:
                continue
            last = before.get(local_rank)
            rank = self.rank_of(local_rank, slot, last if last and (last.pid, last.started) == life else None)
            process = running(slot.pid, slot.started)
            if process is not None:
                rank.process_state = process.state
                rank.launcher = rank.launcher or process.parent
                rank.is_orphan = self.orders.has_launcher and process.parent != rank.launcher
                rank.peak_bytes = peak_memory(slot.pid) or rank.peak_bytes
                self.alive[local_rank] = rank
                continue
            self.over.add(life)
            of_earlier_life = last is None and slot.started < self.orders.first_started
            if shared.state == ALIVE and not of_earlier_life:  # it may have left since it was copied
                gone.append(rank)
        return gone

    def rank_of(self, local_rank: int, slot: Slot, last: Rank | None) -> Rank:
        return Rank(
            local_rank=local_rank,
            rank=slot.rank,
            pid=slot.pid,
            started=slot.started,
            step=None if slot.step < 0 else slot.step,
            phase=slot.phase.decode(errors="replace"),
            is_start=bool(slot.is_start),
            marks=slot.marks,
            beat_ns=slot.beat_ns,
            beat_at_s=last.beat_at_s if last and last.beat_ns == slot.beat_ns else self.now_s,
            launcher=last.launcher if last else 0,
            peak_bytes=last.peak_bytes if last else 0,
        )

    # ---- stuck -----------------------------------------------------------------------------------------------------

    def find_stuck(self) -> Rank | None:
        """The local rank that has come least far, if nothing excuses it in two looks: the first may be half new."""
        last = min((-1 if rank.step is None else rank.step for rank in self.alive.values()), default=-1)
        behind = [rank for rank in self.alive.values() if rank.step == (None if last < 0 else last)]
        late = bool(behind) and all(self.age_s(rank) > self.limit_s(rank) for rank in behind)
        before, self.suspects = self.suspects, [(rank.pid, rank.beat_ns) for rank in behind] if late else []
        if not late or before != self.suspects:
            return None
        return min(behind, key=lambda rank: (rank.process_state != "T", rank.marks, rank.beat_ns))

    def age_s(self, rank: Rank) -> float:
        return self.now_s - rank.beat_at_s

    def limit_s(self, rank: Rank) -> float:
        limit_s = self.orders.start_s if rank.is_start else self.orders.step_s
        return min(limit_s, ORPHAN_S) if rank.is_orphan and rank.phase in WAITING else limit_s

    def report_stuck(self, stuck: Rank) -> None:
        limit = f"watchdog.{'start_s' if stuck.is_start else 'step_s'}={self.limit_s(stuck):g}"
        limit = "torchrun is gone" if stuck.is_orphan else limit
        reason = f"stuck: rank {stuck.rank} has been in {stuck.place} for {self.age_s(stuck):.0f} s ({limit})"
        ranks = self.alive.values()
        alike = len({(rank.step, rank.phase, rank.marks) for rank in ranks}) == 1
        absent = [number for number, slot in enumerate(self.slots) if slot.state == ABSENT]
        if absent:
            reason += f"; local rank {', '.join(map(str, absent))} has not come so far"
        elif alike and self.orders.has_other_machines:
            reason += "; all ranks of this machine wait alike, perhaps for a rank of another machine"
        reason += f"; stacks in {self.log.name}/stacks_rank_*.txt"
        try:
            if self.may_log():
                self.write_outcome("stuck", reason, stuck)
                self.save_stacks(reason)
                for rank in ranks:
                    self.write_exit(rank, reason)
        finally:
            say(reason, *map(self.line, ranks))

    def line(self, rank: Rank) -> str:
        """Of all that is known, for the reader who looks for the culprit."""
        return (
            f"  rank {rank.rank} (pid {rank.pid}): {rank.place} for {self.age_s(rank):.1f} s, limit "
            f"{self.limit_s(rank):g} s; process state {rank.process_state}, peak host memory {gigabytes(rank)}"
        )

    def save_stacks(self, reason: str) -> None:
        """Have all ranks dump the stacks of their threads, and add these to the log under a header."""
        paths = {rank.local_rank: stacks_path(self.folder, rank.local_rank) for rank in self.alive.values()}
        for rank in self.alive.values():
            if running(rank.pid, rank.started):
                os.kill(rank.pid, stacks_signal())
        sizes: list[int] | None = None
        end_s = time.monotonic() + DUMP_S
        while time.monotonic() < end_s:  # until all have begun, and none goes on
            before, sizes = sizes, [path.stat().st_size for path in paths.values()]
            if all(sizes) and sizes == before:
                break
            time.sleep(DUMP_S / 20)
        header = [f"---- {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {reason}"]
        header += map(self.line, self.alive.values())
        for rank in self.alive.values():
            dump = paths[rank.local_rank].read_bytes()
            dump = dump or f"no stacks: the process did not answer (state {rank.process_state})\n".encode()
            with (self.log / f"stacks_rank_{rank.rank:04d}.txt").open("ab") as file:
                file.write("\n".join([*header, ""]).encode() + dump)

    def kill(self, rank: Rank) -> None:
        if running(rank.pid, rank.started):
            os.kill(rank.pid, signal.SIGKILL)

    # ---- gone ------------------------------------------------------------------------------------------------------

    def report_gone(self, gone: Iterable[Rank]) -> None:
        """Ranks that ended without a word: the kernel's, a driver's or somebody's doing."""
        for rank in gone:
            if self.oom_kills[0] < self.oom_kills[-1]:
                what = f"out of host memory: the kernel killed rank {rank.rank} in {rank.place}"
                advice = "; lower data.num_workers, data.prefetch or micro_batch_size"
            else:
                what, advice = f"killed: rank {rank.rank} is gone without a word in {rank.place}", ""
            reason = f"{what}; peak host memory {gigabytes(rank)}{advice}"
            if not self.may_log():
                say(reason)
                continue
            self.write_outcome("out_of_host_memory" if advice else "killed", reason, rank)
            if self.write_exit(rank, reason):
                say(reason)

    @property
    def owner(self) -> str:
        """By which lease the run folder is this job's; empty until a rank of this machine knows."""
        return next((slot.owner.decode() for slot in self.slots if slot.owner), "")

    @cached_property
    def run_folder(self) -> Folder:
        return open_folder(self.orders.run_dir, S3Config(**self.orders.s3))

    def may_log(self) -> bool:
        """Whether to the run folder: not after another job has taken it."""
        try:
            if self.owner:
                check_owner(self.run_folder, self.owner)
        except LeaseLost as lost:
            say(str(lost))
            return False
        return True

    def write_outcome(self, kind: str, reason: str, rank: Rank) -> None:
        """How the run ended, unless a rank knew better: those that lost a peer only know that."""
        if not self.owner:  # perhaps the run folder is another job's
            return
        goes_on = may_go_on(kind, self.orders.previous)
        outcome = Outcome("failed", kind, reason, rank.step, None, goes_on=goes_on)
        write_outcome(self.run_folder, outcome, replaces=LOST_PEER)

    def write_exit(self, rank: Rank, reason: str) -> bool:
        """The exit file of a rank that has none yet (see `RunFolder.exit_file`); False if it has."""
        content = {"reason": reason, "step": rank.step, "time_unix_s": round(time.time(), 1)}
        return LocalFolder(self.log).create(f"exit_rank_{rank.rank:04d}.json", canonical_json(content))


def in_time(action: Callable[[], None]) -> None:
    """Act, but do not wait for ever; what goes wrong is printed."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(WORD_S)


def say(*lines: str) -> None:
    print("\n".join(f"watchdog: {line}" for line in lines), file=sys.stderr, flush=True)


def running(pid: int, started: int) -> Process | None:
    """None if it has ended, although its number may be in use again."""
    process = read_process(pid)
    return process if process and process.started == started and process.state not in OVER_STATES else None


def gigabytes(rank: Rank) -> str:
    return f"{rank.peak_bytes / 1e9:.1f} GB" if rank.peak_bytes else "unknown"


def main() -> None:
    leave_signals_to_the_parent(0)  # Slurm and systemd signal every process of a job; the ranks decide, this one stays
    use_console("stdout", "stderr")  # a full disk may not keep it from ending ranks
    orders = Orders(**json.loads(sys.argv[1]))
    remove_leftovers(Path(orders.folder).parent)
    WatchdogProcess(orders, oom_counter=find_oom_counter()).run()
    os._exit(0)  # a thread that still hangs in the log does not hold this process


if __name__ == "__main__":
    main()
