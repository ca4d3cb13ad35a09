"""The download of shards from S3 with s3torchconnector, which only this module imports, in a process of its own.

The connector retries, but has no time limit (it waits six minutes on a dead connection) and verifies no checksum. This
module therefore gives up an attempt at which nothing arrives for ATTEMPT_S, begins the next one with a new client, and
compares length and sha256 with the manifest before the file gets the shard's name.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, Queue
from threading import Thread
from typing import Any

from s3torchconnector import S3ClientConfig, S3Exception, S3MapDataset

from train.config import InputError, S3Config, Unreachable
from train.data.shards.cache import ShardCache
from train.data.shards.manifest import Shard
from train.storage import s3_route
from train.storage.aws_errors import one_line
from train.storage.checksums import fault_of
from train.storage.s3 import DEFAULT_REGION, S3Folder
from train.storage.s3_session import credentials, open_session

ATTEMPT_S = 60.0  # seconds without data after which an attempt ends
# The connector returns a response only when all of it has arrived. A slow link needs small responses, so that the first
# one arrives within ATTEMPT_S.
REQUEST_BYTES = 8 * 2**20
CONNECTOR_ATTEMPTS = 3
CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# variables that the connector reads
USED = (*CREDENTIALS, *s3_route.PROXIES, s3_route.AUTHORITIES)

Read = Callable[[str, int, int], Iterator[bytes]]  # reads the bytes [first, last) of a file


class Downloader:
    """The downloads of one data set. Several threads may call `download` at the same time, for different shards."""

    def __init__(self, location: str, s3: S3Config, cache: ShardCache) -> None:
        self.cache = cache
        self.source = S3Folder(location, s3)
        endpoint = self.source.client.meta.endpoint_url
        self.route = s3_route.variables(endpoint, self.source.session._session)
        self.lock = threading.Lock()
        self.client: Read | None = None

    def download(self, shard: Shard) -> None:
        """Put a shard into the cache. Raises Unreachable if this attempt fails."""
        part = self.cache.run / shard.file
        digest = hashlib.sha256()
        try:
            with part.open("wb") as file:
                for chunk in self.chunks(shard):
                    file.write(chunk)
                    digest.update(chunk)
                file.flush()
                os.fsync(file.fileno())
            fault = fault_of(shard.entry, part.stat().st_size, digest.hexdigest)
            if fault is not None:
                raise Unreachable(damaged(f"{self.source.location}/{shard.file}", fault))
            part.rename(self.cache.folder / shard.file)
        except OSError as error:
            raise Unreachable(
                f"{shard.file} cannot be written to {self.cache.folder}: {error.strerror}"
            ) from error

    def chunks(self, shard: Shard) -> Iterator[bytes]:
        """Yield a shard's content as it arrives. Raises Unreachable if nothing arrives for ATTEMPT_S."""
        arrived: Queue[bytes | BaseException | None] = Queue()
        Thread(target=self.read, args=(shard, arrived), daemon=True).start()
        while True:
            try:
                item = arrived.get(timeout=ATTEMPT_S)
            except Empty:
                item = Unreachable(f"nothing arrived within {ATTEMPT_S:g} s")
            if item is None:
                return
            if isinstance(item, BaseException):
                self.client = None  # its connections may be dead, or its credentials expired
                raise self.explained(item, shard) from item
            yield item

    def read(self, shard: Shard, arrived: Queue[bytes | BaseException | None]) -> None:
        """Put a shard's content into a queue, then None; or the error that ended the reading.

        This runs in a thread of its own, since the connector, and looking for credentials, may hang.
        """
        try:
            client = self.current_client()
            for first in range(0, shard.bytes, REQUEST_BYTES):
                last = min(first + REQUEST_BYTES, shard.bytes)
                for chunk in client(shard.file, first, last):
                    arrived.put(chunk)
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    def explained(self, error: BaseException, shard: Shard) -> BaseException:
        """Return why a shard could not be read.

        The connector has one class for all errors. boto3's answer to the same request says what is wrong.
        """
        url = f"{self.source.location}/{shard.file}"
        if isinstance(error, InputError):  # a file of ~/.aws or a token may be being replaced
            return Unreachable(f"{url}: cannot get credentials: {error}")
        if isinstance(error, Unreachable):
            return Unreachable(f"{url}: {error}")
        if not isinstance(error, S3Exception):
            return error
        try:
            fault = fault_of(shard.entry, self.size_now(shard))
        except (InputError, Unreachable) as answer:
            return Unreachable(str(answer))
        if fault is not None:
            return Unreachable(damaged(url, fault))
        return Unreachable(f"{url}: {one_line(error)}")

    def size_now(self, shard: Shard) -> int | None:
        """Return the length of a shard in S3; None if it is missing. Raises InputError or Unreachable, by the answer.

        A HEAD would not say why an object cannot be read.
        """
        try:
            with self.source.explained("read", shard.file):
                address = self.source.address(shard.file)
                answer = self.source.client.get_object(**address, Range="bytes=0-0")
                answer["Body"].close()
        except FileNotFoundError:
            return None
        return int(answer["ContentRange"].rpartition("/")[2])

    def current_client(self) -> Read:
        """Return the current client, or a new one after a failure."""
        with self.lock:
            if self.client is None:
                self.client = self.connect()
            return self.client

    def connect(self) -> Read:
        """Return a new client of the connector, with the credentials that boto3 finds now.

        boto3 finds and renews credentials in more ways than the connector.
        """
        set_for_libraries({name: os.environ.get(name) for name in USED})
        session = open_session(self.source.s3)
        found = credentials(session)
        keys: tuple[str | None, ...] = (None, None, None)
        if found is not None:
            keys = (found.access_key, found.secret_key, found.token)
        set_for_libraries(self.route | dict(zip(CREDENTIALS, keys, strict=True)))
        files = [shard.file for shard in self.cache.manifest.shards]
        streams = S3MapDataset.from_objects(
            [f"{self.source.location}/{file}" for file in files],
            region=session.region_name or DEFAULT_REGION,
            endpoint=self.source.endpoint,
            reader_constructor=stream_of,
            s3client_config=S3ClientConfig(
                force_path_style=self.source.s3.path_style, max_attempts=CONNECTOR_ATTEMPTS
            ),
        )
        numbers: dict[str, int] = {file: number for number, file in enumerate(files)}
        return lambda file, first, last: streams[numbers[file]](first, last)


def stream_of(bucket: str, key: str, get_object_info: Any, get_stream: Any) -> Any:
    """Return the function that requests a range of an object: the connector's readers copy all of it once more."""
    return get_stream


def damaged(url: str, fault: str) -> str:
    return f"{url} {fault}; it was damaged or replaced: put the original back or prepare the data again"


def set_for_libraries(variables: Mapping[str, str | None]) -> None:
    """Set variables where C libraries and programs that this process starts look for them. None unsets a variable.

    Python's os.environ keeps the user's values, because boto3 reads them there.
    """
    for name, value in variables.items():
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)
