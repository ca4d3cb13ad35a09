"""A machine's cache for shards from S3: its folder, its size, and how readers wait for shards.

`CACHE_DIR/ID/` contains the shards of one data set under the names in its manifest. A file gets the name of a shard
only if its length and sha256 are right (download.py). Runs that read the same data share the folder. If the data does
not fit, a run has to delete shards, and no other run may use the folder. Otherwise no shard is ever deleted.

`CACHE_DIR/ID/runs/NAME/` belongs to one run. It contains the shards that are being written, an empty file
`compared/SHARD` for each shard that the run's prefetcher has compared with the manifest, a file `faults/SHARD` for each
shard that could not be fetched, and status.json. It names the prefetcher's process; its mtime is the time when bytes
last arrived. No single file grows with the number of shards. A reader opens only shards that its run has compared.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import platform
import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypedDict

from train.config import DataConfig, InputError, ShardsConfig, Unreachable, check
from train.data.files.errors import naming
from train.data.shards.format import DataManifest, Shard
from train.data.shards.order import ShardSampler
from train.machine import machine
from train.machine.launched import launched
from train.machine.processes import is_gone, owner_name
from train.storage.atomic_io import free_bytes, write_atomic
from train.storage.folders import canonical_json, local_path, make_folder, read_json

logger = logging.getLogger("train")

SHARE_OF_FREE = 0.9  # share of the free disk space to use, unless data.cache_gb is set
# The windows of a lane for which the cache needs space: the previous one (its files are deleted, but readers still map
# them), the current one, one for the rows of a global batch, and the three in which the batches of this step, those of
# the next step, and the batches drawn together with them end.
WINDOWS_HELD = 6
POLL_S = 0.05
TELL_EVERY_S = 1.0  # minimum seconds between two notices to readers that bytes have arrived
TAKE_OVER_S = 10.0  # seconds to wait for a killed run to release the cache


class Fault(TypedDict):
    reason: str
    is_final: bool  # True if no further attempt can fetch the shard


class PrefetchStatus(TypedDict):
    """The status of a run's prefetcher, as readers see it."""

    owner: str  # the owner_name of the prefetcher's process
    is_filling: bool  # True while there are shards to fetch


def cache_dir(cfg: DataConfig) -> Path:
    """Return the cache folder that the settings name, or the machine's default one."""
    return machine.cache_root() if cfg.cache_dir is None else local_path(cfg.cache_dir)


def launch_name() -> str:
    """Return a name that is the same for all ranks of this launch on this machine, and different for other launches."""
    if launched().world_size == 1:
        return uuid.uuid4().hex
    return f"{platform.node()}-{os.environ.get('MASTER_ADDR')}-{os.environ.get('MASTER_PORT')}".replace(
        "/", "-"
    )


def held_out(manifest: DataManifest, order: ShardSampler) -> list[Shard]:
    """Return the validation shards that this machine reads."""
    shards = manifest.splits["validation"]
    return (
        shards if order.eval_shards is None else [shards[number] for number in order.eval_shards]
    )


