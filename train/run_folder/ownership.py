"""The right to write to a run folder: a second job is rejected, and a job that lost the folder notices before a commit.

lease/00000007.json   one file per owner, see lease.py; the current owner has the highest number, the fencing number

A job takes the folder by creating the file with the next number, which only one of several jobs can do. When it ends,
it removes all but the two newest files. The owner rewrites its file regularly, each time with a higher count of
heartbeats. A new job on another machine, which cannot see the owner's process, watches this count; clocks are never
compared. Jobs list the folder to find the owner: a job that was suspended, and then looked only for the next number,
would miss later owners.

This table lists the changes to the run folder, and the check of `Ownership` that precedes each:

    most files                       `check`, each time: OwnedFolder
    settings, a half-written line    `check`: train/run_folder/run_folder.py (describe, cut_half_written_line)
    metrics.jsonl and its curves     `may_append`: train/observe/journal.py
    logs                             `lost`, set by the next heartbeat: train/run_folder/run_folder.py (set_up_logging)
    stacks                           `check`: train/run/watchdog.py (report)
    checkpoints, and their removal   `check`: train/checkpoints/saver.py, train/run/checkpoint_manager.py
    export/                          `check`, before and after: train/run_folder/exported.py, train/observe/card.py
    checkpoints that users prune     a lease for the command: train/tools/checkpoints.py (prune)
    STOP                             nothing: launch/commands.py (stop), launch/supervise.py, while no rank runs
    report/                          nothing: train/tools/report.py

Code that writes another file must use `RunFolder.folder`, which is an OwnedFolder, and add the file to this table. A
file that grows on this machine also needs an entry in `GROWING` of run_folder.py; otherwise a run in S3 does not upload
it. A command other than the run itself must take a lease.

If the run folder is in S3, this machine's metrics and logs are copies, which may always grow. A change that was allowed
may reach S3 after another job took the folder. S3 itself then rejects a commit (train/checkpoints/store_s3.py), or an
upload of metrics or settings (`RunFolder.replace`).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from train.config import Failure, InputError, LeaseConfig, NotPermitted
from train.machine.processes import is_alive
from train.run_folder.lease import (
    describe,
    identity,
    name_of,
    newest,
    numbers,
    parse,
    same_machine,
)
from train.storage.folders import Folder, canonical_json, is_s3

logger = logging.getLogger("train")
# per `ttl_s`: the owner's heartbeats, and a waiting job's checks for them
HEARTBEATS, LOOKS = (
    6,
    12,
)


class LeaseLost(Failure):
    """An error raised when another job owns the run folder: nothing more may be written there."""


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
        self.folder, self.ttl_s, self.on_wait = folder, ttl_s, on_wait
        # the job's id in its lease; "": nothing is checked; None: not yet known
        self.owner: str | None = None
        self.lost: str | None = None  # the reason, once another job owns the folder
        # The fields below are set only in the process that took the folder.
        self.number = 0  # the fencing number, at least 1
        self.step = 0  # the training step, set by the loop and written with each heartbeat
        # the previous lease, see lease.KINDS; None: absent or damaged
        self.previous: dict[str, Any] | None = None
        self.ended_below = 1  # owners with lower numbers have certainly ended; the previous owner may only be silent
        self.claim: dict[str, Any] = {}
        self.heartbeats = 0
        self.is_withdrawn = False  # whether this job is rejected; `release` then removes its lease
        self.stop, self.thread = threading.Event(), threading.Thread(target=self.renew)

    def follow(self, owner: str) -> None:
        """Write under the lease `owner`, which rank 0 holds. An empty `owner` means that only this rank writes."""
        self.owner = owner

    def check(self) -> None:
        """Raise LeaseLost if another job now owns the folder. In S3 this sends two requests and raises their errors."""
        if self.owner:
            number, content = newest(self.folder)
            lease = parse(content)
            if lease is None or lease["owner"] != self.owner:
                now = (
                    f"it now belongs to {describe(content)} (lease {number})"
                    if number
                    else "its file is gone"
                )
                self.lost = f"the lease of {self.folder.location} is lost: {now}; this job may not write there"
                raise LeaseLost(self.lost)

    @property
    def failure(self) -> LeaseLost | None:
        return LeaseLost(self.lost) if self.lost else None

    def may_append(self) -> bool:
        """Return whether the run's files on this machine may still grow. Copies of a folder in S3 always may."""
        try:
            if not is_s3(self.folder.location):
                self.check()
        except LeaseLost:
            return False
        # the lease cannot be read now, which does not mean that it is lost
        except (
            InputError,
            OSError,
        ):
            pass
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
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        self.claim = {
            **identity(),
            "owner": uuid.uuid4().hex,
            "ttl_s": self.ttl_s,
            "started": started,
        }
        # The loop reads the result of `create` from the folder: S3's response may be lost, and a job that was suspended
        # may create a file that others removed long ago.
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
        """Raise InputError, after removing the lease, if a file can be created twice: two jobs could own the folder."""
        if self.folder.create(name_of(self.number), self.content()):
            self.folder.remove(name_of(self.number))
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
            # another job owns the folder, so there is nothing to release
            with suppress(LeaseLost):
                self.heartbeat(released=True)
                older = [number for number in numbers(self.folder) if number < self.number - 1]
                with suppress(NotPermitted):
                    for number in [self.number] if self.is_withdrawn else older:
                        self.folder.remove(name_of(number))
        except Exception as error:
            logger.warning(
                f"{self.folder.location} is not released: {type(error).__name__}: {error}"
            )

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
            except (
                Exception
            ) as error:  # training continues; if the fault lasts, the next commit raises it
                if not failing:
                    risk = (
                        f"without a heartbeat for {self.ttl_s:g} s another job may take the folder"
                    )
                    logger.warning(
                        f"the lease is not renewed: {type(error).__name__}: {error}; {risk}"
                    )
                failing = True

    def heartbeat(self, *, released: bool = False) -> None:
        self.check()
        self.heartbeats += 1
        self.folder.write(name_of(self.number), self.content(released=released))

    def content(self, *, released: bool = False) -> bytes:
        changing = {
            "number": self.number,
            "beats": self.heartbeats,
            "step": self.step,
            "released": released,
        }
        return canonical_json({**self.claim, **changing})

    # ---- is the owner gone? -----------------------------------------------------------------------------------------

    def is_over(self, number: int, content: bytes) -> bool:
        """Return whether this lease has ended; False if it has changed. Raises InputError if its owner is alive."""
        lease = parse(content)
        if lease is not None:
            alive = (
                is_alive(lease["pid"], lease["process_start"])
                if same_machine(lease, self.claim)
                else None
            )
            if alive and not lease["released"]:
                raise InputError(self.in_use(content))
            if alive is False or lease["released"]:
                self.ended_below = number + 1
                return True
        self.ended_below = number
        # the owner's heartbeats may be less frequent than ours
        ttl_s = max(self.ttl_s, lease["ttl_s"] if lease else 0)
        until = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + ttl_s))
        self.on_wait(
            f"{self.folder.location} was last used by {describe(content)}, which may still be running: watching for "
            f"its heartbeat for up to {ttl_s:g} s (until {until})"
        )
        # a count, not a deadline: a slow response must not count as silence
        for _ in range(LOOKS):
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
            f"(if it is gone, its lease expires after lease.ttl_s={self.ttl_s:g} seconds without a heartbeat)"
        )


# ---- the files of the run -------------------------------------------------------------------------------------------


class OwnedFolder:
    """A run folder whose files only the owner can change. See `train.storage.folders.Folder`."""

    def __init__(self, storage: Folder, ownership: Ownership) -> None:
        self.storage, self.ownership, self.location = storage, ownership, storage.location
        self.read, self.open, self.download = storage.read, storage.open, storage.download
        self.head, self.size = storage.head, storage.size
        self.names, self.listing, self.names_here = (
            storage.names,
            storage.listing,
            storage.names_here,
        )

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
