"""One start of a run, from the first look at its folder to the word it leaves: who owns it, watches, and ends it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from train import machine
from train.backend.memory import peak_device_bytes
from train.checkpoints.manifest import NoneValid, OtherVersion, Untrusted
from train.checkpoints.saver import SavesFail
from train.checkpoints.unsent import STAGING, adopt
from train.config import InputError, Plan, TrainConfig, launched_rank
from train.host_memory import count_oom_kills, find_oom_counter, own_peak_bytes
from train.lease import Lease, LeaseLost
from train.notices import Notices
from train.outcome import NAME, OUT_OF_MEMORY, Outcome, launch, may_go_on
from train.preempt import StopRequest
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


def started_ago_s() -> float:
    """Of the run's command: torchrun's, whose restarts are the same start."""
    return machine.age_s(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())


@contextmanager
def begin(life: Life) -> Iterator[Life]:
    """Take the run folder, watch over the run, and leave word at the end. Raises InputError if another job has the
    folder.
    """
    cfg, folder = life.cfg, life.folder
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    folder.check_is_ours(life.identity, force=cfg.resume.force)
    make_folder(folder.path)
    with ExitStack() as stack:
        if launched_rank() == 0:
            life.lease = stack.enter_context(Lease(folder.folder, cfg.lease.ttl_s))
            adopt(folder.path / STAGING, life.lease)
            life.is_ours = True
        try:
            folder.open()
            set_up_logging(folder.log)
            life.watch = Watchdog(
                cfg.watchdog,
                folder.log,
                rank=launched_rank(),
                local_rank=local_rank,
                local_world_size=local_world_size,
                folder=folder.location,
                s3=cfg.s3,
                previous=folder.previous.get("kind", ""),
            )
            stack.enter_context(life.watch)
            if local_rank == 0:
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
        if launched_rank() == 0 and folder.last_outcome():
            folder.folder.remove(NAME)
            folder.outcome(
                Outcome("refused", "refused", f"refused: {error}", None, None, goes_on=False, launch=launch())
            )
        raise


def leave_word(life: Life, reason: str, step: int) -> None:
    """Of a run that ended in order. Every rank calls it, rank 0 speaks for all."""
    folder = life.folder
    folder.exit_file(reason, step)
    if launched_rank() == 0:
        ended = "done" if reason in ENDS else "stopped"
        asked, goes_on = life.asked or reason, ended == "stopped"
        word = Outcome(ended, reason, asked, step, life.checkpoint, goes_on=goes_on, launch=launch())
        folder.mirror()
        folder.outcome(word)
        if folder.folder.size(STOP_FILE) is not None:
            folder.folder.remove(STOP_FILE)  # obeyed: the same command goes on


def leave_word_of(error: BaseException, life: Life) -> None:
    """Of a run that failed. The first rank to do so is heard."""
    kind, reason = kind_of(error), f"{type(error).__name__}: {error}"
    if not life.is_ours or kind == "lease_lost":  # the folder is another job's
        return
    if kind in OUT_OF_MEMORY:
        reason = out_of_memory(kind, error)
    if kind == "refused":
        outcome, reason = "refused", f"refused: {error}"
    elif isinstance(error, SystemExit):
        outcome, reason = "stopped", f"left at once on a second signal ({life.stop.signal} came first)"
    else:
        outcome, reason = "failed", f"failed: {reason}"
    goes_on = may_go_on(kind, life.folder.previous.get("kind", ""))
    life.folder.exit_file(reason, None)
    life.folder.outcome(Outcome(outcome, kind, reason, None, life.checkpoint, goes_on=goes_on, launch=launch()))


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
