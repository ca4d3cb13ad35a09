"""The cache of a node for shards from S3: where it is, what fits into it, and how readers wait for shards.

`CACHE_DIR/ID/` has one data set's shards under the names of its manifest, each put there by a rename once its length
and sha256 are right (download.py). Nothing else is ever deleted. Runs that read the same data share the folder; a run
that has to delete, because not all of the data fits, needs it alone.

`CACHE_DIR/ID/runs/NAME/` is one run's part of it: which shards its fetching process has compared with the manifest,
which it wants, and the faults of others. A reader takes no shard that its own run has not compared.
"""

from __future__ import annotations

import fcntl
import math
import os
import platform
import shutil
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_fixed

from train.config import DataConfig, InputError, ShardsConfig, Unreachable, check
from train.data.shards.format import Manifest, Shard
from train.data.shards.order import ShuffleBlock
from train.host import machine
from train.host.launched import launched
from train.storage.folders import local_path, make_folder, read_json

SHARE_OF_FREE = 0.9  # of the disk, if data.cache_gb does not say
# The cache holds the window before (its files are deleted, but readers still map them), the current one, as much as a
# global batch, and the windows in which this step's batches, the next step's and those drawn with them end.
WINDOWS_HELD = 6
POLL_S = 0.02
LOOK_EVERY_S = 0.25  # for the reason why a shard is absent
STARTS_WITHIN_S = 20.0


def cache_dir(cfg: DataConfig) -> Path:
    """The folder that the settings name, or the machine's usual one."""
    if cfg.cache_dir is not None:
        return local_path(cfg.cache_dir)
    return machine.cache_root()


def launch_name() -> str:
    """A name that all ranks launched together on this machine share, and no other launch has."""
    if launched().world_size == 1:
        return uuid.uuid4().hex
    return f"{platform.node()}-{os.environ.get('MASTER_ADDR')}-{os.environ.get('MASTER_PORT')}".replace("/", "-")


