"""One attempt at a run, from the check of the run folder to the record of its end."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from train.checkpoints.manifest import NoneValid, OtherVersion, Untrusted
from train.checkpoints.saver import SavesFail
from train.config import Failure, InputError, NotPermitted, Plan, TrainConfig
from train.data.batches.loader import LARGER
from train.machine.launched import launched
from train.machine.memory import count_oom_kills, find_oom_counter, own_peak_bytes
from train.machine.processes import age_s, read_process
from train.machine.torchrun import has_rejected
from train.models.memory_estimate import advice
from train.parallel.backend import peak_device_bytes
from train.parallel.backends import Backend, Workload, open_backend
from train.parallel.ranks import World
from train.run.stopping import Notices, StoppedEarly, StopRequest
from train.run.watchdog import Watchdog
from train.run_folder.outcome import ENDS, OUT_OF_MEMORY, STOP_FILE, Outcome, may_continue
from train.run_folder.ownership import LeaseLost
from train.run_folder.run_folder import RunFolder, set_up_logging, side_channel
from train.storage.folders import make_folder
from train.tasks import Task

logger = logging.getLogger("train")
KILLED_LOADER = "killed by signal: Killed"
FULL_SHARED_MEMORY = "killed by signal: Bus error"  # a loader process wrote to a full /dev/shm
OOM_COUNTER = find_oom_counter()
OOM_KILLS_BEFORE = count_oom_kills(OOM_COUNTER)
# from torch's CPU allocator, and for ENOMEM
HOST_MEMORY_ERRORS = ("can't allocate memory", "Cannot allocate memory")
KINDS: dict[type[BaseException], str] = {
    InputError: "refused",
    NoneValid: "no_valid_checkpoint",
    Untrusted: "untrusted_checkpoint",
    OtherVersion: "other_version",
    FloatingPointError: "not_finite",
    LeaseLost: "lease_lost",
    SavesFail: "saves_fail",
    MemoryError: "out_of_host_memory",
    SystemExit: "left_at_once",
}


@dataclass
class Attempt:
    """The settings, task, run folder and state of an attempt."""

    cfg: TrainConfig
    plan: Plan
    task: Task
    folder: RunFolder
    identity: dict[str, Any]
    stop: StopRequest
    saves: bool = True  # False: nothing is saved, and the ranks may have separate run folders
    began_s: float = field(default_factory=lambda: time.monotonic() - started_ago_s())
    checkpoint: int | None = None  # step of the newest committed checkpoint, known on rank 0
    asked: str = ""  # the requests to stop, with the ranks that received them
    kind: str = ""  # the kind of the first request
    is_described: bool = False  # whether the run may have written environment.json

    def __post_init__(self) -> None:
        self.watch = Watchdog(self.cfg.watchdog, self.folder)

    def join(self, work: Workload | None = None) -> Backend:
        """Open the device and join the other ranks. Every rank must call this."""
        self.watch.phase("join", is_start=True)
        with self.stop.nothing_to_save():
            backend = open_backend(self.cfg.backend, self.cfg.instance, work=work)
        self.watch.compiles = backend.is_compiling
        self.joined(backend.world)
        return backend

    def joined(self, world: World) -> None:
        """Exchange facts between ranks. Every rank must call this."""
        # Rank 0 sends the owner of the folder and the outcome of the last attempt. All ranks send their process ids,
        # which the watchdogs of their machine need.
        process = read_process(os.getpid())
        started = process.started if process else 0
        here = (os.getpid(), started, self.watch.handle)
        owner = self.folder.ownership.owner or ""
        everyone = world.all_gather_object((self.folder.previous, owner, here))
        self.folder.previous, owner, _ = everyone[0]
        if world.rank != 0:
            self.folder.ownership.follow(owner if self.saves else "")
        # Without torchrun, ranks may be in containers, which do not see each other.
        if launched().is_under_torchrun:
            first = world.rank - world.local_rank
            others = set(range(first, first + world.local_size)) - {world.rank}
            self.watch.joined({rank: everyone[rank][2] for rank in sorted(others)})

    def sees_owner(self) -> bool:
        """Return whether this rank can read rank 0's lease, that is, whether they share the run folder."""
        try:
            self.folder.ownership.check()
        except LeaseLost:
            return False
        return True

    def has_stop_file(self) -> bool:
        return self.folder.folder.size(STOP_FILE) is not None


def started_ago_s() -> float:
    """Return the seconds since the run was started: the age of this process, or of torchrun, which restarts it."""
    return age_s(os.getppid() if launched().is_under_torchrun else os.getpid())


