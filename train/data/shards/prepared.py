"""A prepared data set, on disk or in S3. Training reads it from a folder on this node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from train.config import InputError, S3Config, ShardsConfig
from train.data.shards.cache import ShardCache, held_out
from train.data.shards.format import ShardSet
from train.data.shards.manifest import (
    TOKENIZER_FILE,
    DataManifest,
    Shard,
    check_files,
    read_manifest,
)
from train.data.shards.order import ShardSampler
from train.data.shards.prefetch import Prefetcher, size_of, wanted_shards
from train.storage.atomic_io import write_atomic
from train.storage.checksums import fault_of, fault_of_file, first_fault, read_verified
from train.storage.folders import Folder, is_s3, local_path, open_folder, sha256_bytes, sha256_file
from train.storage.foreign import check_folder

logger = logging.getLogger("train")
TOKENIZER = (TOKENIZER_FILE, "tokenizer/tokenizer_config.json")


class PreparedData:
    """A prepared data set. Its local `folder` has the tokenizer from the start, and each shard once it is fetched."""

    def __init__(self, cfg: ShardsConfig, s3: S3Config, *, looks: bool = True) -> None:
        """Open the data. `looks`: check the lengths of local files. Raises InputError if the data is unusable."""
        self.cfg = cfg
        self.s3 = s3
        self.source = open_folder(cfg.path, s3)
        self.manifest = read_manifest(self.source)
        self.cache: ShardCache | None = None
        if is_s3(cfg.path):
            self.cache = ShardCache(cfg, self.manifest)
            self.folder = self.cache.folder
            bring_tokenizer(self.source, self.folder, self.manifest)
            return
        self.folder = local_path(cfg.path)
        check_folder(self.folder / "tokenizer", self.folder)
        if looks:
            check_files(self.folder, self.manifest, checksums=False)

    def split(self, name: str) -> ShardSet:
        """Return a split. Shards in S3 are waited for: a prefetcher, or `bring`, puts them into the cache."""
        wait = self.cache.wait if self.cache else None
        return ShardSet(self.folder, self.manifest, name, wait)

    def verify(self) -> None:
        """Verify the checksums of local shards. Raises InputError, which names the first shard that does not match.

        For shards in S3 this compares only lengths; checksums are verified on arrival.
        """
        self.check(self.manifest.shards)

    def check(self, shards: Sequence[Shard]) -> None:
        checksum = self.cache is None
        fault = first_fault(lambda shard: self.fault(shard, checksum=checksum), shards)
        if fault is not None:
            raise InputError(fault)

    def fault(self, shard: Shard, *, checksum: bool = True) -> str | None:
        """Return how a shard at its source differs from the manifest; None if it matches."""
        if self.cache is None:
            fault = fault_of_file(self.folder / shard.file, shard.entry, checksum=checksum)
        else:
            size = self.source.size(shard.file)
            sha256 = partial(self.checksum, shard) if checksum else None
            fault = fault_of(shard.entry, size, sha256)
        return fault and f"{self.source.location}/{shard.file} {fault}; prepare the data again"

    def checksum(self, shard: Shard) -> str:
        return sha256_bytes(self.source.read(shard.file))

    def bring(self, shards: Sequence[Shard]) -> None:
        """Verify the checksums of local shards, or fetch shards from S3 into the cache, where `split` then finds them.

        Only one rank of each machine may call this. Raises InputError or Unreachable, which name a shard.
        """
        if self.cache is None:
            self.check(shards)
            return
        self.cache.check_space(shards)
        with Prefetcher(self.cfg.path, self.s3, self.cache, lambda _: shards, deletes=False):
            self.cache.wait(shards)

    def window_shards(self, order: ShardSampler) -> int:
        """Return how many shards of each lane can be shuffled together; 0 if the cache is too small even for one."""
        if self.cache is None:
            return order.window_shards
        return self.cache.window_shards(order)

    def prefetcher(self, order: ShardSampler, *, is_first_on_machine: bool) -> Prefetcher | None:
        """Start to fetch the shards of `order`. Returns None if they are on disk, or if another rank fetches them.

        Raises InputError if this machine's cache has no space for them.
        """
        cache = self.cache
        if cache is None or not is_first_on_machine:
            return None
        cache.check_windows(order)
        limit_bytes = cache.limit_bytes()
        fits = cache.part_bytes(order) <= limit_bytes
        if not fits:  # the previous window's files are deleted, but take space until readers open the next window
            window = order.window_shards * len(order.lanes_here)
            limit_bytes -= window * cache.largest_bytes

        def wanted(consumed_rows: int | None) -> list[Shard]:
            if consumed_rows is not None:
                order.consumed_rows = consumed_rows
            return wanted_shards(self.manifest, order, limit_bytes)

        announce(self.manifest, order)
        return Prefetcher(self.cfg.path, self.s3, cache, wanted, deletes=not fits)


def announce(manifest: DataManifest, order: ShardSampler) -> None:
    """Log how much data this machine reads."""
    train = manifest.splits["train"]
    part = [train[number] for number in order.lanes.shards_of(order.lanes_here)]
    part += held_out(manifest, order)
    logger.info(
        "shards: this machine reads %d of %d (%s of %s)",
        len(part),
        len(manifest.shards),
        size_of(part),
        size_of(manifest.shards),
    )


def bring_tokenizer(source: Folder, folder: Path, manifest: DataManifest) -> None:
    """Copy the tokenizer's files to this node. Raises InputError if another tokenizer made the shards."""
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER:
        path = folder / name
        sha256 = None  # the other file has no known checksum: it is always copied
        if name == TOKENIZER_FILE:
            sha256 = manifest.tokenizer.sha256
            if path.is_file() and sha256_file(path) == sha256:
                continue
        fault = "is not the tokenizer that made the shards"
        advice = "put the original back or prepare the data again"
        write_atomic(
            path,
            read_verified(
                source,
                name,
                sha256,
                fault=fault,
                advice=advice,
            ),
        )
