"""The prefetcher: one process per run and machine that fetches shards into the cache before the ranks need them.

It also deletes used shards if not all fit.

Only this process talks to S3 while training runs; ranks and their loader processes only read files. Therefore a dead
connection cannot block a rank, no thread of the connector is alive when a rank forks, and each shard is fetched once,
however many ranks there are. A failed fetch is retried until it succeeds. A shard that could not be fetched for
DEADLINE_S fails the run only when a reader needs it.
"""

from __future__ import annotations

import ctypes
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from threading import Condition, Thread
from typing import TYPE_CHECKING, NoReturn

from tqdm import tqdm

from train.config import S3Config, Unreachable
from train.data.shards.cache import ShardCache, held_out
from train.data.shards.manifest import DataManifest, Shard
from train.data.shards.order import ShardSampler
from train.machine.processes import PR_SET_PDEATHSIG
from train.machine.torchrun import leave_signals_to_the_parent
from train.storage.atomic_io import discard

if TYPE_CHECKING:
    from train.data.shards.download import Downloader

logger = logging.getLogger("train")
DOWNLOADS = 4  # concurrent downloads: a few saturate a network card
# seconds of failed attempts after which readers are told that a shard does not come
DEADLINE_S = 300.0
FIRST_PAUSE_S = 1.0  # upper limit of the random pause after a failed attempt; it doubles
LONGEST_PAUSE_S = 10.0
REPORT_EVERY_S = 10.0

# Returns the shards needed after so many sequences (None: at the start), in the order of use.
Wanted = Callable[[int | None], Sequence[Shard]]


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """A handle to the prefetching process, and a context manager that ends it.

    `wanted` says what the cache should contain. `deletes`: remove all other shards from the cache. Raises InputError if
    another run has a conflicting lock on the cache.
    """

    def __init__(
        self, location: str, s3: S3Config, cache: ShardCache, wanted: Wanted, *, deletes: bool
    ) -> None:
        from train.data.shards.download import Downloader  # the connector loads slowly

        self.cache = cache
        fetcher = Fetcher(Downloader(location, s3, cache), wanted, deletes=deletes)
        held = cache.hold(alone=deletes)
        context = multiprocessing.get_context("fork")  # a spawned process would import torch first
        receiver, self.sender = context.Pipe(duplex=False)
        arguments = (receiver, self.sender)
        self.process = context.Process(target=fetcher.run, args=arguments, daemon=True)
        self.process.start()
        assert self.process.pid is not None
        cache.tell(self.process.pid, faults={})
        receiver.close()
        held.close()  # only the process keeps the lock: loaders that outlive a killed rank must not hold it

    def __exit__(self, *_: object) -> None:
        self.sender.close()
        self.process.kill()  # this leaves no damaged shard: a file gets its name when it is complete
        self.process.join()
        shutil.rmtree(self.cache.run, ignore_errors=True)

    def consumed(self, rows: int) -> None:
        """Tell the process how many sequences all ranks have consumed since the run began."""
        # If the process has ended, readers raise an error when they need a shard.
        with suppress(BrokenPipeError):
            self.sender.send(rows)


