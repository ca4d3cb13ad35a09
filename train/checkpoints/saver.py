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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

from train.checkpoints.manifest import FILE, Manifest, Progress, file_name
from train.checkpoints.retention import prune
from train.checkpoints.staging import Staging, State, first_not_finite, num_bytes_of
from train.checkpoints.store import Store
from train.config import CheckpointConfig, Failure, InputError, NotPermitted, Unreachable
from train.machine.runtime import pool_beside_training
from train.parallel.ranks import no_wait
from train.run_folder.ownership import LeaseLost
from train.storage.atomic_io import discard, open_alike
from train.storage.schema import FileEntry, FileName, Sha256

if TYPE_CHECKING:
    from train.parallel.backends import Backend
    from train.parallel.engines import Engine
    from train.parallel.ranks import World
    from train.run_folder.run_folder import RunFolder

logger = logging.getLogger("train")
# S3 rejects a file or cannot be reached; it may accept the file later
UNSENT = (
    InputError,
    Unreachable,
)
MAX_WAIT_S = 10.0  # seconds that training waits for the previous save before it skips the new one
MAX_LOSS_S = 1800.0  # a fault should cost at most this many seconds of work
# failures in a row that end the run, and the seconds that they must span
MAX_FAILURES, FAILING_S = (
    3,
    30.0,
)
LONGEST_PAUSE_S = 10.0  # longest pause in seconds before a failed request is repeated
Result = TypeVar("Result")


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
        self.store, self.draft, self.folder, self.max_wait_s = store, draft, folder, MAX_WAIT_S
        self.engine, self.backend, self.world = engine, backend, backend.world
        self.staging = Staging()
        self.keep, self.verified = cfg.keep, set[int]()  # see `retention`
        # the ranks whose threads write, set by the first call of `join`
        self.writers: World | None = None
        self.pool = pool_beside_training("save")
        self.pending: Future[Saved | None] | None = None  # its result is None except on rank 0
        self.pending_began_s = 0.0
        self.results: list[Saved] = []  # saves that ended since the last call of `take`
        self.failures: list[
            str
        ] = []  # why the most recent saves failed; empty after a successful save
        self.worked_s = time.monotonic()  # when a save last succeeded, or the attempt began
        # the newest committed step, or the step from which the run resumed
        self.newest: int | None = None
        # step and local copy of a save that could not be uploaded
        self.unsent: tuple[int, Path] | None = None
        self.stalls_s: list[float] = []
        self.save_s = 0.0  # duration of the last save
        self.warming = self.pool.submit(lambda: None)

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
        self.warming.result()
        state = self.staging.copy(part, self.backend)
        if self.world.rank == 0:
            state = {**state, "ranks": {"ranks": ranks}}
        manifest = replace(
            self.draft, step=progress.step, progress=asdict(progress), metric=metric
        )
        self.pending_began_s = time.monotonic()
        stall_s = self.pending_began_s - began_s
        self.stalls_s.append(stall_s)
        self.pending = self.pool.submit(self._save, state, manifest, stall_s, began_s, patience_s)

    def join(self, part: State) -> World:
        """Return the ranks whose threads write: all ranks, or rank 0 alone if no other rank has a part of the state."""
        if self.writers is None:
            is_split = self.world.sum([self.world.rank != 0 and bool(part)])[0] > 0
            self.writers = self.world.beside(
                self.backend.subgroup(list(range(self.world.size))) if is_split else None
            )
        return self.writers

    def warm(self) -> None:
        """Allocate the host memory for the first save, in the saver's thread, while the first steps run."""
        part = self.engine.state()
        self.join(part)
        if part:
            self.warming = self.pool.submit(self.staging.warm, part, self.backend)

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
            saved, self.pending = self.pending.result(), None
            if saved is None:
                return
            if saved.num_bytes:
                self.newest, self.save_s = saved.step, saved.save_s
            self.failures = [] if saved.failure is None else [*self.failures, saved.failure]
            if saved.failure is None:
                self.worked_s = time.monotonic()
            self.results.append(saved)

    def take(self) -> list[Saved]:
        """Return the results of the saves that ended since the last call."""
        self.collect()
        results, self.results = self.results, []
        return results

    @property
    def failure(self) -> SavesFail | None:
        """The error that must end the run; None unless several saves failed in a row, over some time."""
        if len(self.failures) < MAX_FAILURES or time.monotonic() < self.worked_s + FAILING_S:
            return None
        text = f"{len(self.failures)} saves in a row failed, the last: {self.failures[-1]}"
        return SavesFail(f"{text}; {self.newest_text}")

    @property
    def newest_text(self) -> str:
        newest = (
            f"the newest checkpoint is of step {self.newest}"
            if self.newest
            else "there is no checkpoint"
        )
        return f"{newest} ({self.store.location}){self.unsent_text}"

    @property
    def unsent_text(self) -> str:
        # a newer save may have replaced it
        if self.unsent is None or not (self.unsent[1] / FILE).is_file():
            return ""
        step, folder = self.unsent
        return f"; step {step} is complete in {folder}; docs/faults.md says how to upload it"

    # ---- in the thread of each rank that writes -------------------------------------------------------------------

    def _save(
        self, state: State, manifest: Manifest, stall_s: float, began_s: float, patience_s: float
    ) -> Saved | None:
        """Write a step. Rank 0 also commits it and prunes old steps. A failure is logged and returned in the result."""
        num_bytes, failure = 0, None
        try:
            num_bytes = self._write(state, manifest, time.monotonic() + patience_s)
            if self.world.rank == 0:
                self.folder.ownership.check()  # only the owner may remove older checkpoints
                if self.failures:
                    with suppress(NotPermitted):
                        self.store.remove_uncommitted(
                            range(self.draft.fence, self.draft.fence + 1)
                        )
                try:
                    prune(self.store, self.keep, self.verified)
                except NotPermitted:
                    self.keep = 0  # keep all steps from now on
        except Exception as error:
            failure = (
                f"{type(error).__name__}: {error}"
                if not num_bytes
                else f"it is saved, but {error}"
            )
            # otherwise the files sent so far could remain
            if isinstance(error, LeaseLost) and self.world.rank == 0:
                with suppress(InputError, Failure):
                    self.store.remove_uncommitted(range(self.draft.fence, self.draft.fence + 1))
            # rank 0's error names the failed rank
            level = logging.ERROR if self.world.rank == 0 else logging.WARNING
            logger.log(level, "saving step %d: %s%s", manifest.step, failure, self.unsent_text)
        if self.world.rank != 0:
            return None
        return Saved(manifest.step, stall_s, time.monotonic() - began_s, num_bytes, failure)

    def _write(self, state: State, manifest: Manifest, until_s: float) -> int:
        """Write this rank's files of a step. Rank 0 then commits the step, and returns the bytes of all files.

        Requests to S3 are retried until `until_s`, by time.monotonic(). If the save fails, its local files are removed,
        except that rank 0 keeps a complete step that S3 did not accept, as `unsent`.
        """
        is_first, num_bytes = self.world.rank == 0, num_bytes_of(state)
        retried = partial(self._retried, step=manifest.step, until_s=until_s)
        assert self.writers is not None
        scratch = self._on_rank0(lambda: self.store.begin(manifest.step, num_bytes))
        folder, keeps = scratch if is_first else None, False
        own: dict[FileName, FileEntry] = {}
        try:

            def write_files() -> dict[FileName, FileEntry]:
                nonlocal folder, own
                folder = folder or (self.store.join(scratch.name, num_bytes) if state else None)
                own = {} if folder is None else self._write_files(state, folder)
                return own

            def prepare() -> FileName | None:
                nonlocal manifest
                manifest = retried(lambda: self.store.prepare(scratch, manifest))
                retried(self._prepare_folder)
                return manifest.folder

            parts = self.writers.gather(self.writers.agree(write_files))
            # Only rank 0's manifest names the files of all ranks. The other ranks only need to know where to upload to.
            manifest = replace(
                manifest, files={name: entry for part in parts for name, entry in part.items()}
            )
            manifest = replace(manifest, folder=self._on_rank0(prepare))
            self.writers.agree(
                lambda: folder and retried(lambda: self.store.send(folder, manifest, list(own)))
            )
            if is_first:
                retried(lambda: self.store.commit(scratch, manifest))
                self.unsent = None
            return manifest.num_bytes
        except UNSENT:
            keeps = is_first and (scratch / FILE).is_file()
            if keeps:
                self.unsent = manifest.step, scratch
            raise
        finally:
            is_own = folder is not None and (is_first or folder.name != scratch.name)
            # a commit on disk has renamed it
            if folder is not None and is_own and not keeps and folder.is_dir():
                discard(folder)

    def _on_rank0(self, action: Callable[[], Result]) -> Result:
        """Run an action on rank 0, in the writer's thread, and return its result on all ranks."""
        assert self.writers is not None
        is_first = self.world.rank == 0
        result = self.writers.agree(lambda: action() if is_first else None)
        return self.writers.broadcast(cast(Result, result))

    def _prepare_folder(self) -> None:
        """Upload the metrics before the commit, so that the run folder has the metrics up to the checkpoint's step."""
        self.folder.ownership.check()
        self.folder.mirror()

    def _retried(self, action: Callable[[], Result], step: int, until_s: float) -> Result:
        """Return the result of `action`. While the service rejects it or does not answer, repeat it until `until_s`."""
        while True:
            try:
                return action()
            except UNSENT as error:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise
                logger.warning(
                    "saving step %d: %s; retrying for up to %.0f s", step, error, left_s
                )
                time.sleep(min(random.uniform(0, LONGEST_PAUSE_S), left_s))

    def _write_files(self, state: State, folder: Path) -> dict[FileName, FileEntry]:
        name = first_not_finite({"weights": state.get("model"), "moments": state.get("optimizer")})
        if name is not None:
            raise FloatingPointError(f"{name} contains NaN or infinity; such a state is not saved")
        files = {}
        for content, value in state.items():
            own = file_name(content, self.world.rank)
            with open_alike(folder / own, "wb") as raw:
                file = Hashing(raw)
                try:
                    self.backend.save(value, file)  # type: ignore[arg-type]
                except RuntimeError as error:
                    raise (
                        file.failure or error
                    ) from None  # torch hides the disk's error behind "unexpected pos"
                raw.flush()
                os.fsync(raw.fileno())
            files[own] = FileEntry(bytes=file.num_bytes, sha256=Sha256(file.digest.hexdigest()))
        return files


class Hashing:
    """A file that computes the checksum of the bytes as they are written, not as the disk stores them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.num_bytes = file, hashlib.sha256(), 0
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
