"""Manifests of prepared data of any size, and a server of S3 that has nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from train.config import S3Config
from train.data.shards.format import Rows
from train.data.shards.manifest import (
    TOKENIZER_FILE,
    DataManifest,
    Shard,
    TokenizerInfo,
    write_manifest,
)
from train.storage.folders import LocalFolder, sha256_bytes
from train.storage.schema import FileName, Sha256

REGION = "us-east-1"
BUCKET = "simulated"


@dataclass(frozen=True)
class Simulated:
    """Training shards and one validation shard, of `shard_rows` sequences each; the default is the usual 64 MiB.

    All shards contain zeros and have the same checksum.
    """

    shards: int
    shard_rows: int = 250_000
    seq_len: int = 128

    def write(self, folder: Path) -> DataManifest:
        """Write everything but the shards, as in a bucket."""
        tokens = np.zeros((self.shard_rows, self.seq_len), np.uint16)
        rows = Rows(tokens, np.zeros(len(tokens), np.uint16), np.zeros(len(tokens), np.uint8))
        content = save(vars(rows))
        sha256 = Sha256(sha256_bytes(content))

        def shard(name: str) -> Shard:
            return Shard(FileName(f"{name}.safetensors"), len(rows), len(content), sha256)

        (folder / "tokenizer").mkdir(parents=True)
        for name in (TOKENIZER_FILE, "tokenizer/tokenizer_config.json"):
            (folder / name).write_bytes(b"{}")
        return write_manifest(
            LocalFolder(folder),
            seq_len=self.seq_len,
            dtype="uint16",
            splits={
                "train": [shard(f"train-{number:05d}") for number in range(self.shards)],
                "validation": [shard("validation-00000")],
            },
            tokenizer=TokenizerInfo(Sha256(sha256_bytes(b"{}")), 30_000, 0, 1, 2, 3, [0, 1, 2, 3]),
            counts={},
            config={},
        )


class Handler(SimpleHTTPRequestHandler):
    def translate_path(self, path: str) -> str:
        return super().translate_path(path.removeprefix(f"/{BUCKET}/data"))

    def end_headers(self) -> None:
        self.send_header("ETag", '"0"')
        super().end_headers()

    def log_message(self, *_: Any) -> None: ...


class StandInS3:
    """A server of S3 on this machine with a data set in `folder`, but without its shards."""

    location = f"s3://{BUCKET}/data"

    def __init__(self, data: Simulated, folder: Path) -> None:
        serving = partial(Handler, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), serving)
        endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.config = S3Config(endpoint=endpoint, region=REGION)

    def __enter__(self) -> StandInS3:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
