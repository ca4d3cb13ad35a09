"""A machine's cache for shards from S3: its folder, its size, and how readers wait for shards.

`CACHE_DIR/ID/` contains the shards of one data set under the names in its manifest. A file gets the name of a shard
only after its length and sha256 were compared with the manifest (download.py), so readers open whatever is there. Runs
that read the same data share the folder. If the data does not fit, a run has to delete shards, and no other run may use
the folder. Otherwise no shard is ever deleted.

`CACHE_DIR/ID/runs/NAME/` belongs to one run. It contains the shards that are being written, and fetcher.json, which
says which process fetches and which shards it cannot get.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TypedDict

from train.config import DataConfig, InputError, ShardsConfig, Unreachable, check
from train.data.files.errors import naming
from train.data.shards.manifest import DataManifest, Shard
from train.data.shards.order import ShardSampler
from train.machine import host
from train.machine.launched import launched
from train.machine.processes import is_gone, owner_name
from train.storage.atomic_io import free_bytes, write_atomic
from train.storage.folders import canonical_json, local_path, make_folder, read_json

SHARE_OF_FREE = 0.9  # share of the free disk space to use, unless data.cache_gb is set
# The windows of a lane for which the cache needs space: the previous one (its files are deleted, but readers still map
# them), the current one, one for the rows of a global batch, and the three in which the batches of this step, those of
# the next step, and the batches drawn together with them end.
WINDOWS_HELD = 6
POLL_S = 0.05
TAKE_OVER_S = 10.0  # seconds to wait for a killed run to release the cache


class FetcherState(TypedDict):
    """The process that fetches shards for a run, as readers see it."""

    owner: str  # the owner_name of the process
    faults: dict[str, str]  # the shards that it cannot get, and why


def cache_dir(cfg: DataConfig) -> Path:
    """Return the cache folder that the settings name, or the machine's default one."""
    if cfg.cache_dir is None:
        return host.cache_root()
    return local_path(cfg.cache_dir)


def launch_name() -> str:
    """Return a name that is the same for all ranks of this launch on this machine, and different for other launches."""
    if launched().world_size == 1:
        return uuid.uuid4().hex
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    return f"{platform.node()}-{address}-{port}".replace("/", "-")


def held_out(manifest: DataManifest, order: ShardSampler) -> list[Shard]:
    """Return the validation shards that this machine reads."""
    shards = manifest.splits["validation"]
    if order.eval_shards is None:
        return shards
    return [shards[number] for number in order.eval_shards]


