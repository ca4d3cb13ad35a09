"""The lease of a run folder: a second job is rejected, and a job that lost the folder notices before it commits.

    lease/00000007.json   a file for each owner; the highest number is the owner's, and its fencing number

A job takes the folder by creating the file of the next number, which only one of several jobs can do, and leaves the
two newest files. The owner writes its file again and again, with one heartbeat more. No clocks are compared: a job that
cannot ask the owner's kernel watches the heartbeats.

The owner is always the one that wrote the highest file in a listing: asking for the file of the next number would not
show an owner that slept the several others after it.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from train.config import InputError, NotPermitted
from train.host.launched import launched
from train.host.processes import is_alive, read_process
from train.run_folder.ownership import LeaseLost, check_owner, describe, name_of, newest, numbers, parse
from train.storage.folders import Folder, canonical_json

logger = logging.getLogger("train")

HEARTBEATS, LOOKS = 6, 12  # of the owner, and of a job that watches it, in `ttl_s`


class Lease:
    """The lease of the one process of a job that commits: a context manager, or `take` and `release`.

    A thread renews it. `check` is to be called before each commit: without a heartbeat for `ttl_s` (suspended, cut off,
    or in a call that holds Python's lock) a job may lose the folder to another one.
    """

    def __init__(self, folder: Folder, ttl_s: float, *, on_wait: Callable[[str], None] = logger.info) -> None:
        self.folder, self.ttl_s, self.on_wait = folder, ttl_s, on_wait
        self.number = 0  # the fencing number, from 1 on
        self.step = 0  # set by the loop, written with the heartbeats
        self.lost: str | None = None  # the reason, if another job owns the folder
        self.previous: dict[str, Any] | None = None  # the last owner's lease, see KINDS; None: absent or damaged
        self.ended_below = 1  # owners of lower numbers have certainly ended; the last owner may only be silent
        self.claim: dict[str, Any] = {}
        self.heartbeats = 0
        self.is_withdrawn = False  # whether nothing came of this job: then its lease is removed
        self.stop, self.thread = threading.Event(), threading.Thread(target=self.renew)

    def __enter__(self) -> Lease:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def take(self) -> None:
        """Take the folder, after waiting up to `ttl_s` if nothing else can show that the owner has ended. InputError if
        the owner is alive, or if two jobs could own the folder.
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
        with suppress(NotPermitted):
            for number in numbers(self.folder):
                if number < self.number - 1:
                    self.folder.remove(name_of(number))
        self.lost, self.stop = None, threading.Event()
        self.thread = threading.Thread(target=self.renew, name="lease", daemon=True)
        self.thread.start()

    def check_creates_once(self) -> None:
        """InputError, without a lease, if the folder lets a file be created twice: then two jobs could own it."""
        if self.folder.create(name_of(self.number), self.content()):
            self.folder.remove(name_of(self.number))
            raise InputError(
                f"run_dir={self.folder.location}: its server ignores If-None-Match, so two jobs could own one run "
                "folder and overwrite each other's checkpoints; use a server that knows conditional writes, or a disk"
            )

    def check(self) -> None:
        """Raise LeaseLost if another job owns the folder, as `check_owner` does."""
        try:
            check_owner(self.folder, self.claim["owner"])
        except LeaseLost as error:
            self.lost = str(error)
            raise

    def release(self) -> None:
        """Let the next job take the folder at once. This never raises: if it fails, the next job waits."""
        self.stop.set()
        if self.thread.ident is None:  # never taken
            return
        self.thread.join(self.ttl_s)
        try:
            if self.thread.is_alive():
                raise TimeoutError("a heartbeat is still on its way")
            with suppress(LeaseLost):  # there is nothing to release
                self.heartbeat(released=True)
                with suppress(NotPermitted):
                    for name in [name_of(self.number)] if self.is_withdrawn else []:
                        self.folder.remove(name)
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
        """Whether this lease has ended; False if its file has changed and must be read again. InputError if its owner
        is alive.
        """
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


# ---- processes ------------------------------------------------------------------------------------------------------


def identity() -> dict[str, Any]:
    """The process and the job of this lease, as far as the system says."""
    process, run_id = read_process(os.getpid()), launched().run_id
    boot_id: str | None = None
    pid_namespace: str | None = None
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux: every owner is watched
        pass
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "process_start": process.started if process else None,
        "boot_id": boot_id,
        "pid_namespace": pid_namespace,
        "job": os.environ.get("SLURM_JOB_ID") or (None if run_id == "none" else run_id),  # torchrun's default
    }


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether process ids mean the same to both. The host counts too: copies of a virtual machine have one boot id."""
    keys = ("host", "boot_id", "pid_namespace")
    return all(one[key] is not None and one[key] == other[key] for key in keys)
