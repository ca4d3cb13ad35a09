"""The right to write to a run folder: a second job is rejected, and a job that lost the folder notices before a commit.

lease/00000007.json   one file per owner, a `Lease`; the current owner has the highest number, the fencing number

A job takes the folder by creating the file with the next number, which only one of several jobs can do. When it ends,
it removes all but the two newest files. The owner rewrites its file regularly, each time with a higher count of
heartbeats. A new job on another machine, which cannot see the owner's process, watches this count; clocks are never
compared. Jobs list the folder to find the owner: a job that was suspended, and then looked only for the next number,
would miss later owners.

This table lists the changes to the run folder, and the check of `Ownership` that precedes each:

    most files                       `check`, each time: OwnedFolder
    a half-written line              `check`: train/run_folder/run_folder.py (cut_half_written_line)
    metrics.jsonl and its curves     `may_append`: train/observe/journal.py
    logs                             `lost`, set by the next heartbeat: train/run_folder/run_folder.py (set_up_logging)
    stacks                           `check`: train/run/watchdog.py (report)
    checkpoints, and their removal   `check`: train/checkpoints/saver.py, train/run/checkpoint_manager.py
    export/                          `check`, before and after: train/run_folder/exported.py, train/observe/card.py
    STOP                             nothing: launch/commands.py (stop), launch/supervise.py (StopFile); it only asks
    removal of STOP                  `check`: train/run/attempt.py; nothing: launch, when no attempt runs
    wandb/                           nothing: train/observe/trackers.py; each attempt has files of its own
    report/                          nothing: train/tools/report.py, train/tools/finetune.py

Code that writes another file must use `RunFolder.folder`, which is an OwnedFolder, and add the file to this table. A
command other than the run itself must take a lease.

If the run folder is in S3, this machine's metrics and logs are copies, which may always grow. A change that was allowed
may reach S3 after another job took the folder. S3 itself then rejects a commit (train/checkpoints/store_s3.py), and the
metrics of each owner are a file of their own. Importing this does not import torch.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from train.config import Failure, InputError, LeaseConfig, NotPermitted
from train.machine.launched import launched
from train.machine.processes import is_alive, read_process
from train.storage.folders import Folder, canonical_json, is_s3
from train.storage.schema import BadContent, read_object, record

logger = logging.getLogger("train")
LEASES = "lease/"
LEASE_FILE = re.compile(rf"{LEASES}(\d{{8,}})\.json")
MAX_PID, MAX_TTL_S = 2**31, 1e6  # a lease beyond these limits was not written by this program
HEARTBEATS = 6  # the owner's heartbeats per `ttl_s`
LOOKS = 12  # a waiting job's checks for them per `ttl_s`


class LeaseLost(Failure):
    """An error raised when another job owns the run folder: nothing more may be written there."""


# ---- the lease files -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lease:
    """The content of a lease file. The process and its machine are those of the owner's rank 0."""

    owner: str  # a unique id
    host: str
    pid: int
    process_start: int | None  # clock ticks since boot; None: not Linux
    boot_id: str | None
    pid_namespace: str | None
    job: str | None  # the id of the Slurm job, or of torchrun's run
    started: str  # only shown to people, never parsed
    ttl_s: float
    heartbeats: int = 0
    step: int = 0
    released: bool = False

    def __str__(self) -> str:
        if self.job:
            job = f"job {self.job}, "
        else:
            job = ""
        return f"{job}process {self.pid} on {self.host}, since {self.started}"

    def is_of_machine(self, other: Lease) -> bool:
        """Return whether process ids mean the same in both leases."""
        # Cloned machines share a boot id, but not a host name.
        if self.boot_id is None or self.pid_namespace is None:
            return False
        here = (self.host, self.boot_id, self.pid_namespace)
        return here == (other.host, other.boot_id, other.pid_namespace)


def own_lease(ttl_s: float) -> Lease:
    """Return a new lease of this process."""
    process = read_process(os.getpid())
    boot_id: str | None = None
    pid_namespace: str | None = None
    with suppress(OSError):  # without these facts, a new job must watch the owner's heartbeats
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    run_id = launched().run_id
    if run_id == "none":  # torchrun's default
        run_id = None
    return Lease(
        owner=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        process_start=process.started if process else None,
        boot_id=boot_id,
        pid_namespace=pid_namespace,
        job=os.environ.get("SLURM_JOB_ID") or run_id,
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        ttl_s=ttl_s,
    )


def lease_name(number: int) -> str:
    return f"{LEASES}{number:08d}.json"


def lease_numbers(folder: Folder) -> list[int]:
    """Return the numbers of the leases in the folder."""
    matches = (LEASE_FILE.fullmatch(name) for name in folder.names(LEASES))
    return [int(match[1]) for match in matches if match]


