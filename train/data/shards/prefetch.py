"""The prefetcher: one process per run and machine that fetches shards into the cache before the ranks need them.

It deletes used shards if not all fit. A shard that is already in the cache is first compared with the manifest; readers
wait until `obtain` has marked it as compared.

Only this process talks to S3 while training runs; ranks and their loader processes only read files. Therefore a dead
connection cannot block a rank, no thread of the connector is alive when a rank forks, and each shard is fetched once,
however many ranks there are. A failed fetch is retried until it succeeds. If no retry can cure the fault, it is written
to the cache, and fails the run only when a reader needs the shard.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from multiprocessing.connection import Connection
from threading import Condition, Thread

import numpy as np
from tqdm import tqdm

from train.config import InputError
from train.data.shards.cache import ShardCache, held_out
from train.data.shards.format import DataManifest, Shard
from train.data.shards.order import ShardSampler
from train.machine.processes import PR_SET_PDEATHSIG
from train.machine.torchrun import leave_signals_to_the_parent
from train.storage.atomic_io import discard
from train.storage.folders import Folder

logger = logging.getLogger("train")
DOWNLOADS = 4  # concurrent downloads: a few saturate a network card; each needs memory for two shards, about 128 MiB
REPORT_EVERY_S = 10.0
TICK_S = 0.5  # seconds between checks of progress while shards are fetched
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # parameters of mallopt(3)


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """A handle to the prefetching process, and a context manager that ends it.

    Only the first rank of a machine has one, and only if the data is in S3. Raises InputError if the machine's cache
    has no space for the shards, or if another run has a conflicting lock on it.
    """

    def __init__(self, source: Folder, cache: ShardCache, sampler: ShardSampler) -> None:
        # imported here: the connector loads slowly
        from train.data.shards.download import (
            Downloader,
        )

        cache.check_fits(sampler)
        self.cache, self.sampler = cache, sampler
        self.limit_bytes = cache.limit_bytes()
        self.fits = cache.part_bytes(sampler) <= self.limit_bytes
        if not self.fits:  # the previous window's files are deleted, but take space until readers open the next window
            self.limit_bytes -= (
                sampler.window_shards * len(sampler.lanes_here) * cache.largest_bytes
            )
        held = cache.hold(alone=not self.fits)
        self.downloader = Downloader(source, cache)
        # guards the next three lines' attributes, which several threads use
        self.changed = Condition()
        self.wanted, self.queue = dict[str, Shard](), deque[Shard]()
        self.active = set[str]()
        # shards that are ready or have failed; those that failed
        self.settled, self.failed = (
            set[str](),
            set[str](),
        )
        first = [cache.manifest.splits["train"][number] for number in sampler.upcoming_shards()[0]]
        # empty once all are ready
        self.first: dict[str, Shard] = {shard.file: shard for shard in first}
        context = multiprocessing.get_context("fork")  # a spawned process would import torch first
        receiver, self.consumed_rows = context.Pipe(duplex=False)
        self.process = context.Process(target=self.run, args=(receiver,), daemon=True)
        self.process.start()
        receiver.close()
        held.close()  # only the process keeps the lock: loaders that outlive a killed rank must not hold it

    def __exit__(self, *_: object) -> None:
        self.consumed_rows.close()
        self.process.kill()  # this leaves no damaged shard: a file gets its name when it is complete
        self.process.join()
        shutil.rmtree(self.cache.run, ignore_errors=True)

    def consumed(self, rows: int) -> None:
        """Tell the process how many sequences all ranks have consumed since the run began."""
        # the process has ended; readers raise an error when they need a shard
        with suppress(BrokenPipeError):
            self.consumed_rows.send(rows)

    # ---- in the process --------------------------------------------------------------------------------------------

    def run(self, consumed_rows: Connection) -> None:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        keep_memory()
        leave_signals_to_the_parent(0)
        self.consumed_rows.close()
        try:
            self.cache.write_status(is_filling=True)
            self.serve(consumed_rows)
        except EOFError:  # the run has ended
            pass
        except BaseException:
            logger.exception("fetching shards has failed")
        os._exit(0)  # an abandoned download may hang in the connector for minutes

    def serve(self, consumed_rows: Connection) -> None:
        """Keep the wanted shards in the cache until the run ends."""
        self.want()
        self.announce()
        for _ in range(DOWNLOADS):
            Thread(target=self.fetch, daemon=True).start()
        was_filling, reported_s = True, time.monotonic()
        while True:
            is_filling = len(self.settled) < len(self.wanted)
            if is_filling != was_filling:
                self.cache.write_status(is_filling=is_filling)
            if (was_filling and not is_filling) or (
                is_filling and time.monotonic() - reported_s > REPORT_EVERY_S
            ):
                reported_s = time.monotonic()
                self.report()
            was_filling = is_filling
            if consumed_rows.poll(TICK_S if is_filling else REPORT_EVERY_S):
                while consumed_rows.poll():
                    self.sampler.consumed_rows = consumed_rows.recv()
                if not self.fits:
                    self.want()

    def want(self) -> None:
        """Queue the shards that are still needed, and delete the others if not all of the data fits."""
        chosen = wanted_shards(self.cache.manifest, self.sampler, self.limit_bytes)
        wanted: dict[str, Shard] = {shard.file: shard for shard in chosen}
        with self.changed:
            unwanted = (
                self.wanted.keys() or {shard.file for shard in self.cache.manifest.shards}
            ) - wanted.keys()
            self.wanted = wanted
            self.settled &= wanted.keys()
            self.failed &= wanted.keys()
            taken = self.settled | self.active
            self.queue = deque(shard for file, shard in wanted.items() if file not in taken)
            self.changed.notify_all()
        for file in () if self.fits else unwanted:
            discard(self.cache.folder / file)

    def fetch(self) -> None:
        """Fetch wanted shards, one at a time."""
        while True:
            with self.changed:
                while not self.queue:
                    self.changed.wait()
                shard = self.queue.popleft()
                self.active.add(shard.file)
            is_there = self.obtain(shard)
            with self.changed:
                self.active.remove(shard.file)
                if shard.file in self.wanted:
                    self.settled.add(shard.file)
                    self.failed |= set() if is_there else {shard.file}
                    self.report_first()
                elif not self.fits:
                    discard(self.cache.folder / shard.file)

    def obtain(self, shard: Shard) -> bool:
        """Put a shard into the cache for this run's readers. If that fails, write the reason and return False."""
        try:
            self.downloader.download(
                shard, on_failure=partial(self.cache.set_fault, shard, is_final=False)
            )
            (self.cache.compared / shard.file).touch()
            discard(self.cache.faults / shard.file)
            self.cache.heard()
            return True
        except Exception as error:
            logger.error("%s", error, exc_info=not isinstance(error, InputError))
            self.cache.set_fault(shard, str(error), is_final=True)
            return False

    def announce(self) -> None:
        """Log how much data this machine reads, and how much of it is needed before the first step."""
        manifest, self.began_s = self.cache.manifest, time.monotonic()
        part = self.sampler.lanes.shards_of(self.sampler.lanes_here)
        mine = [
            *(manifest.splits["train"][number] for number in part),
            *held_out(manifest, self.sampler),
        ]
        logger.info(
            "shards: this machine reads %d of %d (%s of %s), %d of them (%s) before the first step",
            *(len(mine), len(manifest.shards), size_of(mine), size_of(manifest.shards)),
            *(len(self.first), size_of(self.first.values())),
        )

    def report_first(self) -> None:
        """Log, once, how long it took until the first step's shards were fetched, or compared if they were cached."""
        if self.first and self.first.keys() <= self.settled - self.failed:
            took_s, total = (
                time.monotonic() - self.began_s,
                sum(shard.bytes for shard in self.first.values()),
            )
            speed = f"{tqdm.format_sizeof(total / took_s, 'B')}/s"
            logger.info(
                "shards: %d for the first step were ready after %.1f s (%s)",
                len(self.first),
                took_s,
                speed,
            )
            self.first = {}

    def report(self) -> None:
        wanted, there = self.wanted, self.settled - self.failed
        ready = [shard for file, shard in wanted.items() if file in there]
        counts = (
            len(ready),
            len(wanted),
            self.cache.folder,
            size_of(ready),
            size_of(wanted.values()),
        )
        logger.info("shards: %d of %d in %s, %s of %s", *counts)


def size_of(shards: Iterable[Shard]) -> str:
    return tqdm.format_sizeof(sum(shard.bytes for shard in shards), "B")


def wanted_shards(manifest: DataManifest, sampler: ShardSampler, limit_bytes: int) -> list[Shard]:
    """Return the shards needed after `sampler.consumed_rows`, in the order of use, up to `limit_bytes` in all."""
    shards = [*manifest.splits["train"], *held_out(manifest, sampler)]
    now, later = sampler.upcoming_shards()
    numbers = np.concatenate([now, np.arange(len(sampler.shard_rows), len(shards)), later])
    distinct, first = np.unique(numbers, return_index=True)
    numbers = distinct[np.argsort(first)]
    size_bytes = np.cumsum([shards[number].bytes for number in numbers])
    return [
        shards[number]
        for number in numbers[: np.searchsorted(size_bytes, limit_bytes, side="right")]
    ]


def keep_memory() -> None:
    """Make malloc keep and reuse the memory of shards: page faults cost more than all copies (benchmarks/notes.md)."""
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_ARENA_MAX, 1)):
        ctypes.CDLL(None).mallopt(option, value)
