"""Simulated prepared data of any size: a server that generates shards when they are read.

Manifest, lengths, headers and checksums are like those of real shards.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from train.config import S3Config
from train.data.shards.format import (
    TOKENIZER_FILE,
    DataManifest,
    Rows,
    Shard,
    TokenizerInfo,
    write_manifest,
)
from train.storage.folders import LocalFolder, sha256_bytes
from train.storage.schema import FileName, Sha256

DIGITS = 30_000  # a row's first two tokens are its number in this base, by which readers can identify it
TOKENIZER = (TOKENIZER_FILE, "tokenizer/tokenizer_config.json")
SHARD = re.compile(r"(train|validation)-(\d{5,})\.safetensors")
REGION = "us-east-1"


@dataclass(frozen=True)
class Simulated:
    """Training shards and one validation shard, of `shard_rows` sequences each; the default is the usual 64 MiB.

    If `is_numbered`, each row contains its number. Otherwise all shards contain zeros and have the same checksum, which
    is computed only once.
    """

    shards: int
    shard_rows: int = 250_000
    seq_len: int = 128
    is_numbered: bool = False

    @property
    def rows(self) -> int:
        """Number of training sequences."""
        return self.shards * self.shard_rows

    @cached_property
    def shard_bytes(self) -> int:
        return len(self.made(0))

    @cached_property
    def zeros(self) -> bytes:
        return self.made(0)

    def made(self, first_row: int) -> bytes:
        """Return a shard whose rows are numbered from `first_row`."""
        from safetensors.numpy import save

        tokens = np.zeros((self.shard_rows, self.seq_len), np.uint16)
        if self.is_numbered:
            tokens[:, 0], tokens[:, 1] = np.divmod(first_row + np.arange(self.shard_rows), DIGITS)
        return save(
            vars(
                Rows(
                    tokens,
                    np.zeros(self.shard_rows, np.uint16),
                    np.zeros(self.shard_rows, np.uint8),
                )
            )
        )

    def content(self, file: str) -> bytes:
        """Return the content of the shard with this name."""
        match = SHARD.fullmatch(file)
        assert match is not None, file
        if not self.is_numbered:
            return self.zeros
        return self.made((int(match[2]) if match[1] == "train" else self.shards) * self.shard_rows)

    def write(self, folder: Path) -> DataManifest:
        """Write everything but the shards."""
        (folder / "tokenizer").mkdir(parents=True)
        for name in TOKENIZER:
            (folder / name).write_bytes(b"{}")
        splits = {
            "train": [f"train-{number:05d}" for number in range(self.shards)],
            "validation": ["validation-00000"],
        }
        same = None if self.is_numbered else (len(self.zeros), Sha256(sha256_bytes(self.zeros)))

        def shard(name: str) -> Shard:
            file = FileName(f"{name}.safetensors")
            size, sha256 = same or (
                len(content := self.content(file)),
                Sha256(sha256_bytes(content)),
            )
            return Shard(file, self.shard_rows, size, sha256)

        return write_manifest(
            LocalFolder(folder),
            seq_len=self.seq_len,
            dtype="uint16",
            splits={split: [shard(name) for name in names] for split, names in splits.items()},
            tokenizer=TokenizerInfo(Sha256(sha256_bytes(b"{}")), DIGITS, 0, 1, 2, 3, [0, 1, 2, 3]),
            counts={},
            config={},
        )


class StandInS3:
    """An S3 server on this machine for the data in `folder`. It generates shards when they are read.

    It counts requests and bytes per user: the access key is the user's name, and signatures are not checked.
    """

    def __init__(self, data: Simulated, folder: Path) -> None:
        self.data, self.folder = data, folder
        # by (user, is a shard)
        self.gets, self.sent_bytes = (
            Counter[tuple[str, bool]](),
            Counter[tuple[str, bool]](),
        )
        self.lock = threading.Lock()
        self.server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"service": self}))
        self.location = "s3://simulated/data"

    @property
    def config(self) -> S3Config:
        return S3Config(
            endpoint=f"http://127.0.0.1:{self.server.server_port}", region=REGION, path_style=True
        )

    def __enter__(self) -> StandInS3:
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def content(self, name: str) -> bytes | None:
        if SHARD.fullmatch(name):
            return self.data.content(name)
        known = name in ("manifest.json", *TOKENIZER)
        return (self.folder / name).read_bytes() if known else None

    def count(self, user: str, name: str, num_bytes: int) -> None:
        with self.lock:
            key = user, SHARD.fullmatch(name) is not None
            self.gets[key] += 1
            self.sent_bytes[key] += num_bytes


class Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        # a client that exits aborts its downloads
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    service: StandInS3
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.answer(sends=True)

    def do_HEAD(self) -> None:
        self.answer(sends=False)

    def answer(self, *, sends: bool) -> None:
        name = self.path.partition("?")[0].removeprefix("/simulated/data/")
        content, status, headers = (
            self.service.content(name),
            200,
            {"ETag": '"0"', "Accept-Ranges": "bytes"},
        )
        if content is None:
            content, status, headers = b"<Error><Code>NoSuchKey</Code></Error>", 404, {}
        elif wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            content, status = content[first : last + 1], 206
        user = re.search(r"Credential=([^/]+)/", self.headers.get("Authorization", ""))
        if status != 404:
            self.service.count(user[1] if user else "", name, len(content) if sends else 0)
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if sends:
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...