def newest_lease(folder: Folder) -> tuple[int, bytes]:
    """Return the highest number (0: no lease) and the content of its file; b"" if the file was just removed."""
    number = max(lease_numbers(folder), default=0)
    content = b""
    if number:
        with suppress(FileNotFoundError):
            content = folder.read(lease_name(number))
    return number, content


def parse_lease(content: bytes) -> Lease | None:
    """Return the lease in a file; None if the file is damaged or from another program."""
    try:
        lease = record(Lease, read_object(content))
    except BadContent:
        return None
    is_possible = 0 < lease.ttl_s < MAX_TTL_S and 0 < lease.pid < MAX_PID
    return lease if is_possible else None


def owner_words(content: bytes) -> str:
    return str(parse_lease(content) or "an owner whose lease file cannot be read")


# ---- the right -------------------------------------------------------------------------------------------------------


class Ownership:
    """The right of this process to write to a run folder.

    Rank 0 of a job takes the folder (as a context manager, or by `take` and `release`), and a thread renews the lease.
    The other ranks `follow` rank 0. In a program that does neither, `check` has no effect.

    Call `check` before each change: after `ttl_s` without a heartbeat, another job may take the folder. Heartbeats stop
    while a job is suspended, cut off from the folder, or in a call that holds the GIL.
    """

    def __init__(
        self,
        folder: Folder,
        ttl_s: float = LeaseConfig.ttl_s,
        *,
        on_wait: Callable[[str], None] = logger.info,
    ) -> None:
        self.folder = folder
        self.ttl_s = ttl_s
        self.on_wait = on_wait
        self.owner: str | None = None  # the id in the lease; "": nothing is checked; None: unknown
        self.lost: str | None = None  # the reason, once another job owns the folder
        # The fields below are set only in the process that took the folder.
        self.number = 0  # the fencing number, at least 1
        self.step = 0  # the training step, set by the loop and written with each heartbeat
        self.previous: Lease | None = None  # the previous lease; None: absent or damaged
        # Owners with lower numbers have certainly ended; the previous owner may only be silent.
        self.ended_below = 1
        self.heartbeats = 0
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.renew)

    def follow(self, owner: str) -> None:
        """Write under the lease `owner`, which rank 0 holds. An empty `owner` means that only this rank writes."""
        self.owner = owner

    def check(self) -> None:
        """Raise LeaseLost if another job now owns the folder. In S3 this sends two requests and raises their errors."""
        if not self.owner:
            return
        number, content = newest_lease(self.folder)
        lease = parse_lease(content)
        if lease is not None and lease.owner == self.owner:
            return
        now = "its file is gone"
        if number:
            now = f"it now belongs to {owner_words(content)} (lease {number})"
        self.lost = (
            f"the lease of {self.folder.location} is lost: {now}; this job may not write there"
        )
        raise LeaseLost(self.lost)

    @property
    def failure(self) -> LeaseLost | None:
        if self.lost:
            return LeaseLost(self.lost)
        return None

    def may_append(self) -> bool:
        """Return whether the run's files on this machine may still grow. Copies of a folder in S3 always may."""
        if is_s3(self.folder.location):
            return True
        try:
            self.check()
        except LeaseLost:
            return False
        except (InputError, OSError):
            pass  # the lease cannot be read now, which does not mean that it is lost
        return True

    def __enter__(self) -> Ownership:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Take the folder. If it is unknown whether the owner has ended, wait up to `ttl_s` for its heartbeat.

        Raises InputError if the owner is alive, or if the server would let two jobs own the folder.
        """
        self.claim = own_lease(self.ttl_s)
        # The loop reads the result of `create` from the folder: S3's response may be lost, and a job that was suspended
        # may create a file that others removed long ago.
        while True:
            number, content = newest_lease(self.folder)
            lease = parse_lease(content)
            if lease is not None and lease.owner == self.claim.owner:
                break
            if number == 0 or self.is_over(number, content):
                self.number = number + 1
                self.heartbeats = 0
                self.previous = lease
                self.folder.create(lease_name(self.number), self.content())
        self.check_creates_once()
        self.owner = self.claim.owner
        self.lost = None
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.renew, name="lease", daemon=True)
        self.thread.start()

    def check_creates_once(self) -> None:
        """Raise InputError, after removing the lease, if a file can be created twice: two jobs could own the folder."""
        name = lease_name(self.number)
        if self.folder.create(name, self.content()):
            self.folder.remove(name)
            raise InputError(
                f"run_dir={self.folder.location}: its server ignores If-None-Match, so two jobs could own one run "
                "folder and overwrite each other's checkpoints; use a server with conditional writes, or a disk"
            )

    def release(self) -> None:
        """Let the next job take the folder immediately. Never raises an error: if this fails, the next job waits."""
        self.stop.set()
        if self.thread.ident is None:  # this process never took the folder
            return
        self.thread.join(self.ttl_s)
        try:
            if self.thread.is_alive():
                raise TimeoutError("a heartbeat is still being written")
            self.heartbeat(released=True)
            for number in lease_numbers(self.folder):
                if number < self.number - 1:
                    self.folder.remove(lease_name(number))
        except (LeaseLost, NotPermitted):
            pass  # another job owns the folder, or old leases may not be removed
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("%s is not released: %s", self.folder.location, reason)

    # ---- the owner's thread -----------------------------------------------------------------------------------------

    def renew(self) -> None:
        is_failing = False
        while not self.stop.wait(self.ttl_s / HEARTBEATS):
            try:
                self.heartbeat()
                is_failing = False
            except LeaseLost as lost:
                logger.error(str(lost))
                return
            except Exception as error:
                # Training continues. If the fault lasts, the next commit raises it.
                if not is_failing:
                    risk = (
                        f"without a heartbeat for {self.ttl_s:g} s another job may take the folder"
                    )
                    reason = f"{type(error).__name__}: {error}"
                    logger.warning("the lease is not renewed: %s; %s", reason, risk)
                is_failing = True

    def heartbeat(self, *, released: bool = False) -> None:
        self.check()
        self.heartbeats += 1
        self.folder.write(lease_name(self.number), self.content(released=released))

    def content(self, *, released: bool = False) -> bytes:
        lease = replace(
            self.claim,
            heartbeats=self.heartbeats,
            step=self.step,
            released=released,
        )
        return canonical_json(asdict(lease))

    # ---- is the owner gone? -----------------------------------------------------------------------------------------

    def is_over(self, number: int, content: bytes) -> bool:
        """Return whether this lease has ended; False if it has changed. Raises InputError if its owner is alive."""
        lease = parse_lease(content)
        if lease is not None:
            is_ended = lease.released
            if not is_ended and lease.is_of_machine(self.claim):
                alive = is_alive(lease.pid, lease.process_start)
                if alive:
                    raise InputError(self.in_use(content))
                is_ended = alive is False
            if is_ended:
                self.ended_below = number + 1
                return True
        self.ended_below = number
        # The owner's heartbeats may be less frequent than ours.
        ttl_s = max(self.ttl_s, lease.ttl_s if lease else 0)
        return self.stays_silent(number, content, ttl_s)

    def stays_silent(self, number: int, content: bytes, ttl_s: float) -> bool:
        """Watch a lease for `ttl_s`. Return whether it did not change; False if its owner releases or loses it.

        Raises InputError on a heartbeat.
        """
        until = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + ttl_s))
        self.on_wait(
            f"{self.folder.location} was last used by {owner_words(content)}, which may still be running: watching "
            f"for its heartbeat for up to {ttl_s:g} s (until {until})"
        )
        # a count, not a deadline: a slow response must not count as silence
        for _ in range(LOOKS):
            time.sleep(ttl_s / LOOKS)
            number_now, content_now = newest_lease(self.folder)
            if (number_now, content_now) == (number, content):
                continue
            seen = parse_lease(content_now)
            is_released = seen is not None and seen.released
            if number_now == number and not is_released:
                raise InputError(self.in_use(content_now))
            return False
        return True

    def in_use(self, content: bytes) -> str:
        return (
            f"run_dir={self.folder.location} is in use by {owner_words(content)}; stop it or choose another run_dir "
            f"(if it is gone, its lease expires after lease.ttl_s={self.ttl_s:g} seconds without a heartbeat)"
        )


# ---- the files of the run -------------------------------------------------------------------------------------------


class OwnedFolder:
    """A run folder whose files only the owner can change. See `train.storage.folders.Folder`."""

    def __init__(self, storage: Folder, ownership: Ownership) -> None:
        self.storage = storage
        self.ownership = ownership
        self.location = storage.location
        self.read = storage.read
        self.open = storage.open
        self.download = storage.download
        self.head = storage.head
        self.size = storage.size
        self.names = storage.names
        self.listing = storage.listing
        self.names_here = storage.names_here

    def write(self, name: str, content: bytes) -> None:
        self.ownership.check()
        self.storage.write(name, content)

    def create(self, name: str, content: bytes) -> bool:
        self.ownership.check()
        return self.storage.create(name, content)

    def upload(self, name: str, path: Path) -> None:
        self.ownership.check()
        self.storage.upload(name, path)

    def remove(self, name: str) -> None:
        self.ownership.check()
        self.storage.remove(name)
