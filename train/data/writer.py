"""Writing prepared data, to disk or straight to S3: shards as they fill, the manifest last."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
from safetensors.numpy import save

from train.data.packing import Rows
from train.data.shards import FORMAT, Manifest, Shard, TokenizerInfo, read_manifest
from train.storage import Folder, canonical_json, sha256_bytes, sha256_json
from train.untrusted import FileName, Sha256


def write_shard(folder: Folder, name: str, rows: Rows) -> Shard:
    """Write one shard under its final name, whole or not at all."""
    tensors = {"tokens": rows.tokens, "pivot": rows.pivot, "same_document": rows.same_document}
    content = save({key: np.ascontiguousarray(tensor) for key, tensor in tensors.items()})
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
    folder.write("manifest.json", canonical_json({**body, "id": sha256_json(body)}))
    return read_manifest(folder)


class Uploads:
    """Writing beside the caller's own work, in order and one piece at a time; an error comes out at the next call.

    Leaving the context waits for what is under way.
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