class ShardCache:
    """The cache of one data set, as one run uses it. Raises InputError if its folder cannot be made."""

    def __init__(self, cfg: ShardsConfig, manifest: DataManifest) -> None:
        self.cfg, self.manifest = cfg, manifest
        self.folder = make_folder(cache_dir(cfg) / manifest.id[:16])
        self.run = self.folder / "runs" / launch_name()
        self.compared, self.faults, self.status = (
            self.run / "compared",
            self.run / "faults",
            self.run / "status.json",
        )
        self.told_s = -math.inf
        # the prefetcher's process; remembered, because the run's files may be removed
        self.owner = ""
        self.gave_up: Unreachable | None = None  # why this process no longer waits for shards
        sizes = [shard.bytes for shard in manifest.shards]
        self.total_bytes, self.largest_bytes = sum(sizes), max(sizes)

    # ---- size ------------------------------------------------------------------------------------------------------

    def limit_bytes(self) -> int:
        """Return how many bytes the shards may take. Raises InputError if data.cache_gb exceeds the free space."""
        names = {path.name for path in self.folder.iterdir()}
        present = sum(shard.bytes for shard in self.manifest.shards if shard.file in names)
        free = free_bytes(self.folder)
        if self.cfg.cache_gb is None:
            return int(present + min(SHARE_OF_FREE * free, self.total_bytes))
        wanted = int(self.cfg.cache_gb * 1e9)
        needed = min(wanted, self.total_bytes)
        check(
            needed <= present + free,
            f"{self.folder} has {free / 1e9:.3g} GB free, but the shards would take {needed / 1e9:.3g} GB; free "
            "some space, lower data.cache_gb, or choose data.cache_dir on a larger disk",
        )
        return wanted

    def window_shards(self, order: ShardSampler) -> int:
        """Return how many shards of each lane this machine can shuffle together.

        It is order.window_shards if the machine's part of the data fits into the cache. Otherwise it is the largest
        number with which WINDOWS_HELD windows fit, or 0 if not even windows of one shard fit.
        """
        limit_bytes = self.limit_bytes()
        if self.part_bytes(order) <= limit_bytes:
            return order.window_shards
        of_lane = (limit_bytes - self.eval_bytes(order)) // (
            self.largest_bytes * len(order.lanes_here)
        )
        return max(0, min(order.window_shards, (of_lane - cut_shards(order)) // WINDOWS_HELD))

    def part_bytes(self, order: ShardSampler) -> int:
        """Return the bytes of all training and validation shards that this machine reads."""
        train = self.manifest.splits["train"]
        return self.eval_bytes(order) + sum(
            train[number].bytes for number in order.lanes.shards_of(order.lanes_here)
        )

    def eval_bytes(self, order: ShardSampler) -> int:
        return sum(shard.bytes for shard in held_out(self.manifest, order))

    def check_fits(self, order: ShardSampler | Sequence[Shard]) -> None:
        """Raise InputError if the cache is too small for the windows of `order`, or for all of these shards."""
        limit_bytes = self.limit_bytes()
        part_bytes = (
            self.part_bytes(order)
            if isinstance(order, ShardSampler)
            else sum(shard.bytes for shard in order)
        )
        if part_bytes <= limit_bytes:
            return
        may_take = f"the cache may use {limit_bytes / 1e9:.3g} GB"
        if not isinstance(order, ShardSampler):
            raise InputError(
                f"{may_take}, but the data is {part_bytes / 1e9:.3g} GB; choose another cache folder"
            )
        check(
            order.window_rows >= order.global_batch_size,
            f"a batch has {order.global_batch_size} sequences, more than a window of {order.window_shards} shards per "
            f"lane ({order.window_rows} in {order.lanes.number} lanes); raise data.cache_gb",
        )
        of_lane = (WINDOWS_HELD * order.window_shards + cut_shards(order)) * self.largest_bytes
        needed = min(part_bytes, self.eval_bytes(order) + len(order.lanes_here) * of_lane)
        check(
            needed <= limit_bytes,
            f"{may_take}, but windows of {order.window_shards} shards per lane need {needed / 1e9:.3g} GB in "
            f"{len(order.lanes_here)} lanes; raise data.cache_gb or choose another data.cache_dir",
        )

    # ---- the process that fills the cache --------------------------------------------------------------------------

    def hold(self, *, alone: bool) -> IO[str]:
        """Lock the folder until the returned file is closed, and recreate this run's folder in it.

        `alone`: exclude other runs instead of sharing the lock. Raises InputError if another run's lock conflicts.
        """
        # NFS locks a file only if it is open for reading too
        file = (self.folder / "lock").open("a+")
        until_s = time.monotonic() + TAKE_OVER_S
        while True:
            if locked(file, fcntl.LOCK_EX):
                shutil.rmtree(self.run.parent, ignore_errors=True)  # files of runs that have ended
                if alone:
                    break
            if not alone and locked(file, fcntl.LOCK_SH):
                break
            if time.monotonic() > until_s:
                file.close()
                why = "uses {}, and not all of the data fits" if alone else "needs {} for itself"
                raise InputError(
                    f"another run {why.format(self.folder)}; set another data.cache_dir for one of them"
                )
            time.sleep(POLL_S)
        shutil.rmtree(self.run, ignore_errors=True)
        self.compared.mkdir(parents=True)
        self.faults.mkdir()
        return file

    def write_status(self, *, is_filling: bool) -> None:
        self.tell(
            self.status, PrefetchStatus(owner=owner_name(os.getpid()), is_filling=is_filling)
        )

    def set_fault(self, shard: Shard, reason: str, *, is_final: bool) -> None:
        """Tell readers why a shard cannot be fetched."""
        self.tell(self.faults / shard.file, Fault(reason=reason, is_final=is_final))

    def tell(self, path: Path, content: Fault | PrefetchStatus) -> None:
        try:
            write_atomic(path, canonical_json(content))
        except OSError as error:  # a full disk may have no space for this file either
            logger.warning("cannot write %s: %s", path, error.strerror)

    def heard(self) -> None:
        """Tell readers that bytes have arrived."""
        now_s = time.monotonic()
        if now_s - self.told_s >= TELL_EVERY_S:
            self.told_s = now_s
            with suppress(FileNotFoundError):  # there is no status file without a prefetcher
                os.utime(self.status)

    # ---- readers ---------------------------------------------------------------------------------------------------

    def is_ready(self, shard: Shard) -> bool:
        """Return whether a shard is in the cache and this run's prefetcher has compared it with the manifest."""
        return (self.compared / shard.file).exists() and (self.folder / shard.file).is_file()

    def wait(self, shards: Sequence[Shard]) -> None:
        """Wait until all shards that a batch needs are in the cache and compared.

        Raises InputError if a shard cannot be fetched, Unreachable if no byte of any shard arrived for deadline_s;
        both name a shard and the reason. Time in which the prefetcher has nothing to fetch does not count, because a
        loader may look further ahead than the cache has space for.
        """
        missing = list(shards)
        silent_since_s, heard_before = time.monotonic(), 0
        while True:
            # read before looking for shards: some may arrive meanwhile
            status, heard = self.told()
            while missing and self.is_ready(missing[-1]):
                missing.pop()
            if not missing:
                return
            if self.gave_up is not None:
                raise self.gave_up
            self.owner = status["owner"] if status else self.owner
            if is_gone(self.owner):
                what = "the process that fetches shards on this node is gone; its error is above"
                raise Unreachable(f"{missing[-1].file} cannot be fetched: {what}")
            faulty = {path.name for path in self.faults.glob("*.safetensors")}
            for file in faulty & {shard.file for shard in missing}:
                fault: Fault | None = read_json(self.faults / file)
                if fault is not None and fault["is_final"]:
                    raise InputError(fault["reason"])
            if heard != heard_before or (status and not status["is_filling"]):
                silent_since_s, heard_before = time.monotonic(), heard
            elif time.monotonic() - silent_since_s > self.cfg.deadline_s:
                reason = self.reason(
                    [shard.file for shard in missing], faulty, has_begun=status is not None
                )
                what = f"{missing[-1].file} does not arrive; {reason}"
                self.gave_up = Unreachable(
                    f"{what}; given up after {self.cfg.deadline_s:g} s (data.deadline_s)"
                )
            time.sleep(POLL_S)

    def told(self) -> tuple[PrefetchStatus | None, int]:
        """Return the prefetcher's status, and the time in ns when bytes last arrived; None and 0 before it starts."""
        try:
            with self.status.open("rb") as file:
                return json.loads(file.read()), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None, 0

    def reason(self, missing: Sequence[str], faulty: set[str], *, has_begun: bool) -> str:
        """Return why missing shards do not arrive: the fault of one of them, or else of another shard."""
        for file in (*missing, *sorted(faulty)):
            fault: Fault | None = read_json(self.faults / file) if file in faulty else None
            if fault is not None:
                return fault["reason"]
        return (
            "no byte arrived, and there was no error"
            if has_begun
            else "the process that fetches has not started"
        )


def cut_shards(order: ShardSampler) -> int:
    """Return how many shards of a lane may be partly in other lanes. Each takes the space of a whole shard."""
    return 2 if order.lanes.number > 1 else 0


def locked(file: IO[str], operation: int) -> bool:
    """Lock a file without waiting. Returns False if another run's lock conflicts. Raises InputError if locks fail."""
    with naming(
        f"{file.name} cannot be locked", (OSError,), "; set data.cache_dir to a local disk"
    ):
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
