"""Asynchronous saves of checkpoints. Training waits only until the state is copied to host memory.

On each rank that has a part of the state, a thread writes and uploads that part. Rank 0's thread commits the step. The
threads communicate over a separate process group. At most one save is pending. A failed save raises an alarm, and
several failures in a row end the run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from train.checkpoints.manifest import Manifest, Progress, file_name
from train.checkpoints.retention import prune
from train.checkpoints.staging import Staging, State, first_not_finite, num_bytes_of
from train.checkpoints.store import Store
from train.config import CheckpointConfig, Failure, InputError, NotPermitted, Unreachable
from train.machine.runtime import pool_beside_training
from train.parallel.ranks import no_wait
from train.run_folder.ownership import LeaseLost
from train.storage.atomic_io import discard
from train.storage.schema import FileEntry, FileName, Sha256

if TYPE_CHECKING:
    from train.parallel.backends import Backend
    from train.parallel.engines import Engine
    from train.parallel.ranks import World
    from train.run_folder.run_folder import RunFolder

logger = logging.getLogger("train")
# S3 rejects a file or cannot be reached; it may accept the file later
UNSENT = (InputError, Unreachable)
MAX_LOSS_S = 1800.0  # a fault should cost at most this many seconds of work
MAX_WAIT_S = 10.0  # seconds that training waits for the previous save before it skips the new one
# failures in a row that end the run, and the seconds that they must span
MAX_FAILURES = 3
FAILING_S = 30.0
LONGEST_PAUSE_S = 10.0  # longest pause in seconds before a failed request is repeated


class SavesFail(Failure):
    """An error raised because checkpoints cannot be written: further training would put more and more work at risk."""


@dataclass(frozen=True)
class Saved:
    """The result of a save, for the metrics."""

    step: int
    stall_s: float  # how long training waited
    save_s: float  # time until the save was committed or failed
    num_bytes: int
    failure: str | None = None


class AsyncSaver:
    """A saver of checkpoints. All ranks must create one, and call `save` and `wait` at the same steps."""

    def __init__(
        self,
        cfg: CheckpointConfig,
        store: Store,
        engine: Engine,
        backend: Backend,
        draft: Manifest,
        folder: RunFolder,
    ) -> None:
        """Create a saver. `draft` has the fields that all manifests of this attempt share."""
        self.store = store
        self.draft = draft
        self.folder = folder
        self.max_wait_s = MAX_WAIT_S
        self.engine = engine
        self.backend = backend
        self.world = backend.world
        self.staging = Staging()
        self.keep = cfg.keep
        # the ranks whose threads write, set by the first call of `join`
        self.writers: World | None = None
        self.pool = pool_beside_training("save")
        self.pending: Future[Saved | None] | None = None  # its result is None except on rank 0
        self.pending_began_s = 0.0
        self.results: list[Saved] = []  # saves that ended since the last call of `take`
        # why the most recent saves failed; empty after a successful save
        self.failures: list[str] = []
        self.worked_s = time.monotonic()  # when a save last succeeded, or the attempt began
        # the newest committed step, or the step from which the run resumed
        self.newest: int | None = None
        self.save_s = 0.0  # duration of the last save

    # ---- all ranks -----------------------------------------------------------------------------------------------

    def save(
        self,
        progress: Progress,
        own: State,
        *,
        metric: float | None,
        must: bool = False,
        patience_s: float = 0.0,
        on_wait: Callable[[], None] = no_wait,
    ) -> None:
        """Start saving this step. `own` is state of this rank that is not the engine's; it must be small.

        If the previous save is still running after MAX_WAIT_S, this step is not saved; with `must`, the call waits for
        that save without a limit. Failed requests to S3 are retried for `patience_s`.
        """
        began_s = time.monotonic()
        if must:
            self.wait(on_wait)
        if not self.world.broadcast(self.world.rank == 0 and self.is_free(progress.step, began_s)):
            return
        self.engine.check_replicas()
        ranks = self.world.gather({"rng": self.backend.rng_state(), **own})
        part = self.engine.state()
        writers = self.join(part)
        if self.world.rank != 0 and not writers.is_distributed:
            return
        state = self.staging.copy(part, self.backend)
        if self.world.rank == 0:
            state = {**state, "ranks": {"ranks": ranks}}
        manifest = replace(
            self.draft, step=progress.step, progress=asdict(progress), metric=metric
        )
        self.pending_began_s = time.monotonic()
        stall_s = self.pending_began_s - began_s
        self.pending = self.pool.submit(self._save, state, manifest, stall_s, began_s, patience_s)

    def join(self, part: State) -> World:
        """Return the ranks whose threads write: all ranks, or rank 0 alone if no other rank has a part of the state."""
        if self.writers is None:
            has_part = self.world.rank != 0 and bool(part)
            group = None
            if self.world.sum([has_part])[0] > 0:
                group = self.backend.subgroup(list(range(self.world.size)))
            self.writers = self.world.beside(group)
        return self.writers

    def wait(self, on_wait: Callable[[], None] = no_wait) -> None:
        """Wait until the pending save is committed or has failed."""
        self.world.wait_until(lambda: self.pending is None or self.pending.done(), on_wait)

    def is_free(self, step: int, began_s: float) -> bool:
        """Wait up to MAX_WAIT_S for the previous save, and return whether it has ended. Only rank 0 calls this."""
        if self.pending is not None:
            wait_for(
                [self.pending], timeout=max(0.0, self.max_wait_s - (time.monotonic() - began_s))
            )
            self.collect()
        if self.pending is None:
            return True
        now_s = time.monotonic()
        why = (
            f"skipped: the previous save has been running for {now_s - self.pending_began_s:.0f} s"
        )
        self.results.append(Saved(step, now_s - began_s, now_s - began_s, 0, why))
        # A slow save counts as a failure once it puts more than MAX_LOSS_S of work at risk.
        if now_s - self.pending_began_s > MAX_LOSS_S:
            self.failures.append(why)
        return False

    def close(self, *, waits: bool) -> None:
        self.pool.shutdown(wait=waits, cancel_futures=not waits)

    def collect(self) -> None:
        if self.pending is not None and self.pending.done():
            saved = self.pending.result()
            self.pending = None
            if saved is None:
                return
            if saved.num_bytes:
                self.newest = saved.step
                self.save_s = saved.save_s
            if saved.failure is None:
                self.failures = []
                self.worked_s = time.monotonic()
            else:
                self.failures.append(saved.failure)
            self.results.append(saved)

    def take(self) -> list[Saved]:
        """Return the results of the saves that ended since the last call."""
        self.collect()
        results = self.results
        self.results = []
        return results

    @property
    def failure(self) -> SavesFail | None:
        """The error that must end the run; None unless several saves failed in a row, over some time."""
        number = len(self.failures)
        if number < MAX_FAILURES or time.monotonic() < self.worked_s + FAILING_S:
            return None
        last = self.failures[-1]
        return SavesFail(f"{number} saves in a row failed, the last: {last}; {self.newest_text}")

    @property
    def newest_text(self) -> str:
        if self.newest:
            newest = f"the newest checkpoint is of step {self.newest}"
        else:
            newest = "there is no checkpoint"
        return f"{newest} ({self.store.location})"

    # ---- in the thread of each rank that writes -------------------------------------------------------------------

    def _save(
        self, state: State, manifest: Manifest, stall_s: float, began_s: float, patience_s: float
    ) -> Saved | None:
        """Write a step. Rank 0 also commits it and prunes old steps. A failure is logged and returned in the result."""
        num_bytes = 0
        failure = None
        try:
            num_bytes = Write(self, state, manifest, time.monotonic() + patience_s).save()
            if self.world.rank == 0:
                self._clean_up()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            if num_bytes:
                failure = f"it is saved, but {error}"
            # Rank 0's error names the failed rank.
            level = logging.ERROR if self.world.rank == 0 else logging.WARNING
            if isinstance(error, LeaseLost) and self.world.rank == 0:
                # The next owner may not know whether this one has ended, and keeps its files.
                with suppress(InputError, Failure):
                    self._remove_unfinished()
            logger.log(level, "saving step %d: %s", manifest.step, failure)
        if self.world.rank != 0:
            return None
        return Saved(manifest.step, stall_s, time.monotonic() - began_s, num_bytes, failure)

    def _clean_up(self) -> None:
        """Remove older checkpoints, and what earlier saves that failed have left. Only the owner may do so."""
        self.folder.ownership.check()
        if self.failures:
            with suppress(NotPermitted):
                self._remove_unfinished()
        try:
            prune(self.store, self.keep)
        except NotPermitted:
            self.keep = 0  # keep all steps from now on

    def _remove_unfinished(self) -> None:
        self.store.remove_uncommitted(range(self.draft.fence, self.draft.fence + 1))


# ---- one save, in the thread of each rank that writes ----------------------------------------------------------------


class Write:
    """A save of one step on one of the ranks that write. Requests to S3 are retried until `until_s` (monotonic)."""

    def __init__(
        self, saver: AsyncSaver, state: State, manifest: Manifest, until_s: float
    ) -> None:
        assert saver.writers is not None
        self.saver = saver
        self.store = saver.store
        self.writers = saver.writers
        self.state = state
        self.manifest = manifest
        self.until_s = until_s
        self.num_bytes = num_bytes_of(state)
        # this rank's local folder and files; None if this rank has no part of the state
        self.folder: Path | None = None
        self.files: dict[FileName, FileEntry] = {}

    def save(self) -> int:
        """Save the step; rank 0 commits it. Returns the bytes of all its files on rank 0."""
        is_first = self.writers.rank == 0
        scratch = self.writers.run_and_broadcast(self.begin)
        try:
            parts = self.writers.gather(self.writers.agree(lambda: self.write(scratch)))
            files = {name: entry for part in parts for name, entry in part.items()}
            self.manifest = replace(self.manifest, files=files)
            # Only rank 0's manifest names the files of all ranks. Elsewhere it only says where to upload to.
            folder = self.writers.run_and_broadcast(self.prepare)
            self.manifest = replace(self.manifest, folder=folder)
            self.writers.agree(self.send)
            if is_first:
                self.retried(lambda: self.store.commit(scratch, self.manifest))
        finally:
            self.discard(scratch)
        return self.manifest.num_bytes

    def discard(self, scratch: Path) -> None:
        """Remove this rank's local folder. On a shared disk, it is rank 0's, whose commit renames it."""
        folder = self.folder
        is_own = self.writers.rank == 0 or (folder is not None and folder.name != scratch.name)
        if folder is not None and is_own and folder.is_dir():
            discard(folder)

    def begin(self) -> Path:
        self.folder = self.store.begin(self.manifest.step, self.num_bytes)
        return self.folder

    def write(self, scratch: Path) -> dict[FileName, FileEntry]:
        """Write this rank's files to its local folder. `scratch` is rank 0's."""
        if not self.state:
            return {}
        if self.folder is None:
            self.folder = self.store.join(scratch.name, self.num_bytes)
        name = first_not_finite(
            {"weights": self.state.get("model"), "moments": self.state.get("optimizer")}
        )
        if name is not None:
            raise FloatingPointError(f"{name} contains NaN or infinity; such a state is not saved")
        for content, value in self.state.items():
            own = file_name(content, self.writers.rank)
            self.files[own] = self.write_file(self.folder / own, value)
        return self.files

    def write_file(self, path: Path, value: Any) -> FileEntry:
        with path.open("wb") as raw:
            file = Hashing(raw)
            try:
                torch.save(value, file)  # type: ignore[arg-type]
            except RuntimeError as error:
                # Torch hides the disk's error behind "unexpected pos".
                raise (file.failure or error) from None
            raw.flush()
            os.fsync(raw.fileno())
        return FileEntry(bytes=file.num_bytes, sha256=Sha256(file.digest.hexdigest()))

    def prepare(self) -> FileName | None:
        """Name the step's folder, and upload the metrics: a checkpoint is never ahead of them."""
        self.retried(self.saver.folder.ownership.check)
        self.retried(self.saver.folder.mirror)
        return self.store.prepare(self.manifest).folder

    def send(self) -> None:
        if self.folder is not None:
            folder = self.folder
            self.retried(lambda: self.store.send(folder, self.manifest, list(self.files)))

    def retried(self, action: Callable[[], None]) -> None:
        """Run `action`. While the service rejects it or does not answer, repeat it for a while."""
        while True:
            try:
                return action()
            except UNSENT as error:
                left_s = self.until_s - time.monotonic()
                if left_s <= 0:
                    raise
                text = "saving step %d: %s; retrying for up to %.0f s"
                logger.warning(text, self.manifest.step, error, left_s)
                time.sleep(min(random.uniform(0, LONGEST_PAUSE_S), left_s))


class Hashing:
    """A file that computes the checksum of the bytes as they are written, not as the disk stores them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.failure: OSError | None = None  # why the disk could not write

    def write(self, content: bytes | memoryview) -> int:
        self.digest.update(content)
        self.num_bytes += memoryview(content).nbytes
        try:
            return self.file.write(content)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        self.file.flush()