class ShardCache:
    """The cache of one data set, as one run uses it. Raises InputError if its folder cannot be made."""

    def __init__(self, cfg: ShardsConfig, manifest: DataManifest) -> None:
        self.cfg = cfg
        self.manifest = manifest
        self.folder = make_folder(cache_dir(cfg) / manifest.id[:16])
        self.run = self.folder / "runs" / launch_name()
        self.state = self.run / "fetcher.json"
        self.largest_bytes = max(shard.bytes for shard in manifest.shards)

    # ---- size ------------------------------------------------------------------------------------------------------

    def limit_bytes(self) -> int:
        """Return how many bytes the shards may take. Raises InputError if data.cache_gb exceeds the free space."""
        names = {path.name for path in self.folder.iterdir()}
        present = sum(shard.bytes for shard in self.manifest.shards if shard.file in names)
        total = sum(shard.bytes for shard in self.manifest.shards)
        free = free_bytes(self.folder)
        if self.cfg.cache_gb is None:
            return int(present + min(SHARE_OF_FREE * free, total))
        wanted = int(self.cfg.cache_gb * 1e9)
        needed = min(wanted, total)
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
        train_bytes = limit_bytes - self.eval_bytes(order)
        for_lanes = train_bytes // self.largest_bytes
        of_lane = for_lanes // len(order.lanes_here)
        most = (of_lane - cut_shards(order)) // WINDOWS_HELD
        return max(0, min(order.window_shards, most))

    def part_bytes(self, order: ShardSampler) -> int:
        """Return the bytes of all training and validation shards that this machine reads."""
        train = self.manifest.splits["train"]
        numbers = order.lanes.shards_of(order.lanes_here)
        return self.eval_bytes(order) + sum(train[number].bytes for number in numbers)

    def eval_bytes(self, order: ShardSampler) -> int:
        return sum(shard.bytes for shard in held_out(self.manifest, order))

    def check_windows(self, order: ShardSampler) -> None:
        """Raise InputError if the cache is too small for the windows of `order`."""
        limit_bytes = self.limit_bytes()
        if self.part_bytes(order) <= limit_bytes:
            return
        windows = f"windows of {order.window_shards} shards per lane"
        check(
            order.window_rows >= order.global_batch_size,
            f"a batch has {order.global_batch_size} sequences, more than {windows} ({order.window_rows}); raise "
            "data.cache_gb",
        )
        check(
            self.window_shards(order) >= order.window_shards,
            f"the cache may use {limit_bytes / 1e9:.3g} GB, too little for {windows} in {len(order.lanes_here)} lanes; "
            "raise data.cache_gb or choose another data.cache_dir",
        )

    def check_space(self, shards: Sequence[Shard]) -> None:
        """Raise InputError if the cache is too small for all of these shards."""
        limit_bytes = self.limit_bytes()
        needed = sum(shard.bytes for shard in shards)
        check(
            needed <= limit_bytes,
            f"the cache may use {limit_bytes / 1e9:.3g} GB, but the data is {needed / 1e9:.3g} GB; choose another "
            "cache folder",
        )

    # ---- the process that fills the cache --------------------------------------------------------------------------

    def hold(self, *, alone: bool) -> IO[str]:
        """Lock the folder until the returned file is closed, and make this run's folder in it.

        `alone`: exclude other runs instead of sharing the lock. Raises InputError if another run's lock conflicts.
        """
        file = (self.folder / "lock").open("a+")  # NFS locks only a file that is open for reading
        until_s = time.monotonic() + TAKE_OVER_S
        while not self.locked(file, alone=alone):
            if time.monotonic() > until_s:
                file.close()
                needs = f"another run needs {self.folder} for itself"
                if alone:
                    needs = f"another run uses {self.folder}, and not all of the data fits"
                raise InputError(f"{needs}; set another data.cache_dir for one of them")
            time.sleep(POLL_S)
        shutil.rmtree(self.run, ignore_errors=True)
        self.run.mkdir(parents=True)
        return file

    def locked(self, file: IO[str], *, alone: bool) -> bool:
        if locked(file, fcntl.LOCK_EX):
            shutil.rmtree(self.run.parent, ignore_errors=True)  # files of runs that have ended
            if alone:
                return True
        return not alone and locked(file, fcntl.LOCK_SH)

    def tell(self, pid: int, faults: Mapping[str, str]) -> None:
        """Tell readers which process fetches shards, and which shards it cannot get."""
        state = FetcherState(owner=owner_name(pid), faults=dict(faults))
        write_atomic(self.state, canonical_json(state))

    # ---- readers ---------------------------------------------------------------------------------------------------

    def wait(self, shards: Sequence[Shard]) -> None:
        """Wait until all shards that a batch needs are in the cache.

        There is no time limit, because a loader may look further ahead than the cache has space for. Raises Unreachable
        if a shard cannot be fetched or if the fetching process has ended.
        """
        for shard in shards:
            while not (self.folder / shard.file).exists():
                self.check_fetcher(shard)
                time.sleep(POLL_S)

    def check_fetcher(self, shard: Shard) -> None:
        """Raise Unreachable if a shard that is not in the cache will not arrive."""
        state: FetcherState | None = read_json(self.state)
        if state is None or is_gone(state["owner"]):
            raise Unreachable(
                f"{shard.file} cannot be fetched: the process that fetches shards on this node is gone; its error is "
                "above"
            )
        if shard.file in state["faults"]:
            raise Unreachable(state["faults"][shard.file])


def cut_shards(order: ShardSampler) -> int:
    """Return how many shards of a lane may be partly in other lanes. Each takes the space of a whole shard."""
    return 2 if order.lanes.number > 1 else 0


def locked(file: IO[str], operation: int) -> bool:
    """Lock a file without waiting. Returns False if another run's lock conflicts. Raises InputError if locks fail."""
    cure = "; set data.cache_dir to a local disk"
    with naming(f"{file.name} cannot be locked", (OSError,), cure):
        try:
            fcntl.flock(file, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
