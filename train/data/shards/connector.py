"""One shard from S3 to a file. Only this module knows the connector.

s3torchconnector retries by itself, but the parts of a read share its attempts, it has no time limit (a dead connection
takes it six minutes) and compares no checksum. So callers set a time limit for each download, begin again with a new
client, and compare length and sha256 with the manifest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from s3torchconnector import S3ClientConfig, S3Exception, S3MapDataset

from train.config import Unreachable
from train.storage.aws_errors import TABLE, one_line, problem_and_cure
from train.storage.s3 import DEFAULT_REGION, BotoCoreError, ClientError, S3Folder, open_session

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 16 * 2**10, 8 * 2**20  # of a request when a download continues in the middle
PIECE_S = 1.0  # that a piece should take: a faster one is followed by a larger one
MIN_PART_BYTES, MAX_PART_BYTES = 5 * 2**20, 512 * 2**20  # of the connector, which holds a part in memory
CONNECTOR_ATTEMPTS = 3
ASK_EVERY_S = 30.0  # for renewed credentials
FINAL = {  # phrases in the connector's errors that retries will not change, and AWS's code or what they mean
    "bucket does not exist": "NoSuchBucket",
    "No signing credentials": "NoCredentialsError",
    "InvalidRange": "it is shorter than the manifest says",
}
PASSING = {  # that time may change: a new role takes a while to be known everywhere, a copy may be under way
    "TIME_TOO_SKEWED": "RequestTimeTooSkewed",
    "TOKEN_EXPIRED": "ExpiredToken",
    "key does not exist": "it is not in the bucket",
    "Forbidden": "AccessDenied",
    "AccessDenied": "AccessDenied",
}
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
put_here: dict[str, str] = {}  # credentials that this process has put into its environment


class Doubtful(RuntimeError):
    """The object is denied, missing, or does not match the manifest: a few more attempts may help, many will not."""


class Client:
    """The connector over the objects of one data set, with the present credentials of boto3, which finds them in more
    ways than the connector and renews them. A new client is needed when they have changed, and after a fault.
    """

    def __init__(self, folder: S3Folder, files: Sequence[str], *, largest_bytes: int) -> None:
        s3, self.folder = folder.s3, folder
        given = {name: os.environ[name] for name in CREDENTIALS if name in os.environ}
        self.uses_environment = s3.profile is None and bool(given) and given != put_here
        self.session = open_session(s3, skips_environment=not self.uses_environment)
        self.numbers = {file: number for number, file in enumerate(files)}
        self.locations = [f"{folder.location}/{file}" for file in files]
        self.part_bytes = min(max(largest_bytes, MIN_PART_BYTES), MAX_PART_BYTES)  # one request a shard
        try:
            self.credentials = self.current_credentials()
        except (BotoCoreError, ClientError) as error:
            raise Unreachable(f"there are no credentials: {error}") from error
        self.asked_s = time.monotonic()
        if not self.uses_environment:
            put(self.credentials)
        self.streams = self._open()

    def current_credentials(self) -> tuple[str | None, ...]:
        credentials = self.session.get_credentials()
        if credentials is None:
            return (None, None, None)
        frozen = credentials.get_frozen_credentials()
        return (frozen.access_key, frozen.secret_key, frozen.token)

    def is_stale(self) -> bool:
        """Whether credentials were renewed, looked up now and then. The old ones serve while there are no new ones."""
        if time.monotonic() - self.asked_s < ASK_EVERY_S:
            return False
        self.asked_s = time.monotonic()
        try:
            return self.current_credentials() != self.credentials
        except (BotoCoreError, ClientError):
            return False

    def _open(self) -> Any:
        return S3MapDataset.from_objects(
            self.locations,
            region=self.session.region_name or DEFAULT_REGION,
            endpoint=self.folder.endpoint,
            reader_constructor=stream_constructor,
            s3client_config=S3ClientConfig(
                part_size=self.part_bytes, force_path_style=self.folder.s3.path_style, max_attempts=CONNECTOR_ATTEMPTS
            ),
        )

    def read(self, file: str, write: Callable[[bytes], None], *, offset: int, size: int, in_pieces: bool) -> None:
        """Pass an object's bytes from `offset` up to `size` to `write`, in order: in pieces, or in one request, which
        passes on nothing before it has all.

        Raises Doubtful or Unreachable. `write` may raise to stop it.
        """
        stream = self.streams[self.numbers[file]]
        try:
            if in_pieces or offset > 0:
                read_pieces(stream, write, offset, size)
            else:
                for chunk in stream():
                    write(chunk)
        except S3Exception as error:  # one class for all; only its text distinguishes the cases
            raise explain(error) from error


def stream_constructor(bucket: str, key: str, get_object_info: object, get_stream: Any) -> Any:
    """An S3ReaderConstructor of the connector whose reader is the stream itself, `get_stream(start, end)`.

    The connector's own readers copy all of it once more, into memory that grows, or ask for the length first.
    """
    return get_stream


def read_pieces(
    stream: Callable[[int, int], Iterable[bytes]], write: Callable[[bytes], None], offset: int, size: int
) -> None:
    """Read by one request after the other, each as large as the link allows in PIECE_S: a request that is not complete
    when the attempt ends is lost.
    """
    piece_bytes = MIN_PIECE_BYTES
    while offset < size:
        began_s, end = time.monotonic(), min(offset + piece_bytes, size)
        for chunk in stream(offset, end):
            write(chunk)
        offset, took_s = end, time.monotonic() - began_s
        if took_s < PIECE_S:
            piece_bytes = min(2 * piece_bytes, MAX_PIECE_BYTES)
        elif took_s > 4 * PIECE_S:
            piece_bytes = max(piece_bytes // 2, MIN_PIECE_BYTES)


def put(credentials: tuple[str | None, ...]) -> None:
    """Put credentials into the environment of the fetching process, where the connector looks first."""
    put_here.clear()
    for name, value in zip(CREDENTIALS, credentials, strict=True):
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = put_here[name] = value


def explain(error: Exception) -> Exception:
    text = one_line(error)
    for phrase, meaning in (FINAL | PASSING).items():
        if phrase in text:
            known = "; ".join(problem_and_cure(meaning, service="S3")) if meaning in TABLE else meaning
            return (Doubtful if phrase in FINAL else Unreachable)(f"{known} ({text})")
    return Unreachable(text)