class Fetcher:
    """The work of the prefetching process."""

    def __init__(self, downloader: Downloader, wanted: Wanted, *, deletes: bool) -> None:
        self.downloader = downloader
        self.cache = downloader.cache
        self.wanted = wanted
        self.deletes = deletes
        self.changed = Condition()  # guards the next three attributes
        self.files: set[str] = set()  # what the cache should contain
        self.queue: deque[Shard] = deque()
        self.active: set[str] = set()  # the files that are being fetched
        self.faults: dict[str, str] = {}
        self.reported_s = -math.inf
        self.was_whole = False

    def run(self, receiver: Connection, sender: Connection) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        leave_signals_to_the_parent(0)
        sender.close()  # otherwise `receiver` would not notice that the parent has closed its own
        try:
            self.serve(receiver)
        except EOFError:  # the run has ended
            os._exit(0)
        except BaseException as error:
            self.end(error)

    def end(self, error: BaseException) -> NoReturn:
        """End the process, by which readers learn that shards no longer arrive."""
        logger.error("fetching shards has failed", exc_info=error)
        os._exit(1)  # an abandoned download may hang in the connector for minutes

    def serve(self, receiver: Connection) -> NoReturn:
        """Keep the wanted shards in the cache until the run ends."""
        rows: int | None = None
        looked_s = -math.inf
        for _ in range(DOWNLOADS):
            Thread(target=self.work, daemon=True).start()
        while True:
            if self.deletes or time.monotonic() - looked_s >= REPORT_EVERY_S:
                looked_s = time.monotonic()
                self.look(rows)
            if receiver.poll(REPORT_EVERY_S):
                rows = receiver.recv()
            while receiver.poll():
                rows = receiver.recv()

    def look(self, rows: int | None) -> None:
        """Queue the wanted shards that are not in the cache, and delete the others if not all of the data fits."""
        wanted = self.wanted(rows)
        there = {path.name for path in self.cache.folder.iterdir()}
        with self.changed:
            self.files = {shard.file for shard in wanted}
            present = there | self.active
            self.queue = deque(shard for shard in wanted if shard.file not in present)
            self.changed.notify_all()
        if self.deletes:
            known = {shard.file for shard in self.cache.manifest.shards}
            for file in known & there - self.files:
                discard(self.cache.folder / file)
        self.report(wanted, there)

    def work(self) -> NoReturn:
        """Fetch queued shards, one at a time."""
        try:
            while True:
                with self.changed:
                    while not self.queue:
                        self.changed.wait()
                    shard = self.queue.popleft()
                    self.active.add(shard.file)
                self.obtain(shard)
        except BaseException as error:
            self.end(error)

    def obtain(self, shard: Shard) -> None:
        """Fetch a shard, and try again until it is there or no longer wanted."""
        path = self.cache.folder / shard.file
        failed_s: float | None = None  # when the first attempt failed
        longest_s = FIRST_PAUSE_S
        while shard.file in self.files and not path.exists():
            try:
                self.downloader.download(shard)
            except Unreachable as error:
                failed_s = failed_s or time.monotonic()
                if time.monotonic() - failed_s >= DEADLINE_S:
                    self.set_fault(shard, str(error))
                pause_s = random.uniform(0, longest_s)
                logger.warning("%s; next attempt in %.1f s", error, pause_s)
                time.sleep(pause_s)
                longest_s = min(2 * longest_s, LONGEST_PAUSE_S)
        self.set_fault(shard, None)
        with self.changed:
            self.active.remove(shard.file)

    def set_fault(self, shard: Shard, reason: str | None) -> None:
        """Tell readers why a shard does not come; None: it may come."""
        with self.changed:
            before = self.faults.pop(shard.file, None)
            if reason is not None:
                self.faults[shard.file] = f"{reason}; given up after {DEADLINE_S:g} s"
            if before or reason:
                self.cache.tell(os.getpid(), self.faults)

    def report(self, wanted: Sequence[Shard], there: set[str]) -> None:
        """Log how many of the wanted shards are in the cache, from time to time until all are."""
        ready = [shard for shard in wanted if shard.file in there]
        is_whole = len(ready) == len(wanted)
        now_s = time.monotonic()
        is_due = now_s - self.reported_s >= REPORT_EVERY_S
        if is_due and not (is_whole and self.was_whole):
            self.reported_s = now_s
            self.was_whole = is_whole
            logger.info(
                "shards: %d of %d in %s, %s of %s",
                len(ready),
                len(wanted),
                self.cache.folder,
                size_of(ready),
                size_of(wanted),
            )


def size_of(shards: Iterable[Shard]) -> str:
    return tqdm.format_sizeof(sum(shard.bytes for shard in shards), "B")


def wanted_shards(manifest: DataManifest, sampler: ShardSampler, limit_bytes: int) -> list[Shard]:
    """Return the shards needed after `sampler.consumed_rows`, in the order of use, up to `limit_bytes` in all."""
    train = manifest.splits["train"]
    now, later = sampler.upcoming_shards()
    in_order = [train[number] for number in now]
    in_order += held_out(manifest, sampler)
    in_order += [train[number] for number in later]
    wanted = []
    size_bytes = 0
    for shard in dict.fromkeys(in_order):
        size_bytes += shard.bytes
        if size_bytes > limit_bytes:
            break
        wanted.append(shard)
    return wanted
