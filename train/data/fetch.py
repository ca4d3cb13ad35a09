"""One shard from S3 to a file: the only place that knows the connector.

s3torchconnector tries again on its own, but its budget is shared by the parts of a read, it has no time limit (a dead
connection costs it six minutes) and compares no checksum. So whoever calls this gives each download a time of its own,
begins again with a new client, and compares length and sha256 with the manifest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from s3torchconnector import S3ClientConfig, S3Exception, S3MapDataset

from train.config import Unreachable
from train.s3 import DEFAULT_REGION, BotoCoreError, ClientError, S3Folder, open_session

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 16 * 2**10, 8 * 2**20  # of a request when a download goes on in the middle
PIECE_S = 1.0  # what a piece should take: one that takes less is followed by a larger one
MIN_PART_BYTES, MAX_PART_BYTES = 5 * 2**20, 512 * 2**20  # of the connector, and what it may keep in memory for a part
CONNECTOR_ATTEMPTS = 3
ASK_EVERY_S = 30.0  # for renewed credentials
REFUSALS = {  # words of the connector's errors that many more attempts will not change, and what to say
    "bucket does not exist": "there is no such bucket",
    "No signing credentials": "there are no AWS credentials on this machine",
    "InvalidRange": "it is shorter than the manifest says",
}
DENIALS = {  # that time may change: roles and policies take a while to be known everywhere, a copy may be on its way
    "key does not exist": "it is not in the bucket",
    "Forbidden": "S3 refuses access to it",
    "AccessDenied": "S3 refuses access to it",
}
TEMPORARY = ("Expired", "EXPIRED", "hrottl")
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
put_here: dict[str, str] = {}  # credentials that this process put into its environment


class Doubtful(RuntimeError):
    """A few more tries may help, many will not: refused, not there, or not the bytes that the manifest promises."""


class Client:
    """The connector over the objects of one data set, with the credentials of the moment: boto3 knows more places to
    find them than the connector does, and renews them. Make a new one when they have changed, or after a fault.
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
            raise Unreachable(f"credentials cannot be had: {error}") from error
        self.asked_s = time.monotonic()
        if not self.uses_environment:
            put(self.credentials)
        self.streams = self._open()

    def current_credentials(self) -> tuple[str | None, ...]:
        found = self.session.get_credentials()
        if found is None:
            return (None, None, None)
        frozen = found.get_frozen_credentials()
        return (frozen.access_key, frozen.secret_key, frozen.token)

    def is_stale(self) -> bool:
        """Whether credentials were renewed; asked now and then. Those at hand serve while new ones cannot be had."""
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
        """Give an object's bytes from `offset` up to `size` to `write`, in order: in one request, which brings nothing
        before it has brought all, or in several.

        Raises Doubtful or Unreachable. `write` may raise to stop it.
        """
        stream = self.streams[self.numbers[file]]
        try:
            if in_pieces or offset > 0:
                read_pieces(stream, write, offset, size)
            else:
                for chunk in stream():
                    write(chunk)
        except S3Exception as error:  # one class for all; only its words tell cases apart
            raise explain(error) from error


def stream_constructor(bucket: str, key: str, get_object_info: object, get_stream: Any) -> Any:
    """An S3ReaderConstructor of the connector whose reader is the stream itself, `get_stream(start, end)`.

    The connector's own readers copy all of it once more, into memory that grows, or ask for the length first.
    """
    return get_stream


def read_pieces(
    stream: Callable[[int, int], Iterable[bytes]], write: Callable[[bytes], None], offset: int, size: int
) -> None:
    """One request after the other, each as large as the link brings in a moderate time: what a request has not brought
    whole is lost when the attempt is over.
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
    """Into the environment, where the connector looks first: that of the process that fetches, and nobody else's."""
    put_here.clear()
    for name, value in zip(CREDENTIALS, credentials, strict=True):
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = put_here[name] = value


def explain(error: Exception) -> Exception:
    text = " ".join(str(error).split())
    if any(word in text for word in TEMPORARY):
        return Unreachable(text)
    for words, meaning in (REFUSALS | DENIALS).items():
        if words in text:
            return (Doubtful if words in REFUSALS else Unreachable)(f"{meaning} ({text})")
    return Unreachable(text)