@contextmanager
def begin(attempt: Attempt) -> Iterator[Attempt]:
    """Take ownership of the run folder and start the watchdog and `Notices`. If the attempt fails, record that.

    An attempt that is rejected before it has written environment.json keeps the outcome of the previous attempt. Raises
    InputError if another job owns the folder.
    """
    cfg = attempt.cfg
    folder = attempt.folder
    launch = launched()
    set_up_logging(None)
    folder.check_is_ours(attempt.identity, force=cfg.resume.force)
    with ExitStack() as stack:
        make_folder(folder.path)
        if launch.rank == 0:
            with attempt.stop.nothing_to_save():
                stack.enter_context(folder.ownership)
        try:
            folder.open()
            set_up_logging(
                folder.log_file, may_write=lambda: folder.is_remote or not folder.ownership.lost
            )
            stack.enter_context(attempt.watch)
            if launch.local_rank == 0:
                stack.enter_context(
                    Notices(cfg, attempt.stop, attempt.has_stop_file, attempt.began_s)
                )
            yield attempt
        except BaseException as error:
            kind = kind_of(error)
            if not attempt.is_described and (kind == "refused" or has_rejected()):
                folder.put_back_outcome()
                raise
            if kind in OUT_OF_MEMORY:  # not a bug: one line says which settings to change
                memory = OutOfMemory(kind, out_of_memory(kind, error, cfg))
                record_failure(memory, attempt)
                raise memory from error
            record_failure(error, attempt)
            raise


def record_end(attempt: Attempt, reason: str, step: int) -> None:
    """Record that the run is done or stopped, on all ranks. Raises LeaseLost if another job has taken the folder."""
    folder = attempt.folder
    with folder.logging_failures():
        folder.ownership.check()
    lost = folder.ownership.failure
    if lost is not None:
        raise lost
    if launched().rank != 0:
        return
    is_stop = reason not in ENDS
    outcome = Outcome(
        outcome="stopped" if is_stop else "done",
        kind=attempt.kind or reason,
        reason=attempt.asked or reason,
        step=step,
        checkpoint=attempt.checkpoint,
        goes_on=is_stop,
    )
    if folder.is_remote:  # the outcome promises that the metrics are in S3
        folder.mirror()
    folder.outcome(outcome, is_of_all=True)
    with suppress(NotPermitted), side_channel(f"the file {STOP_FILE}"):
        if attempt.has_stop_file():
            folder.folder.remove(STOP_FILE)  # otherwise it would also stop the next attempt


def record_failure(error: BaseException, attempt: Attempt) -> None:
    """Record that the attempt failed. If several ranks fail, the outcome of the first is kept."""
    if isinstance(error, StoppedEarly):
        kind = str(error)
    else:
        kind = kind_of(error)
    ownership = attempt.folder.ownership
    if isinstance(error, LeaseLost):  # the error may come from another rank
        ownership.lost = ownership.lost or str(error)
    if ownership.lost or ownership.owner is None:  # another job owns the folder, or may own it
        return
    outcome = "failed"
    reason = f"failed: {type(error).__name__}: {error}"
    if kind == "refused":
        outcome = "refused"
        reason = f"rejected: {error}"
    elif isinstance(error, StoppedEarly):
        outcome = "stopped"
        reason = f"{error} came before there was anything to save"
    elif isinstance(error, SystemExit):
        first = attempt.stop.signal
        outcome = "stopped"
        reason = f"exited immediately on a second signal ({first} came first)"
    elif isinstance(error, OutOfMemory):
        reason = f"failed: {error}"
    goes_on = may_continue(kind, attempt.folder.previous.get("kind", ""))
    attempt.folder.outcome(
        Outcome(outcome, kind, reason, None, attempt.checkpoint, goes_on=goes_on)
    )


class OutOfMemory(Failure):
    """A failure because memory ran out. Its text names the settings to lower, and `kind` says which memory it was."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def kind_of(error: BaseException) -> str:
    """Return a failure's identifier, by which launchers decide whether to start the run again."""
    if isinstance(error, OutOfMemory):
        return error.kind
    text = str(error)
    kind = type(error).__name__
    for cls, name in KINDS.items():
        if isinstance(error, cls):
            kind = name
            break
    # Torch's class, and XLA's message.
    if kind == "OutOfMemoryError" or "RESOURCE_EXHAUSTED" in text:
        return "out_of_device_memory"
    if FULL_SHARED_MEMORY in text:
        return "out_of_shared_memory"
    was_killed = KILLED_LOADER in text and count_oom_kills(OOM_COUNTER) > OOM_KILLS_BEFORE
    if was_killed or any(words in text for words in HOST_MEMORY_ERRORS):
        return "out_of_host_memory"
    return kind


def out_of_memory(kind: str, error: BaseException, cfg: TrainConfig) -> str:
    """Describe an out-of-memory failure: the error, the peak memory, and the settings to lower."""
    first_line = (str(error).strip() or type(error).__name__).split("\n")[0]
    if kind == "out_of_shared_memory":
        return f"out of shared memory: {first_line.partition('. ')[0]}: /dev/shm is full; {LARGER}"
    ranks = launched().world_size
    cure = advice(cfg, world_size=ranks)
    peak = f"peak {own_peak_bytes() / 1e9:.3g} GB of host memory"
    device_bytes = peak_device_bytes()
    if device_bytes:
        peak += f", {device_bytes / 1e9:.3g} GB of device memory"
        if cfg.backend.cuda_graphs:
            cure += ", set backend.cuda_graphs=false"
    if kind == "out_of_host_memory":
        cure += ", lower data.num_workers"
    return f"{kind.replace('_', ' ')}: {first_line}; {peak}; {cure}"
