"""One shard from S3 into the cache: retried until its length and sha256 are right, or until no attempt can help."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from train.config import InputError, ShardsConfig, Unreachable
from train.data.shards.cache import Cache, flock
from train.data.shards.fetch import Client, Doubtful
from train.data.shards.format import Manifest, Shard
from train.storage.atomic_io import write_atomic
from train.storage.folders import canonical_json
from train.storage.manifest import fault_of_file
from train.storage.s3 import S3Folder

logger = logging.getLogger("train")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # at most, between attempts at a shard: random, doubling


class Part:
    """The bytes of a shard that have arrived, in a file beside it, locked while it is open. The file outlives its
    process, so that the next one continues it. A read that was given up may continue in the connector, but it writes
    nothing more.
    """

    def __init__(self, path: Path) -> None:
        """BlockingIOError if another process holds it, FileNotFoundError if one has just published it."""
        self.path, self.file = path, path.open("ab", buffering=0)
        self.lock, self.reads = threading.Lock(), 0
        try:
            flock(self.file, alone=True)
            if not os.path.samestat(os.fstat(self.file.fileno()), path.stat()):
                raise FileNotFoundError(path)
        except BaseException:
            self.file.close()
            raise

    def begin(self) -> Callable[[bytes], None]:
        """Give the function that takes the bytes of one read, until the next call or `end`."""
        with self.lock:
            self.reads += 1
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
        return os.fstat(self.file.fileno()).st_size

    def publish(self, path: Path) -> None:
        os.fsync(self.file.fileno())
        self.path.rename(path)

    def clear(self) -> None:
        self.file.truncate(0)

    def close(self) -> None:
        """Release it, and leave what has arrived for the next process."""
        if self.size == 0:
            self.path.unlink(missing_ok=True)
        self.file.close()


def open_part(path: Path) -> Part:
    """The part of the shard at `path`: what an earlier process left, or a new one while another process writes that."""
    with suppress(BlockingIOError, FileNotFoundError):
        return Part(path.with_name(f".{path.name}.part"))
    return Part(path.with_name(f".{path.name}.part-{uuid.uuid4().hex}"))


@dataclass
class Trial:
    """The attempts at one shard so far."""

    shard: Shard
    part: Part | None = None
    attempts: int = 0
    doubts: int = 0  # attempts that brought wrong bytes, or a refusal
    damaged: tuple[int, int] | None = None  # inode and time of the file in the cache that is not right


class Downloader:
    """Downloads shards of one data set. Several threads may call `obtain` at once, for different shards."""

    def __init__(
        self, source: S3Folder, cfg: ShardsConfig, manifest: Manifest, cache: Cache, *, has_readers: bool = False
    ) -> None:
        """`has_readers`: whether other processes wait for the shards, and are to find them in their run's part."""
        self.source, self.cfg, self.cache = source, cfg, cache
        self.shards, self.has_readers = manifest.shards, has_readers
        self.lock = threading.Lock()
        self.client: Client | None = None
        self.in_pieces = False  # since a download did not end in time: what arrives is kept
        self.hopeless: set[str] = set()  # files that no further attempt can bring
        self.failing: set[str] = set()  # files whose last attempt brought nothing: others need not wait for them

    def obtain(self, shard: Shard) -> None:
        """Put a shard into the cache for this run's readers, or the reason why it cannot be there."""
        try:
            self.bring(shard, stop_never)
            self.cache.faults(shard).unlink(missing_ok=True)
        except Exception as error:
            self.hopeless.add(shard.file)
            logger.error("%s", error, exc_info=not isinstance(error, InputError))
            self.write_fault(shard, str(error), is_final=True)

    def bring(self, shard: Shard, stop: stop_base | None = None) -> None:
        """Put a shard into the cache unless it is there. Raises InputError for a fault that no further attempt can
        cure, and Unreachable after deadline_s, or when `stop` says so.
        """
        trial = Trial(shard)
        retrying = Retrying(
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            retry=retry_if_exception_type((Unreachable, Doubtful)),
            before_sleep=self.after_failure,
            stop=stop or stop_after_delay(self.cfg.deadline_s),
            reraise=True,
        )
        try:
            retrying(self.attempt, trial)
        except (InputError, Unreachable, Doubtful) as error:
            kind = InputError if isinstance(error, InputError) else Unreachable
            raise kind(f"{self.url(shard)}: {error}") from error
        finally:
            if trial.part is not None:
                trial.part.close()

    def attempt(self, trial: Trial) -> None:
        """One download with a time limit of its own. One that was cut short is continued."""
        shard, path = trial.shard, self.cache.folder / trial.shard.file
        trial.attempts += 1
        try:
            if not self.is_right(trial, path):
                trial.part = trial.part or open_part(path)
                self.fill(trial.part, shard)
                self.compare(shard, trial.part)
                trial.part.publish(path)
            if self.has_readers:
                self.cache.set_compared(shard)
        except Unreachable:
            raise
        except Doubtful as doubt:
            self.forget(trial)
            trial.doubts += 1
            if trial.doubts >= self.cfg.refetches:
                raise InputError(f"{doubt}, {trial.doubts} times") from doubt
            raise
        except FileNotFoundError as error:
            self.forget(trial)
            raise Unreachable("somebody removed the part of it that had arrived") from error
        except OSError as error:  # of the disk: give its space back
            self.forget(trial)
            kind = Unreachable if error.errno in (errno.ENOSPC, errno.EDQUOT) else InputError
            raise kind(f"cannot be written to {self.cache.folder}: {error.strerror}") from error

    def is_right(self, trial: Trial, path: Path) -> bool:
        """Whether the shard is there and matches the manifest. A damaged one stays until a right one replaces it,
        because other runs may be reading it.
        """
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        seen = (stat.st_ino, stat.st_mtime_ns)
        if seen == trial.damaged:
            return False
        if fault_of_file(path, trial.shard.entry, checksum=True) is None:
            return True
        trial.damaged = seen
        logger.warning("%s in the cache is damaged; it is fetched again", trial.shard.file)
        return False

    def forget(self, trial: Trial) -> None:
        if trial.part is not None:
            trial.part.clear()
            trial.part.close()
            trial.part = None

    def fill(self, part: Part, shard: Shard) -> None:
        """One download in a thread of its own, which is abandoned when the time is over."""
        answer, clients = queue.SimpleQueue[BaseException | None](), list[Client]()
        offset, was_in_pieces = part.size, self.in_pieces
        arguments = (shard, part.begin(), offset, was_in_pieces, clients, answer.put)
        threading.Thread(target=self.read, args=arguments, daemon=True).start()
        try:
            error = answer.get(timeout=self.cfg.attempt_s)
        except queue.Empty:
            part.end()
            is_moving = not was_in_pieces or part.size > offset
            self.in_pieces = True
            arrived = f": {part.size / 1e6:.3g} of {shard.bytes / 1e6:.3g} MB have come" if was_in_pieces else ""
            error = Unreachable(f"not whole within {self.cfg.attempt_s:g} s (data.attempt_s){arrived}")
        else:
            part.end()
            is_moving = error is None
        (self.failing.discard if is_moving else self.failing.add)(shard.file)
        if error is not None:
            if self.client in clients:
                self.client = None
            raise error

    def read(
        self,
        shard: Shard,
        write: Callable[[bytes], None],
        offset: int,
        in_pieces: bool,
        clients: list[Client],
        answer: Callable[[BaseException | None], None],
    ) -> None:
        try:
            clients.append(self.current_client())  # in this thread: services that give credentials may hang too
            clients[0].read(shard.file, write, offset=offset, size=shard.bytes, in_pieces=in_pieces)
        except BaseException as error:  # for the thread that waits
            answer(error)
        else:
            answer(None)

    def compare(self, shard: Shard, part: Part) -> None:
        fault = fault_of_file(part.path, shard.entry, checksum=True)
        if fault is not None:
            raise Doubtful(f"it {fault}; it was damaged or replaced: put the original back or prepare again")

    def current_client(self) -> Client:
        """The client, a new one after a failure and after credentials were renewed."""
        with self.lock:
            if self.client is None or self.client.is_stale():
                files = [shard.file for shard in self.shards]
                self.client = Client(self.source, files, largest_bytes=max(shard.bytes for shard in self.shards))
            return self.client

    def after_failure(self, state: RetryCallState) -> None:
        trial: Trial = state.args[0]
        error = state.outcome.exception() if state.outcome else None
        pause_s = state.next_action.sleep if state.next_action else 0.0
        reason = f"{self.url(trial.shard)}: {error} ({trial.attempts} attempts)"
        logger.warning("%s; again in %.1f s", reason, pause_s)
        try:
            if self.has_readers:
                self.write_fault(trial.shard, reason, is_final=False)
        except OSError as problem:  # no room even for this
            logger.warning("%s", problem)

    def write_fault(self, shard: Shard, reason: str, *, is_final: bool) -> None:
        write_atomic(self.cache.faults(shard), canonical_json({"reason": reason, "is_final": is_final}))

    def url(self, shard: Shard) -> str:
        return f"{self.source.location}/{shard.file}"
