"""The process, one for each run on a node, that keeps the cache ahead of the ranks: the next shards in, those done with
out. What lies there already is compared with the manifest before its run reads it, in the order of need.

It alone talks to S3 while training runs: ranks and their loader processes read files, so that a dead connection cannot
hold any of them, nothing of the connector is alive when they fork, and a shard comes once whatever the number of ranks.
A shard is tried again until it is there; what cannot be mended is written beside the cache, where readers find it when
they need the shard (cache.py): a fault of the next window does no harm before the next window.
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
from typing import IO

from tqdm import tqdm

from train.config import InputError, ShardsConfig, check
from train.data.cache import Cache, Room, flock, lock
from train.data.download import Downloader
from train.data.order import ShardSampler
from train.data.shards import Manifest, Shard
from train.preempt import leave_signals_to_the_parent
from train.s3 import S3Folder
from train.storage import canonical_json, write_atomic

logger = logging.getLogger("train")
TICK_S, IDLE_S = 0.1, 1.0  # between looks at the cache while shards are missing, and otherwise
REPORT_EVERY_S = 10.0
TAKE_OVER_S = 10.0  # an earlier run that was killed may take to let go of the cache
MOST_FAILING = 8  # shards of which nothing comes, tried beside the others
PR_SET_PDEATHSIG = 1  # prctl(2)
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # mallopt(3)


class Need:
    """Which shards have to be in the cache."""

    def __init__(self, manifest: Manifest, sampler: ShardSampler, limit_bytes: int) -> None:
        self.manifest, self.sampler = manifest, sampler
        self.shards = manifest.shards
        room = Room.of(manifest)
        self.fits = room.total <= limit_bytes
        # Files of the window before are deleted, yet take room as long as readers map them: until they open the next.
        self.limit_bytes = limit_bytes if self.fits else limit_bytes - sampler.windows.shards * room.largest

    def wanted(self) -> list[Shard]:
        """What is needed from `sampler.consumed_rows` on, in the order of need, as far as there is room."""
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


class Fetcher:
    """Starts the process; a context manager that ends it. The first rank of a node has one."""

    def __init__(
        self,
        source: S3Folder,
        cfg: ShardsConfig,
        manifest: Manifest,
        cache: Cache,
        sampler: ShardSampler,
        limit_bytes: int,
    ) -> None:
        self.cfg, self.cache = cfg, cache
        self.need = Need(manifest, sampler, limit_bytes)
        held = self.hold()
        self.downloader = Downloader(source, cfg, manifest, cache, has_readers=True)
        context = multiprocessing.get_context("fork")  # what it needs is there; a spawned one would import torch first
        theirs, self.places = context.Pipe(duplex=False)
        self.process = context.Process(target=self.run, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        held.close()  # the process has it: loaders that outlive a killed rank shall not hold the cache

    def hold(self) -> IO[str]:
        """Take the cache, and begin this run's part of it. InputError if another run stands in the way."""
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

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.places.close()
        self.process.kill()  # nothing in it is worth a clean end: files get their names when they are whole
        self.process.join()
        shutil.rmtree(self.cache.run, ignore_errors=True)

    def consumed(self, rows: int) -> None:
        """Say how many sequences of the whole run all ranks have done with."""
        with suppress(BrokenPipeError):  # it is gone: readers tell, when they need what does not come
            self.places.send(rows)

    # ---- in the process --------------------------------------------------------------------------------------------

    def run(self, places: Connection) -> None:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        keep_memory()
        leave_signals_to_the_parent(0)
        self.places.close()
        with (self.cache.run / "fetcher.lock").open("a+") as life:
            flock(life, alone=False)  # readers see by it that this process lives
            try:
                self.serve(places, parent)
            except EOFError:  # the run has ended
                pass
            except BaseException:
                logger.exception("fetching shards has failed")
        os._exit(0)  # a given-up download may hang in the connector for minutes

    def serve(self, places: Connection, parent: int) -> None:
        """Keep what is wanted in the cache, until the run ends."""
        pool, under_way = ThreadPoolExecutor(self.cfg.downloads + MOST_FAILING), dict[str, Future[None]]()
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
            if places.poll(TICK_S):
                while places.poll():
                    self.need.sampler.consumed_rows = places.recv()
                wanted = self.now_wanted(wanted)
                looked_s = looked_s if absent else -IDLE_S

    def now_wanted(self, before: list[Shard]) -> list[Shard]:
        """What is wanted now, in the order of need, for readers to see; the others are deleted."""
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
        """Delete what is not wanted, of this manifest's own files."""
        names = {shard.file for shard in wanted}
        for shard in self.need.shards:
            if shard.file not in names:
                (self.cache.folder / shard.file).unlink(missing_ok=True)

    def report(self, wanted: list[Shard], absent: list[Shard]) -> None:
        total, left = (sum(shard.bytes for shard in shards) for shards in (wanted, absent))
        size = f"{tqdm.format_sizeof(total - left, 'B')} of {tqdm.format_sizeof(total, 'B')}"
        logger.info("shards: %d of %d in %s, %s", len(wanted) - len(absent), len(wanted), self.cache.folder, size)


def keep_memory() -> None:
    """Let this process use the memory of one shard for the next. The connector takes some anew for each, and the page
    faults of that cost more than all copies do (benchmarks/fetch.py).
    """
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1)):
        ctypes.CDLL(None).mallopt(option, value)
