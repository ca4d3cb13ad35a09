"""One start of a run, from the first look at its folder to the word it leaves: who owns it, watches, and ends it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from train import machine
from train.backend.memory import peak_device_bytes
from train.checkpoints.manifest import NoneValid, OtherVersion, Untrusted
from train.checkpoints.saver import SavesFail
from train.checkpoints.unsent import STAGING, adopt
from train.config import InputError, Plan, TrainConfig, Unreachable
from train.host_memory import count_oom_kills, find_oom_counter, own_peak_bytes
from train.launched import launched
from train.lease import Lease
from train.notices import Notices
from train.outcome import OUT_OF_MEMORY, Outcome, may_go_on
from train.ownership import LeaseLost, check_owner, find_identity
from train.preempt import StoppedEarly, StopRequest
from train.run_folder import RunFolder, set_up_logging
from train.storage import make_folder
from train.tasks import Task
from train.watchdog import Watchdog

logger = logging.getLogger("train")
STOP_FILE = "STOP"
ENDS = ("done", "early_stop")
KILLED_LOADER = "killed by signal: Killed"
OOM_COUNTER = find_oom_counter()
OOM_KILLS_BEFORE = count_oom_kills(OOM_COUNTER)
HOST_MEMORY_WORDS = ("can't allocate memory", "Cannot allocate memory")  # torch's CPU allocator, errno ENOMEM


@dataclass
class Life:
    cfg: TrainConfig
    plan: Plan
    task: Task
    folder: RunFolder
    identity: dict[str, Any]
    stop: StopRequest
    began_s: float = field(default_factory=lambda: time.monotonic() - started_ago_s())
    is_ours: bool = False  # the run folder; ranks other than 0 know once they have joined
    checkpoint: int | None = None  # the newest that is committed, on rank 0
    asked: str = ""  # who asked it to stop
    lease: Lease | None = None  # rank 0's
    watch: Watchdog = field(init=False)
    notices: Notices | None = None  # of local rank 0

    @property
    def failure(self) -> LeaseLost | None:
        return LeaseLost(self.lease.lost) if self.lease is not None and self.lease.lost else None

    @property
    def owner(self) -> str:
        """The owner that rank 0's lease names; nothing on other ranks."""
        return "" if self.lease is None else str(self.lease.claim["owner"])

    def joined(self, previous: dict[str, Any], owner: str) -> None:
        """All ranks, as rank 0 tells them: how the last attempt ended, and by which lease the run folder is theirs."""
        self.is_ours, self.folder.previous, self.watch.slot.owner = True, previous, owner.encode()
        if self.lease is None:
            self.folder.guard = partial(check_owner, self.folder.storage, owner)

    def may_log(self) -> bool:
        """Whether to the run folder: not after it was lost, unless it is this machine's copy."""
        return self.folder.is_remote or not (self.folder.is_lost or self.failure)


def started_ago_s() -> float:
    """Of the run's command: torchrun's, whose restarts are the same start."""
    return machine.age_s(os.getppid() if launched().is_under_torchrun else os.getpid())


@contextmanager
def begin(life: Life) -> Iterator[Life]:
    """Take the run folder, watch over the run, and leave word at the end. Raises InputError if another job has the
    folder.
    """
    cfg, folder, launch = life.cfg, life.folder, launched()
    set_up_logging(None)
    folder.check_is_ours(life.identity, data_path=cfg.data.path, force=cfg.resume.force)
    make_folder(folder.path)
    with ExitStack() as stack:
        if launch.rank == 0:
            with life.stop.nothing_to_save():
                life.lease = stack.enter_context(Lease(folder.storage, cfg.lease.ttl_s))
            adopt(folder.path / STAGING, life.lease)
            life.is_ours, folder.guard = True, life.lease.check
        try:
            folder.open()
            set_up_logging(folder.log, may_write=life.may_log)
            life.watch = Watchdog(
                cfg.watchdog,
                folder.log,
                rank=launch.rank,
                local_rank=launch.local_rank,
                local_world_size=launch.local_world_size,
                folder=folder.location,
                s3=cfg.s3,
                previous=folder.previous.get("kind", ""),
                owner=life.owner,
            )
            stack.enter_context(life.watch)
            if launch.local_rank == 0:
                stop_file: Callable[[], bool] = lambda: folder.folder.size(STOP_FILE) is not None  # noqa: E731
                life.notices = Notices(
                    cfg.preempt, life.stop, stop_file=stop_file, max_run_s=cfg.max_run_s, began_s=life.began_s
                )
                stack.enter_context(life.notices)
            yield life
        except BaseException as error:
            leave_word_of(error, life)
            raise


