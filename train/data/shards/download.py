"""One shard from S3 into the cache: the only place where its length and sha256 are compared with the manifest."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential
from tenacity.stop import stop_base

from train.config import InputError, Unreachable
from train.data.shards.cache import ShardCache
from train.data.shards.connector import Client, Doubtful
from train.data.shards.format import Shard
from train.storage.manifest import fault_of_file
from train.storage.s3 import S3Folder

logger = logging.getLogger("train")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # at most, between attempts at a shard: random, doubling


class Part:
    """The bytes of a shard that have arrived, in a file. A read that was given up may continue in the connector, but it
    writes nothing more.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, path.open("wb", buffering=0)
        self.lock, self.reads = threading.Lock(), 0

    def begin(self) -> Callable[[bytes], None]:
        """Return the function that takes the bytes of one read, until the next call or `end`."""
        self.end()
        return partial(self.write, self.reads)

    def write(self, read: int, chunk: bytes) -> None:
        with self.lock:
            if read != self.reads:
                raise TimeoutError("given up")
            left = memoryview(chunk)
            while left:
                left = left[self.file.write(left) :]

    def end(self) -> None:
        with self.lock:
            self.reads += 1

    @property
    def size(self) -> int:
        return self.file.tell()

    def clear(self) -> None:
        self.file.seek(0)
        self.file.truncate()

    def close(self, path: Path | None = None) -> None:
        """Rename the file to `path`, or remove it."""
        self.end()
        if path is not None:
            os.fsync(self.file.fileno())
            self.path.rename(path)
        self.file.close()
        self.path.unlink(missing_ok=True)


class Downloader:
    """Downloads shards of one data set. Several threads may call `download` at once, for different shards."""

    def __init__(self, source: S3Folder, cache: ShardCache) -> None:
        self.source, self.cache, self.cfg = source, cache, cache.cfg
        self.lock = threading.Lock()
        self.client: Client | None = None
        self.in_pieces = False  # since a download did not end in time: what arrives is kept

    def download(
        self,
        shard: Shard,
        *,
        stop: stop_base | None = None,
        on_failure: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Put a shard into the cache unless it is there. A damaged one stays until a right one replaces it, because
        other runs may be reading it. `on_failure` takes the reason why an attempt failed.

        Raises InputError for a fault that no further attempt can cure, and Unreachable after deadline_s, or when `stop`
        says so.
        """
        path, url = self.cache.folder / shard.file, f"{self.source.location}/{shard.file}"
        fault = fault_of_file(path, shard.entry, checksum=True)
        if fault is None:
            return
        if path.exists():
            logger.warning("%s in the cache %s; it is fetched again", shard.file, fault)
        part, doubts = Part(self.cache.run / shard.file), 0

        def attempt() -> None:
            nonlocal doubts
            try:
                self.fill(part, shard)
                fault = fault_of_file(part.path, shard.entry, checksum=True)
                if fault is not None:
                    raise Doubtful(f"it {fault}; it was damaged or replaced: put the original back or prepare again")
                part.close(path)
            except Doubtful as doubt:
                part.clear()
                doubts += 1
                if doubts >= self.cfg.refetches:
                    raise InputError(f"{doubt}, {doubts} times") from doubt
                raise
            except OSError as error:  # of the disk: free its space
                part.clear()
                kind = Unreachable if error.errno in (errno.ENOSPC, errno.EDQUOT) else InputError
                raise kind(f"cannot be written to {self.cache.folder}: {error.strerror}") from error

        def after_failure(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            reason = f"{url}: {error} ({state.attempt_number} attempts)"
            logger.warning("%s; again in %.1f s", reason, state.next_action.sleep if state.next_action else 0.0)
            on_failure(reason)

        retrying = Retrying(
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            retry=retry_if_exception_type((Unreachable, Doubtful)),
            before_sleep=after_failure,
            stop=stop or stop_after_delay(self.cfg.deadline_s),
            reraise=True,
        )
        try:
            retrying(attempt)
        except (InputError, Unreachable, Doubtful) as error:
            kind = InputError if isinstance(error, InputError) else Unreachable
            raise kind(f"{url}: {error}") from error
        finally:
            part.close()

    def fill(self, part: Part, shard: Shard) -> None:
        """One download in a thread of its own, which is abandoned when attempt_s are over. In pieces, it continues
        after what has arrived.
        """
        if not self.in_pieces:
            part.clear()
        ended, clients = queue.SimpleQueue[BaseException | None](), list[Client]()
        in_pieces, write, offset = self.in_pieces, part.begin(), part.size

        def read() -> None:
            try:
                clients.append(self.current_client())  # in this thread: services that give credentials may hang too
                clients[0].read(shard.file, write, offset=offset, size=shard.bytes, in_pieces=in_pieces)
            except BaseException as error:  # for the thread that waits
                ended.put(error)
            else:
                ended.put(None)

        threading.Thread(target=read, daemon=True).start()
        try:
            error = ended.get(timeout=self.cfg.attempt_s)
        except queue.Empty:
            self.in_pieces = True
            arrived = f": {part.size / 1e6:.3g} of {shard.bytes / 1e6:.3g} MB have come" if in_pieces else ""
            error = Unreachable(f"not whole within {self.cfg.attempt_s:g} s (data.attempt_s){arrived}")
        part.end()
        if error is not None:
            if self.client in clients:
                self.client = None
            raise error

    def current_client(self) -> Client:
        """The client, a new one after a failure and after credentials were renewed."""
        with self.lock:
            if self.client is None or self.client.is_stale():
                files = [shard.file for shard in self.cache.manifest.shards]
                self.client = Client(self.source, files, largest_bytes=self.cache.largest_bytes)
            return self.client
