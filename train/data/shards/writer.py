"""Writes prepared data to disk or straight to S3: shards as they fill, the manifest last."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors.numpy import save

from train.data.shards.format import FORMAT, Manifest, Rows, Shard, TokenizerInfo, read_manifest
from train.storage.folders import Folder, canonical_json, sha256_bytes
from train.storage.manifest import sealed
from train.storage.schema import FileName, Sha256


def write_shard(folder: Folder, name: str, rows: Rows) -> Shard:
    """Write one shard, whole or not at all."""
    content = save({name: np.ascontiguousarray(tensor) for name, tensor in vars(rows).items()})
    folder.write(name, content)
    return Shard(file=FileName(name), rows=len(rows), bytes=len(content), sha256=Sha256(sha256_bytes(content)))


def write_manifest(
    folder: Folder,
    *,
    seq_len: int,
    dtype: str,
    splits: dict[str, list[Shard]],
    tokenizer: TokenizerInfo,
    counts: dict[str, Any],
    config: dict[str, Any],
) -> Manifest:
    """Complete a data set: nothing reads the folder before this file is there."""
    body = {
        "format": FORMAT,
        "seq_len": seq_len,
        "dtype": dtype,
        "splits": {split: [asdict(shard) for shard in shards] for split, shards in splits.items()},
        "tokenizer": asdict(tokenizer),
        "counts": counts,
        "config": config,
    }
    folder.write("manifest.json", canonical_json(sealed(body, "id")))
    return read_manifest(folder)


class Uploads:
    """Writes in a thread, in order and one piece at a time; an error is raised at the next call.

    Leaving the context waits for the piece that is being written.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.last: Future[None] | None = None

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def add(self, work: Callable[[], None]) -> None:
        """Wait for the piece before, then begin this one."""
        self.wait()
        self.last = self.pool.submit(work)

    def wait(self) -> None:
        if self.last is not None:
            self.last.result()
