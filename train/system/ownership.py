"""The right to write a run folder: a second job is rejected, and a job that lost the folder notices before it commits.

lease/00000007.json   a file for each owner, see lease.py; the highest number is the owner's, its fencing number

A job takes the folder by creating the file of the next number, which only one of several jobs can do, and removes all
but the two newest files. The owner rewrites its file regularly, with its count of heartbeats raised by one. Clocks are
not compared: a job that cannot ask the owner's kernel watches the heartbeats.

We list the folder to find the owner: probing only the next number would miss later owners if this process was
suspended.

Changes to the folder ask `Ownership` first:

    most files, removal of STOP      `check`, each time: OwnedFolder
    settings, end of the metrics     `check`: train/system/run_folder.py (describe, cut_half_written_line)
    metrics.jsonl and its curves     `may_append`: train/observe/journal.py
    logs                             `lost`, which the next heartbeat sets: train/system/run_folder.py (set_up_logging)
    stacks                           `check`: train/run/watchdog.py (report)
    checkpoints, also their removal  `check`: train/checkpoints/saver.py, train/run/checkpoint_manager.py
    export/                          `check`, before and after: train/system/exported.py, train/observe/card.py
    checkpoints that users prune     a lease for the command: train/tools/checkpoints.py (prune)
    STOP                             nothing: launch/commands.py (stop), launch/supervise.py (StopFile)
    report/                          nothing: train/tools/report.py

Of a folder in S3 metrics and logs here are copies, which always grow. A change there that was allowed may come late:
then S3 itself rejects a commit (train/checkpoints/store_s3.py), and metrics and settings (`RunFolder.replace`).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from train.config import Failure, InputError, LeaseConfig, NotPermitted
from train.system.folders import Folder, canonical_json, is_s3
from train.system.lease import describe, identity, name_of, newest, numbers, parse, same_machine
from train.system.processes import is_alive
from train.system.schema import Head

logger = logging.getLogger("train")
HEARTBEATS, LOOKS = 6, 12  # per `ttl_s`, of the owner, and of a job that watches it


class LeaseLost(Failure):
    """An error because another job owns the run folder now: nothing more may be written there."""


class Ownership:
    """The right of this process to write a run folder.

    One process of a job, rank 0, takes the folder (a context manager, or `take` and `release`), and a thread renews the
    lease; the other ranks `follow` it. Other programs write at their own risk.

    `check` is to be called before each change: without a heartbeat for `ttl_s` (suspended, cut off, or in a call that
    holds Python's lock) a job may lose the folder to another one.
    """

    def __init__(
        self, folder: Folder, ttl_s: float = LeaseConfig.ttl_s, *, on_wait: Callable[[str], None] = logger.info
    ) -> None:
        self.folder, self.ttl_s, self.on_wait = folder, ttl_s, on_wait
        self.owner: str | None = None  # of the lease that counts here; "": none does; None: this rank does not know yet
        self.lost: str | None = None  # the reason, once another job owns the folder
        self.number = 0  # the fencing number, at least 1; like all below, unset unless this process took the folder
        self.step = 0  # set by the loop, written with the heartbeats
        self.previous: dict[str, Any] | None = None  # the last owner's lease, see KINDS; None: absent or damaged
        self.ended_below = 1  # owners of lower numbers have certainly ended; the last owner may only be silent
        self.claim: dict[str, Any] = {}
        self.heartbeats = 0
        self.is_withdrawn = False  # whether this job is rejected: then its lease is removed
        self.stop, self.thread = threading.Event(), threading.Thread(target=self.renew)

    def follow(self, owner: str) -> None:
        """Write for the job whose rank 0 has the lease `owner`; if that is empty, to a folder of this rank alone."""
        self.owner = owner

    def check(self) -> None:
        """Raise LeaseLost if another job now owns the folder. Takes two requests to S3, and raises their errors."""
        if self.owner:
            number, content = newest(self.folder)
            lease = parse(content)
            if lease is None or lease["owner"] != self.owner:
                now = f"{describe(content)} owns it, with lease {number}" if number else "its file is gone"
                self.lost = f"the lease of {self.folder.location} is lost: {now}; this job may not write there"
                raise LeaseLost(self.lost)

    @property
    def failure(self) -> LeaseLost | None:
        return LeaseLost(self.lost) if self.lost else None

    def may_append(self) -> bool:
        """Return whether the run's files on this machine may still grow: the copies of a folder in S3 always may."""
        try:
            if not is_s3(self.folder.location):
                self.check()
        except LeaseLost:
            return False
        except (InputError, OSError):  # the lease cannot be read now: lines wait if they cannot be written either
            pass
        return True

    def __enter__(self) -> Ownership:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Take the folder, after waiting up to `ttl_s` if nothing else can show that the owner has ended.

        Raises InputError if the owner is alive, or if two jobs could own the folder.
        """
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self.claim = {**identity(), "owner": uuid.uuid4().hex, "ttl_s": self.ttl_s, "started": started}
        # The answer to `create` may be lost, and a job that slept may create a file that others have long removed.
        while True:
            number, content = newest(self.folder)
            lease = parse(content)
            if lease is not None and lease["owner"] == self.claim["owner"]:
                break
            if number == 0 or self.is_over(number, content):
                self.number, self.heartbeats, self.previous = number + 1, 0, parse(content)
                self.folder.create(name_of(self.number), self.content())
        self.check_creates_once()
        self.owner, self.lost, self.stop = self.claim["owner"], None, threading.Event()
        self.thread = threading.Thread(target=self.renew, name="lease", daemon=True)
        self.thread.start()

    def check_creates_once(self) -> None:
        """Raise InputError, without a lease, if the folder lets a file be created twice: then two jobs could own it."""
        if self.folder.create(name_of(self.number), self.content()):
            self.folder.remove(name_of(self.number))
            raise InputError(
                f"run_dir={self.folder.location}: its server ignores If-None-Match, so two jobs could own one run "
                "folder and overwrite each other's checkpoints; use a server with conditional writes, or a disk"
            )

    def release(self) -> None:
        """Let the next job take the folder immediately. This never raises: if it fails, the next job waits."""
        self.stop.set()
        if self.thread.ident is None:  # never taken
            return
        self.thread.join(self.ttl_s)
        try:
            if self.thread.is_alive():
                raise TimeoutError("a heartbeat is still on its way")
            with suppress(LeaseLost):  # there is nothing to release
                self.heartbeat(released=True)
                older = [number for number in numbers(self.folder) if number < self.number - 1]
                with suppress(NotPermitted):
                    for number in [self.number] if self.is_withdrawn else older:
                        self.folder.remove(name_of(number))
        except Exception as error:
            logger.warning(f"{self.folder.location} is not released: {type(error).__name__}: {error}")

    # ---- the owner's thread -----------------------------------------------------------------------------------------

    def renew(self) -> None:
        failing = False
        while not self.stop.wait(self.ttl_s / HEARTBEATS):
            try:
                self.heartbeat()
                failing = False
            except LeaseLost as lost:
                logger.error(str(lost))
                return
            except Exception as error:  # training continues; the next commit has the same fault and raises it
                if not failing:
                    risk = f"without a heartbeat for {self.ttl_s:g} s another job may take the folder"
                    logger.warning(f"the lease is not renewed: {type(error).__name__}: {error}; {risk}")
                failing = True

    def heartbeat(self, *, released: bool = False) -> None:
        self.check()
        self.heartbeats += 1
        self.folder.write(name_of(self.number), self.content(released=released))

    def content(self, *, released: bool = False) -> bytes:
        changing = {"number": self.number, "beats": self.heartbeats, "step": self.step, "released": released}
        return canonical_json({**self.claim, **changing})

    # ---- is the owner gone? -----------------------------------------------------------------------------------------

    def is_over(self, number: int, content: bytes) -> bool:
        """Return whether this lease has ended; False if its file changed. Raises InputError if its owner is alive."""
        lease = parse(content)
        if lease is not None:
            alive = is_alive(lease["pid"], lease["process_start"]) if same_machine(lease, self.claim) else None
            if alive and not lease["released"]:
                raise InputError(self.in_use(content))
            if alive is False or lease["released"]:
                self.ended_below = number + 1
                return True
        self.ended_below = number
        ttl_s = max(self.ttl_s, lease["ttl_s"] if lease else 0)  # of the owner's heartbeats
        until = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + ttl_s))
        self.on_wait(
            f"{self.folder.location} was last used by {describe(content)}, whose state is not known here: watching for "
            f"a heartbeat, up to {ttl_s:g} s (until {until})"
        )
        for _ in range(LOOKS):  # counted, not timed: an answer that took long says nothing about the owner
            time.sleep(ttl_s / LOOKS)
            now = newest(self.folder)
            if now != (number, content):
                seen = parse(now[1])
                if now[0] == number and not (seen and seen["released"]):
                    raise InputError(self.in_use(now[1]))
                return False
        return True

    def in_use(self, content: bytes) -> str:
        return (
            f"run_dir={self.folder.location} is in use by {describe(content)}; stop it or choose another run_dir "
            f"(if it is gone, its lease ends by itself after lease.ttl_s={self.ttl_s:g} without a heartbeat)"
        )


# ---- the files of the run -------------------------------------------------------------------------------------------


class OwnedFolder:
    """A run folder whose files only the owner changes. See `train.system.folders.Folder`."""

    def __init__(self, storage: Folder, ownership: Ownership) -> None:
        self.storage, self.ownership, self.location = storage, ownership, storage.location

    def write(self, name: str, content: bytes) -> None:
        self.ownership.check()
        self.storage.write(name, content)

    def create(self, name: str, content: bytes) -> bool:
        self.ownership.check()
        return self.storage.create(name, content)

    def replace(self, name: str, content: bytes, version: str | None) -> str:
        self.ownership.check()
        return self.storage.replace(name, content, version)

    def upload(self, name: str, path: Path) -> None:
        self.ownership.check()
        self.storage.upload(name, path)

    def remove(self, name: str) -> None:
        self.ownership.check()
        self.storage.remove(name)

    def read(self, name: str) -> bytes:
        return self.storage.read(name)

    def open(self, name: str) -> BinaryIO:
        return self.storage.open(name)

    def download(self, name: str, path: Path) -> None:
        self.storage.download(name, path)

    def head(self, name: str) -> Head | None:
        return self.storage.head(name)

    def size(self, name: str) -> int | None:
        return self.storage.size(name)

    def names(self, prefix: str = "") -> list[str]:
        return self.storage.names(prefix)

    def listing(self, prefix: str = "") -> dict[str, Head]:
        return self.storage.listing(prefix)

    def names_here(self) -> set[str]:
        return self.storage.names_here()