@dataclass(frozen=True)
class Cache:
    folder: Path
    deadline_s: float
    given_up: list[Unreachable] = field(default_factory=list)  # why this process waits for no shard any more
    rank: int = field(default_factory=os.getpid)  # the process of the rank; loaders have copies
    name: str = field(default_factory=launch_name)

    @property
    def run(self) -> Path:
        """This run's own part of the folder."""
        return self.folder / "runs" / self.name

    def faults(self, shard: Shard) -> Path:
        return self.run / "faults" / f"{shard.file}.json"

    @property
    def wanted(self) -> Path:
        """JSON: the files that the fetching process wants."""
        return self.run / "wanted.json"

    def begin(self) -> None:
        """Make this run's part new and empty: nothing is compared yet."""
        shutil.rmtree(self.run, ignore_errors=True)
        for name in ("faults", "compared"):
            (self.run / name).mkdir(parents=True)

    def set_compared(self, shard: Shard) -> None:
        """Let this run's readers take a shard."""
        (self.run / "compared" / shard.file).touch()

    def is_ready(self, shard: Shard) -> bool:
        """Whether a shard is there and was compared with the manifest by this run's fetching process."""
        return (self.run / "compared" / shard.file).exists() and (self.folder / shard.file).is_file()

    def ready(self) -> set[str]:
        """The files of all such shards."""
        present, compared = (
            {path.name for path in folder.iterdir()} for folder in (self.folder, self.run / "compared")
        )
        return present & compared

    def wait(self, shard: Shard, began_s: float) -> None:
        """Wait until a shard is there and compared, for a batch that has waited since `began_s` (time.monotonic).

        Raises InputError for a shard that cannot come, Unreachable after deadline_s; both name the shard and the
        reason. A loader may look further ahead than the cache reaches: the time until a shard is wanted does not count.
        """
        entered_s = looked_s = time.monotonic()
        waits_since_s, is_first_look = math.nan, True  # nan: it is not wanted yet
        while not self.is_ready(shard):
            if self.given_up:
                raise self.given_up[0]
            time.sleep(POLL_S)
            now_s = time.monotonic()
            if now_s - looked_s < LOOK_EVERY_S:
                continue
            looked_s = now_s
            if self.rank not in (os.getpid(), os.getppid()):
                raise Unreachable("the rank of this loader process is gone")
            fault = read_json(self.faults(shard))
            if fault is not None and fault["is_final"]:
                raise InputError(fault["reason"])
            wanted = read_json(self.wanted)
            if math.isnan(waits_since_s) and shard.file in (wanted or ()):
                waits_since_s = began_s if is_first_look else now_s
            is_first_look = False
            if now_s - waits_since_s > self.deadline_s:
                reason = fault["reason"] if fault else f"{shard.file} does not come; {self.fault_of_another()}"
                self.given_up.append(Unreachable(f"{reason}; given up after {self.deadline_s:g} s (data.deadline_s)"))
            has_begun = wanted is not None or now_s - entered_s > STARTS_WITHIN_S
            if has_begun and not self.is_served() and not self.is_ready(shard):
                raise Unreachable(
                    f"{shard.file} cannot come: the process that fetches shards on this node is gone, its error is "
                    f"above; {self.free}"
                )

    def fault_of_another(self) -> str:
        """A likely reason why a shard that was not yet tried does not come: the fault of another shard."""
        faults = filter(None, map(read_json, sorted(self.run.glob("faults/*.json"))))
        other = next((f"another one: {fault['reason']}" for fault in faults), None)
        return other or f"there is no error: a slow network? {self.free}"

    @property
    def free(self) -> str:
        return f"{self.folder} has {free_bytes(self.folder) / 1e9:.3g} GB free"

    def is_served(self) -> bool:
        """Whether this run's fetching process is alive: it holds this lock."""
        with suppress(FileNotFoundError), (self.run / "fetcher.lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False


@dataclass(frozen=True)
class Room:
    """The sizes of a data set, in bytes, by which it fits into a cache or not."""

    train: int
    validation: int
    largest: int  # shard
    num_shards: int
    rows: int  # of the largest training shard

    @classmethod
    def of(cls, manifest: Manifest) -> Room:
        train, validation = ([shard.bytes for shard in manifest.splits[split]] for split in ("train", "validation"))
        most_rows = max(shard.rows for shard in manifest.splits["train"])
        return cls(sum(train), sum(validation), max([*train, *validation]), len(train), most_rows)

    @property
    def total(self) -> int:
        return self.train + self.validation

    def windowed(self, shards: int) -> int:
        return min(self.total, self.validation + WINDOWS_HELD * shards * self.largest)

    def shuffle_block(self, limit_bytes: int) -> ShuffleBlock:
        """The largest windows of which WINDOWS_HELD fit, if not all shards do. InputError if none fits."""
        if self.total <= limit_bytes:
            return ShuffleBlock(self.num_shards, grow=True)
        shards = (limit_bytes - self.validation) // (WINDOWS_HELD * self.largest)
        self.check(ShuffleBlock(max(1, shards)), limit_bytes)
        return ShuffleBlock(shards, grow=True)

    def check_all(self, limit_bytes: int) -> None:
        check(
            self.total <= limit_bytes,
            f"the cache may take {limit_bytes / 1e9:.3g} GB, the data is {self.total / 1e9:.3g} GB; choose another "
            "cache folder",
        )

    def check(self, windows: ShuffleBlock, limit_bytes: int, *, global_batch_size: int = 0) -> None:
        """InputError if the cache cannot hold what these windows need at once."""
        if self.total <= limit_bytes:
            return
        check(
            windows.shards * self.rows >= global_batch_size,
            f"a batch of {global_batch_size} sequences is more than a window of {windows.shards} shards holds "
            f"({windows.shards * self.rows}); raise data.window_shards, and data.cache_gb with it",
        )
        needed = self.windowed(windows.shards)
        check(
            needed <= limit_bytes,
            f"the cache may take {limit_bytes / 1e9:.3g} GB, windows of {windows.shards} shards need "
            f"{needed / 1e9:.3g} GB; raise data.cache_gb, lower data.window_shards or choose another data.cache_dir",
        )


def limit_bytes(cfg: ShardsConfig, folder: Path, manifest: Manifest) -> int:
    """How many bytes the shards may take on this disk. InputError if the disk has less than the settings say."""
    present = sum(shard.bytes for shard in manifest.shards if (folder / shard.file).is_file())
    free = free_bytes(folder)
    if cfg.cache_gb is None:
        return int(present + SHARE_OF_FREE * free)
    wanted = int(cfg.cache_gb * 1e9)
    needed = min(wanted, Room.of(manifest).total)
    check(
        needed <= present + free,
        f"{folder} has {free / 1e9:.3g} GB free, the shards would take {needed / 1e9:.3g} GB; free some, lower "
        "data.cache_gb, or choose data.cache_dir on a larger disk",
    )
    return wanted


def free_bytes(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def open_cache(cfg: ShardsConfig, manifest: Manifest) -> Cache:
    """The cache of a data set on this node, made if it is absent. InputError if it cannot be written."""
    folder = make_folder(cache_dir(cfg) / manifest.id[:16])
    names = {shard.file for shard in manifest.shards}
    for path in folder.glob(".*.part-*"):
        if path.name[1:].rpartition(".part-")[0] in names:
            remove_unlocked(path)
    return Cache(folder, cfg.deadline_s)


def remove_unlocked(path: Path) -> None:
    """Remove a file unless a process holds it."""
    with suppress(FileNotFoundError, BlockingIOError), path.open("rb+") as file:
        flock(file, alone=True)
        path.unlink()


def lock(cache: Cache, *, alone: bool, patience_s: float = 0.0) -> IO[str]:
    """Hold the folder, alone or with other runs, until the file is closed. BlockingIOError if others hold it,
    InputError if its file system has no locks.
    """
    file = (cache.folder / "lock").open("a+")  # NFS asks for reading too
    trying = Retrying(
        retry=retry_if_exception_type(BlockingIOError),
        stop=stop_after_delay(patience_s),
        wait=wait_fixed(LOOK_EVERY_S),
        reraise=True,
    )
    try:
        trying(flock, file, alone=alone)
    except BaseException:
        file.close()
        raise
    return file


def flock(file: IO[Any], *, alone: bool) -> None:
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise InputError(
            f"{file.name} cannot be locked: {error.strerror}; set data.cache_dir to a local disk"
        ) from error
