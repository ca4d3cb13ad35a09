"""One shard from S3 into the cache: tried again until its length and sha256 are right, or no try can mend it."""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
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
from train.data.cache import Cache, kept
from train.data.fetch import Client, Doubtful
from train.data.shards import Manifest, Shard
from train.s3 import S3Folder
from train.storage import canonical_json, sha256_file, sync_file, write_atomic

logger = logging.getLogger("train")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # at most, between tries of a shard: random, doubling


@dataclass
class Trial:
    """The tries of one shard so far."""

    shard: Shard
    tries: int = 0
    doubts: int = 0  # of them brought wrong bytes, or a refusal
    part: Path | None = None  # what the last one brought, to go on from


@dataclass
class Part:
    """The file of one try. A try that was given up may still be alive in the connector: it writes nothing any more."""

    path: Path
    client: Client | None = None
    is_open: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.file = self.path.open("ab")

    def write(self, chunk: bytes) -> None:
        with self.lock:
            if not self.is_open:
                raise TimeoutError("given up")
            self.file.write(chunk)

    def close(self) -> None:
        with self.lock:
            self.is_open = False
            self.file.close()


class Downloader:
    """Shards of one data set. `obtain` may be called by several threads at once, for different shards."""

    def __init__(self, source: S3Folder, cfg: ShardsConfig, manifest: Manifest, cache: Cache) -> None:
        self.source, self.cfg, self.cache = source, cfg, cache
        self.shards = manifest.shards
        self.lock = threading.Lock()
        self.client: Client | None = None
        self.in_pieces = False  # since a download did not end in time: what comes is kept
        self.hopeless: set[str] = set()  # files that no further try will bring
        self.failing: set[str] = set()  # files of which nothing came at the last try: others need not wait for them

    def obtain(self, shard: Shard) -> None:
        """Put a shard into the cache, or leave word there of why it cannot be."""
        try:
            if not self.take_kept(shard):
                self.bring(shard, stop_never)
            self.cache.faults(shard).unlink(missing_ok=True)
        except Exception as error:
            self.hopeless.add(shard.file)
            logger.error("%s", error, exc_info=not isinstance(error, InputError))
            self.tell(shard, str(error), is_final=True)

    def bring(self, shard: Shard, stop: stop_base | None = None) -> None:
        """Put a shard into the cache if it is not there. Raises InputError for what no further try can mend, and, where
        `stop` does not say otherwise, Unreachable after deadline_s.
        """
        if (self.cache.folder / shard.file).is_file():
            return
        retrying = Retrying(
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            retry=retry_if_exception_type((Unreachable, Doubtful)),
            before_sleep=self.after_failure,
            stop=stop or stop_after_delay(self.cfg.deadline_s),
            reraise=True,
        )
        try:
            retrying(self.attempt, Trial(shard))
        except (InputError, Unreachable, Doubtful) as error:
            kind = InputError if isinstance(error, InputError) else Unreachable
            raise kind(f"{self.place(shard)}: {error}") from error

    def take_kept(self, shard: Shard) -> bool:
        """Use what an earlier run left of a shard, if it is right."""
        path = self.cache.folder / shard.file
        left = kept(path)
        try:
            return self.take(left, path, shard)
        except FileNotFoundError:  # there is none, or another run's process was faster
            return path.is_file()

    def take(self, left: Path, path: Path, shard: Shard) -> bool:
        if left.stat().st_size == shard.bytes and sha256_file(left) == shard.sha256:
            left.rename(path)
            return True
        logger.warning("%s in the cache is damaged; it is fetched again", shard.file)
        left.unlink()
        return False

    def attempt(self, trial: Trial) -> None:
        """One download in a time of its own. What was cut short goes on where it stopped."""
        shard, path = trial.shard, self.cache.folder / trial.shard.file
        trial.tries += 1
        place = path.with_name(f".{path.name}.part-{os.getpid()}-{uuid.uuid4().hex}")
        if trial.part is not None:
            trial.part.rename(place)
        trial.part = place
        try:
            self.fill(trial, Part(place))
            self.compare(shard, place)
            sync_file(place)
            place.rename(path)
        except Unreachable:
            raise
        except Doubtful as doubt:
            self.forget(trial, place)
            trial.doubts += 1
            if trial.doubts >= self.cfg.refetches:
                raise InputError(f"{doubt}, {trial.doubts} times") from doubt
            raise
        except FileNotFoundError as error:
            self.forget(trial, place)
            raise Unreachable("somebody removed what had come of it") from error
        except OSError as error:  # of the disk: leave it the room
            self.forget(trial, place)
            kind = Unreachable if error.errno in (errno.ENOSPC, errno.EDQUOT) else InputError
            raise kind(f"cannot be written to {self.cache.folder}: {error.strerror}") from error

    def forget(self, trial: Trial, place: Path) -> None:
        place.unlink(missing_ok=True)
        trial.part = None

    def fill(self, trial: Trial, part: Part) -> None:
        """One download in a thread of its own, which is left to itself when the time is over."""
        answer = queue.SimpleQueue[BaseException | None]()
        offset = part.path.stat().st_size
        was_in_pieces = self.in_pieces
        arguments = (trial.shard, part, offset, was_in_pieces, answer.put)
        threading.Thread(target=self.read, args=arguments, daemon=True).start()
        try:
            error = answer.get(timeout=self.cfg.attempt_s)
        except queue.Empty:
            is_moving = not was_in_pieces or part.path.stat().st_size > offset
            self.in_pieces = True
            error = Unreachable(f"not whole within {self.cfg.attempt_s:g} s (data.attempt_s)")
        else:
            is_moving = error is None
        part.close()
        (self.failing.discard if is_moving else self.failing.add)(trial.shard.file)
        if error is not None:
            if self.client is part.client:
                self.client = None
            raise error

    def read(
        self,
        shard: Shard,
        part: Part,
        offset: int,
        in_pieces: bool,
        answer: Callable[[BaseException | None], None],
    ) -> None:
        try:
            part.client = self.current_client()  # here, since services that give credentials may hang too
            part.client.read(shard.file, part.write, offset=offset, in_pieces=in_pieces)
        except BaseException as error:  # for the thread that waits
            answer(error)
        else:
            answer(None)

    def compare(self, shard: Shard, place: Path) -> None:
        size = place.stat().st_size
        advice = "it was damaged or replaced; put the original back or prepare again"
        if size != shard.bytes:
            raise Doubtful(f"{size} bytes, the manifest says {shard.bytes}; {advice}")
        seen = sha256_file(place)
        if seen != shard.sha256:
            raise Doubtful(f"sha256 is {seen[:12]}, the manifest says {shard.sha256[:12]}; {advice}")

    def current_client(self) -> Client:
        """A new one after a failure, and when credentials were renewed."""
        with self.lock:
            if self.client is None or self.client.is_stale():
                files = [shard.file for shard in self.shards]
                self.client = Client(self.source, files, largest_bytes=max(shard.bytes for shard in self.shards))
            return self.client

    def after_failure(self, state: RetryCallState) -> None:
        trial: Trial = state.args[0]
        error = state.outcome.exception() if state.outcome else None
        pause_s = state.next_action.sleep if state.next_action else 0.0
        reason = f"{self.place(trial.shard)}: {error} ({trial.tries} tries)"
        logger.warning("%s; again in %.1f s", reason, pause_s)
        try:
            self.tell(trial.shard, reason, is_final=False)
        except OSError as problem:  # no room even for this
            logger.warning("%s", problem)

    def tell(self, shard: Shard, reason: str, *, is_final: bool) -> None:
        write_atomic(self.cache.faults(shard), canonical_json({"reason": reason, "is_final": is_final}))

    def place(self, shard: Shard) -> str:
        return f"{self.source.location}/{shard.file}"
