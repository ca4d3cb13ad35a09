"""A prepared data set, on disk or in S3, as training sees it: a folder on this node with all that is needed now."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from train.config import InputError, S3Config, ShardsConfig
from train.data.cache import Room, limit_bytes, open_cache
from train.data.order import ShardSampler, Windows
from train.data.shards import (
    TOKENIZER_FILE,
    Manifest,
    Shard,
    ShardSet,
    check_files,
    fault_of,
    fault_of_file,
    read_manifest,
)
from train.storage import (
    MISSING_S,
    Folder,
    Mismatch,
    is_s3,
    local_path,
    open_folder,
    read_again,
    sha256_bytes,
    sha256_file,
    wait_for_file,
    write_atomic,
)

if TYPE_CHECKING:
    from train.s3 import S3Folder

TOKENIZER = (TOKENIZER_FILE, "tokenizer/tokenizer_config.json")
HEADS_AT_ONCE = 16


class Supply(Protocol):
    """Keeps the shards coming while a run goes on; a context manager."""

    def __enter__(self) -> Supply: ...

    def __exit__(self, *_: object) -> None: ...

    def consumed(self, rows: int) -> None:
        """Say how many sequences of the whole run all ranks have done with."""


class NothingToDo:
    """For ranks whose shards are there, or brought by another rank's process."""

    def __enter__(self) -> NothingToDo:
        return self

    def __exit__(self, *_: object) -> None: ...

    def consumed(self, rows: int) -> None: ...


class PreparedData:
    """`folder` holds the tokenizer and, sooner or later, the shards. Raises InputError for data that will not do."""

    def __init__(self, cfg: ShardsConfig, s3: S3Config, *, looks: bool = True) -> None:
        """`looks`: whether local files are compared with the manifest at once, by their length."""
        self.cfg = cfg
        self.source = open_folder(cfg.path, s3)
        self.manifest = read_manifest(self.source)
        self.cache = open_cache(cfg, self.manifest) if is_s3(cfg.path) else None
        if self.cache is None:
            self.folder = local_path(cfg.path)
            if looks:
                check_files(self.folder, self.manifest, checksums=False)
        else:
            self.folder = self.cache.folder
            bring_tokenizer(self.source, self.folder, self.manifest)

    def split(self, name: str) -> ShardSet:
        return ShardSet(self.folder, self.manifest, name, self.cache.wait if self.cache else None)

    def verify(self) -> None:
        """Compare local shards with their checksums. Of those in S3, whose checksums are compared as they arrive, only
        that they are there and their length. InputError names the first that is not right.
        """
        if self.cache is None:
            check_files(self.folder, self.manifest, checksums=True)
            return
        for fault in absent(self.source, self.manifest):
            raise InputError(fault)

    def fault(self, shard: Shard) -> str | None:
        """What is wrong with a shard where it lies, read whole; None if it is what the manifest says."""
        if self.cache is None:
            return fault_of_file(self.folder, shard, checksum=True)
        place = f"{self.source.location}/{shard.file}"
        try:
            content = self.source.read(shard.file)
        except FileNotFoundError:
            return fault_of(shard, place, None, None)
        return fault_of(shard, place, len(content), lambda: sha256_bytes(content))

    def windows(self) -> Windows:
        """What the settings or, on this machine, the room come to."""
        wanted = self.cfg.window_shards
        num_shards = len(self.manifest.splits["train"])
        if wanted is not None:
            return Windows(min(wanted, num_shards))
        if self.cache is None:
            return Windows(num_shards, grow=True)
        return Room.of(self.manifest).windows(limit_bytes(self.cfg, self.folder, self.manifest))

    def on_demand(self, name: str) -> ShardSet:
        """The same as `split` without a supply: a shard is fetched when it is first read, into the cache."""
        if self.cache is None:
            return self.split(name)
        Room.of(self.manifest).check_all(limit_bytes(self.cfg, self.folder, self.manifest))
        from train.data.download import Downloader

        downloader = Downloader(cast("S3Folder", self.source), self.cfg, self.manifest, self.cache)
        return ShardSet(self.folder, self.manifest, name, lambda shard, _: downloader.bring(shard))

    def supply(self, sampler: ShardSampler, *, is_first_on_machine: bool) -> Supply:
        """Begin to fetch what `sampler` will ask for. InputError if this machine's cache has no room for it."""
        if self.cache is None or not is_first_on_machine:
            return NothingToDo()
        limit = limit_bytes(self.cfg, self.folder, self.manifest)
        Room.of(self.manifest).check(sampler.windows, limit, global_batch_size=sampler.global_batch_size)
        from train.data.fetcher import Fetcher  # the connector is for those who need it

        return Fetcher(cast("S3Folder", self.source), self.cfg, self.manifest, self.cache, sampler, limit)


def bring_tokenizer(source: Folder, folder: Path, manifest: Manifest) -> None:
    """Copy the tokenizer's files to this node. InputError if it is not the one that made the shards."""
    (folder / "tokenizer").mkdir(exist_ok=True)
    for name in TOKENIZER:
        path, is_known = folder / name, name == TOKENIZER_FILE  # by its checksum; the other one is read each time
        if not (is_known and path.is_file() and sha256_file(path) == manifest.tokenizer.sha256):
            write_atomic(path, read_tokenizer(source, name, manifest))


@read_again
def read_tokenizer(source: Folder, name: str, manifest: Manifest) -> bytes:
    try:
        content = wait_for_file(source, name, source.read)
    except FileNotFoundError:
        raise InputError(f"{source.location}/{name} is missing; prepare the data again") from None
    if name == TOKENIZER_FILE and sha256_bytes(content) != manifest.tokenizer.sha256:
        raise Mismatch(
            f"{source.location}/{name} is not the tokenizer that made the shards; put it back or prepare again"
        )
    return content


def absent(source: Folder, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the presence and length of shards in S3."""
    until_s = time.monotonic() + MISSING_S  # for all of them together

    def size_of(name: str) -> int:
        size = source.size(name)
        if size is None:
            raise FileNotFoundError(name)
        return size

    def examine(shard: Shard) -> str | None:
        size: int | None = None
        with suppress(FileNotFoundError):
            size = wait_for_file(source, shard.file, size_of, until_s=until_s)
        return fault_of(shard, f"{source.location}/{shard.file}", size, None)

    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        yield from filter(None, pool.map(examine, manifest.shards))
