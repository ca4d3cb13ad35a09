"""A prepared data set, on disk or in S3. Training reads it from a folder on this node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train.config import InputError, S3Config, ShardsConfig
from train.data.shards.cache import ShardCache
from train.data.shards.format import (
    TOKENIZER_FILE,
    DataManifest,
    Shard,
    ShardSet,
    check_files,
    read_manifest,
)
from train.data.shards.order import ShardSampler
from train.data.shards.prefetch import Prefetcher
from train.storage.atomic_io import write_atomic
from train.storage.checksums import fault_of, fault_of_file, first_fault, read_verified
from train.storage.folders import Folder, is_s3, local_path, open_folder, sha256_bytes, sha256_file
from train.storage.foreign import check_folder

TOKENIZER = (TOKENIZER_FILE, "tokenizer/tokenizer_config.json")


class PreparedData:
    """A prepared data set. Its local `folder` has the tokenizer from the start, and each shard once it is fetched."""

    def __init__(self, cfg: ShardsConfig, s3: S3Config, *, looks: bool = True) -> None:
        """Open the data. `looks`: check the lengths of local files. Raises InputError if the data is unusable."""
        self.cfg = cfg
        self.source = open_folder(cfg.path, s3)
        self.manifest = read_manifest(self.source)
        self.cache = ShardCache(cfg, self.manifest) if is_s3(cfg.path) else None
        if self.cache is None:
            self.folder = local_path(cfg.path)
            check_folder(self.folder / "tokenizer", self.folder)
            if looks:
                check_files(self.folder, self.manifest, checksums=False)
        else:
            self.folder = self.cache.folder
            bring_tokenizer(self.source, self.folder, self.manifest)

    def split(self, name: str) -> ShardSet:
        return ShardSet(self.folder, self.manifest, name, self.cache.wait if self.cache else None)

    def verify(self, shards: Sequence[Shard] | None = None) -> None:
        """Verify the checksums of local shards. Raises InputError, which names the first shard that does not match.

        For shards in S3 this compares only lengths; checksums are verified on arrival. `shards`: None for all.
        """
        shards = self.manifest.shards if shards is None else shards
        if fault := first_fault(
            lambda shard: self.fault(shard, checksum=self.cache is None), shards
        ):
            raise InputError(fault)

    def fault(self, shard: Shard, *, checksum: bool = True) -> str | None:
        """Return how a shard at its source differs from the manifest; None if it matches."""
        if self.cache is None:
            fault = fault_of_file(self.folder / shard.file, shard.entry, checksum=checksum)
        else:
            sha256 = (lambda: sha256_bytes(self.source.read(shard.file))) if checksum else None
            fault = fault_of(shard.entry, self.source.size(shard.file), sha256)
        return fault and f"{self.source.location}/{shard.file} {fault}; prepare the data again"

    def window_shards(self, order: ShardSampler) -> int:
        """Return how many shards of each lane can be shuffled together; 0 if the cache is too small even for one."""
        return order.window_shards if self.cache is None else self.cache.window_shards(order)

    def on_demand(self, name: str) -> ShardSet:
        """Return a split that needs no prefetcher: a shard is fetched into the cache when it is first read."""
        if self.cache is None:
            return self.split(name)
        # imported here: the connector loads slowly
        from train.data.shards.download import (
            Downloader,
            put_back,
        )

        self.cache.check_fits(self.manifest.splits[name])
        self.held = self.cache.hold(alone=False)
        downloader = Downloader(self.source, self.cache)

        def fetch(shards: Sequence[Shard]) -> None:
            try:
                for shard in shards:
                    downloader.download(shard, limit_s=self.cfg.deadline_s)
            finally:
                put_back()  # restore the environment: this is the user's process

        return ShardSet(self.folder, self.manifest, name, fetch)

    def bring(self, name: str) -> None:
        """Verify the checksums of a split's shards. Shards in S3 are first fetched into the cache.

        `brought` can then read them without a prefetcher. Only one rank of each machine may call this. Raises
        InputError in the same cases as `verify`.
        """
        shards = self.on_demand(name)
        if shards.wait is None:
            self.verify(shards.shards)
        else:
            shards.wait(shards.shards)

    def brought(self, name: str) -> ShardSet:
        return ShardSet(self.folder, self.manifest, name)

    def prefetcher(self, sampler: ShardSampler, *, is_first_on_machine: bool) -> Prefetcher | None:
        """Start to fetch the shards of `sampler`. Returns None if they are on disk, or if another rank fetches them.

        Raises InputError if this machine's cache has no space for them.
        """
        if self.cache is None or not is_first_on_machine:
            return None
        return Prefetcher(self.source, self.cache, sampler)


def bring_tokenizer(source: Folder, folder: Path, manifest: DataManifest) -> None:
    """Copy the tokenizer's files to this node. Raises InputError if another tokenizer made the shards."""
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER:
        # the other file has no known checksum: always copy it
        path, is_known = (
            folder / name,
            name == TOKENIZER_FILE,
        )
        if not (is_known and path.is_file() and sha256_file(path) == manifest.tokenizer.sha256):
            sha256, fault = (
                manifest.tokenizer.sha256 if is_known else None,
                "is not the tokenizer that made the shards",
            )
            advice = "put the original back or prepare the data again"
            write_atomic(path, read_verified(source, name, sha256, fault=fault, advice=advice))