@contextmanager
def refusals(cfg: TrainConfig) -> Iterator[None]:
    """What is refused before the run folder is taken replaces an earlier life's word, which may say: goes on."""
    try:
        yield
    except InputError as error:
        folder = RunFolder(cfg.run_dir, cfg.s3)
        with suppress(InputError, Unreachable, OSError):  # the refusal matters more
            if launched().rank == 0 and find_identity(folder.storage) is not None and folder.last_outcome():
                outcome = Outcome("refused", "refused", f"refused: {error}", None, None, goes_on=False)
                folder.outcome(outcome, is_of_all=True)
        raise


def leave_word(life: Life, reason: str, step: int) -> None:
    """Of a run that ended in order. Every rank calls it, rank 0 speaks for all. LeaseLost if it is another job's."""
    folder = life.folder
    folder.check_owner()
    folder.exit_file(reason, step)
    if launched().rank == 0:
        ended = "done" if reason in ENDS else "stopped"
        asked, goes_on = life.asked or reason, ended == "stopped"
        word = Outcome(ended, reason, asked, step, life.checkpoint, goes_on=goes_on)
        folder.mirror()
        folder.outcome(word, is_of_all=True)
        if folder.folder.size(STOP_FILE) is not None:
            folder.folder.remove(STOP_FILE)  # obeyed: the same command goes on


def leave_word_of(error: BaseException, life: Life) -> None:
    """Of a run that failed. The first rank to do so is heard."""
    kind = str(error) if isinstance(error, StoppedEarly) else kind_of(error)
    reason = f"{type(error).__name__}: {error}"
    life.folder.is_lost |= kind == "lease_lost"
    if not life.is_ours or life.folder.is_lost:  # the folder is another job's
        return
    if kind in OUT_OF_MEMORY:
        reason = out_of_memory(kind, error)
    if kind == "refused":
        outcome, reason = "refused", f"refused: {error}"
    elif isinstance(error, StoppedEarly):
        outcome, reason = "stopped", f"{error} came before there was anything to save"
    elif isinstance(error, SystemExit):
        outcome, reason = "stopped", f"left at once on a second signal ({life.stop.signal} came first)"
    else:
        outcome, reason = "failed", f"failed: {reason}"
    goes_on = may_go_on(kind, life.folder.previous.get("kind", ""))
    life.folder.exit_file(reason, None)
    life.folder.outcome(Outcome(outcome, kind, reason, None, life.checkpoint, goes_on=goes_on))


def kind_of(error: BaseException) -> str:
    """The failure's short name, which launchers tell it by."""
    table: list[tuple[type[BaseException], str]] = [
        (InputError, "refused"),
        (NoneValid, "no_valid_checkpoint"),
        (Untrusted, "untrusted_checkpoint"),
        (OtherVersion, "other_version"),
        (FloatingPointError, "not_finite"),
        (LeaseLost, "lease_lost"),
        (SavesFail, "saves_fail"),
        (MemoryError, "out_of_host_memory"),
        (SystemExit, "left_at_once"),
    ]
    found = next((name for kind, name in table if isinstance(error, kind)), type(error).__name__)
    if found == "OutOfMemoryError" or "RESOURCE_EXHAUSTED" in str(error):  # torch's own; XLA's
        return "out_of_device_memory"
    if any(words in str(error) for words in HOST_MEMORY_WORDS) or lost_a_loader(error):
        return "out_of_host_memory"
    return found


def lost_a_loader(error: BaseException) -> bool:
    """Whether the kernel killed a loader process for want of memory, by torch's words and the kernel's counter."""
    return KILLED_LOADER in str(error) and count_oom_kills(OOM_COUNTER) > OOM_KILLS_BEFORE


def out_of_memory(kind: str, error: BaseException) -> str:
    device_bytes = peak_device_bytes()
    peak = f"peak {own_peak_bytes() / 1e9:.3g} GB of host memory"
    peak += f", {device_bytes / 1e9:.3g} GB of the device's" if device_bytes else ""
    first_line = (str(error).strip() or type(error).__name__).split("\n")[0]
    cure = "lower micro_batch_size (the global batch stays)"
    cure += ", data.num_workers or data.prefetch" if kind == "out_of_host_memory" else ""
    return f"{kind.replace('_', ' ')}: {first_line}; {peak}; {cure}"
