"""The process, one for each run on a node, that keeps the cache ahead of the ranks: it brings the next shards and
removes those that are used up. A shard that is there already is compared with the manifest before its run reads it.

Only this process talks to S3 while training runs; ranks and their loader processes read files. So a dead connection
cannot hold any of them, no thread of the connector is alive when they fork, and a shard is fetched once whatever the
number of ranks. A shard is retried until it is there. A fault that no retry can cure is written beside the cache, where
readers find it when they need the shard (cache.py): a fault in the next window does no harm before that window.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import IO, TYPE_CHECKING

from tqdm import tqdm

from train.config import InputError, ShardsConfig, check
from train.data.shards.cache import Cache, Room, flock, lock
from train.data.shards.format import Manifest, Shard
from train.data.shards.order import ShardSampler
from train.host.launcher import leave_signals_to_the_parent
from train.storage.atomic_io import write_atomic
from train.storage.folders import canonical_json

if TYPE_CHECKING:
    from train.storage.s3 import S3Folder

logger = logging.getLogger("train")
TICK_S, IDLE_S = 0.1, 1.0  # between looks at the cache while shards are missing, and otherwise
REPORT_EVERY_S = 10.0
TAKE_OVER_S = 10.0  # within which a run that was killed releases the cache
MAX_FAILING = 8  # shards that bring nothing, retried beside the others
PR_SET_PDEATHSIG = 1  # prctl(2)
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # mallopt(3)


class Need:
    """Which shards have to be in the cache."""

    def __init__(self, manifest: Manifest, sampler: ShardSampler, limit_bytes: int) -> None:
        self.manifest, self.sampler = manifest, sampler
        self.shards = manifest.shards
        room = Room.of(manifest)
        self.fits = room.total <= limit_bytes
        # Files of the window before are deleted, but take room until readers open the next window.
        self.limit_bytes = limit_bytes if self.fits else limit_bytes - sampler.windows.shards * room.largest

    def wanted(self) -> list[Shard]:
        """The shards needed from `sampler.consumed_rows` on, in the order of need, as far as there is room."""
        chosen: dict[str, Shard] = {}
        size_bytes = 0
        for shard in self.in_order():
            if len(chosen) == len(self.shards):
                break
            if shard.file not in chosen:
                size_bytes += shard.bytes
                if size_bytes > self.limit_bytes:
                    break
                chosen[shard.file] = shard
        return list(chosen.values())

    def in_order(self) -> Iterator[Shard]:
        train = self.manifest.splits["train"]
        windows = self.sampler.upcoming_windows()
        yield from (train[number] for number in next(windows))
        yield from self.manifest.splits["validation"]
        for window in windows:
            yield from (train[number] for number in window)


class Prefetcher:
    """Keeps the cache ahead of a run while it trains; a context manager. This one does nothing: it is for ranks whose
    data is on disk, or is fetched by a process of another rank.
    """

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None: ...

    def consumed(self, rows: int) -> None:
        """Tell it how many sequences of the whole run all ranks have consumed."""


class ShardPrefetcher(Prefetcher):
    """Starts the process; leaving the context ends it. The first rank of a node has one."""

    def __init__(
        self,
        source: S3Folder,
        cfg: ShardsConfig,
        manifest: Manifest,
        cache: Cache,
        sampler: ShardSampler,
        limit_bytes: int,
    ) -> None:
        from train.data.shards.download import Downloader  # the connector takes long to import

        self.cfg, self.cache = cfg, cache
        self.need = Need(manifest, sampler, limit_bytes)
        held = self.hold()
        self.downloader = Downloader(source, cfg, manifest, cache, has_readers=True)
        context = multiprocessing.get_context("fork")  # a spawned one would import torch first
        receiver, self.consumed_rows = context.Pipe(duplex=False)
        self.process = context.Process(target=self.run, args=(receiver,), daemon=True)
        self.process.start()
        receiver.close()
        held.close()  # the process has it: loaders that outlive a killed rank must not hold the cache

    def hold(self) -> IO[str]:
        """Lock the cache, and begin this run's part of it. InputError if another run is in the way."""
        try:
            held = lock(self.cache, alone=True, patience_s=0.0 if self.need.fits else TAKE_OVER_S)
            shutil.rmtree(self.cache.run.parent, ignore_errors=True)  # of runs that are gone
            if self.need.fits:
                flock(held, alone=False)
        except BlockingIOError:
            check(
                self.need.fits,
                f"another run uses {self.cache.folder}, and not all of the data fits; give one of them its own "
                "data.cache_dir",
            )
            try:
                held = lock(self.cache, alone=False, patience_s=TAKE_OVER_S)
            except BlockingIOError:
                raise InputError(
                    f"another run has {self.cache.folder} for itself; give one of them its own data.cache_dir"
                ) from None
        self.cache.begin()
        return held

    def __enter__(self) -> ShardPrefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.consumed_rows.close()
        self.process.kill()  # it needs no clean end: files get their names when they are whole
        self.process.join()
        shutil.rmtree(self.cache.run, ignore_errors=True)

    def consumed(self, rows: int) -> None:
        with suppress(BrokenPipeError):  # the process is gone: readers raise it when they need a shard
            self.consumed_rows.send(rows)

    # ---- in the process --------------------------------------------------------------------------------------------

    def run(self, consumed_rows: Connection) -> None:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        keep_memory()
        leave_signals_to_the_parent(0)
        self.consumed_rows.close()
        with (self.cache.run / "fetcher.lock").open("a+") as held:
            flock(held, alone=False)  # it shows readers that this process is alive
            try:
                self.serve(consumed_rows, parent)
            except EOFError:  # the run has ended
                pass
            except BaseException:
                logger.exception("fetching shards has failed")
        os._exit(0)  # a download that was given up may hang in the connector for minutes

    def serve(self, consumed_rows: Connection, parent: int) -> None:
        """Keep the wanted shards in the cache until the run ends."""
        pool, under_way = ThreadPoolExecutor(self.cfg.downloads + MAX_FAILING), dict[str, Future[None]]()
        wanted, absent, was_filling = self.now_wanted([]), list[Shard](), True
        looked_s, reported_s = -IDLE_S, time.monotonic()
        while os.getppid() == parent:
            now_s = time.monotonic()
            if absent or now_s - looked_s > IDLE_S:
                looked_s = now_s
                for name in [name for name, future in under_way.items() if future.done()]:
                    under_way.pop(name).result()  # raises if not even the reason of a failure could be written
                settled = self.cache.ready() | self.downloader.hopeless
                absent = [shard for shard in wanted if shard.file not in settled]
                for shard in absent:
                    busy = len(under_way.keys() - self.downloader.failing)
                    if busy < self.cfg.downloads and shard.file not in under_way:
                        under_way[shard.file] = pool.submit(self.downloader.obtain, shard)
                if (absent and now_s - reported_s > REPORT_EVERY_S) or (was_filling and not absent):
                    reported_s = now_s
                    ready = self.cache.ready()
                    self.report(wanted, [shard for shard in wanted if shard.file not in ready])
                was_filling = bool(absent)
            if consumed_rows.poll(TICK_S):
                while consumed_rows.poll():
                    self.need.sampler.consumed_rows = consumed_rows.recv()
                wanted = self.now_wanted(wanted)
                looked_s = looked_s if absent else -IDLE_S

    def now_wanted(self, before: list[Shard]) -> list[Shard]:
        """The shards wanted now, in the order of need. Readers see them; the others are deleted."""
        wanted = self.need.wanted()
        if wanted != before:
            try:
                write_atomic(self.cache.wanted, canonical_json([shard.file for shard in wanted]))
            except OSError as error:
                logger.error("cannot write %s: %s", self.cache.wanted, error.strerror)
            if not self.need.fits:
                self.evict(wanted)
        return wanted

    def evict(self, wanted: list[Shard]) -> None:
        """Delete those of this manifest's files that are not wanted."""
        names = {shard.file for shard in wanted}
        for shard in self.need.shards:
            if shard.file not in names:
                (self.cache.folder / shard.file).unlink(missing_ok=True)

    def report(self, wanted: list[Shard], absent: list[Shard]) -> None:
        total, left = (sum(shard.bytes for shard in shards) for shards in (wanted, absent))
        size = f"{tqdm.format_sizeof(total - left, 'B')} of {tqdm.format_sizeof(total, 'B')}"
        logger.info("shards: %d of %d in %s, %s", len(wanted) - len(absent), len(wanted), self.cache.folder, size)


def keep_memory() -> None:
    """Let this process use the memory of one shard for the next. The connector allocates it for each, and the page
    faults cost more than all copies (benchmarks/fetch.py).
    """
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1)):
        ctypes.CDLL(None).mallopt(option, value)
