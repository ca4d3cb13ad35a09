"""Save beside the training, load what was saved. The loop's door to checkpoints.

A save costs the training a copy to host memory. A thread of rank 0 writes, uploads and commits it; at most one is in
flight. A save that fails is an alarm, several in a row end the run.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from train.checkpoints.manifest import FILE, Manifest
from train.checkpoints.progress import Progress
from train.checkpoints.retention import Retention
from train.checkpoints.staging import Staging, State, first_not_finite, num_bytes_of
from train.checkpoints.store import Store
from train.config import CheckpointConfig, Failure, InputError, Unreachable
from train.ranks import no_beat
from train.storage.untrusted import FileEntry, FileName, Sha256

if TYPE_CHECKING:
    from train.backend import Backend
    from train.parallel import Stateful

logger = logging.getLogger("train")
UNSENT = (InputError, Unreachable)  # a service that is away or refuses: what it did not take may be given to it later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # at most, between attempts to commit: random, doubling


class SavesFail(Failure):
    """Checkpoints cannot be written: training on would put more and more work at risk."""


@dataclass(frozen=True)
class Saved:
    """The result of a save, for the metrics."""

    step: int
    stall_s: float  # how long the training waited
    save_s: float  # how long it took until it was committed, or failed
    num_bytes: int
    failure: str | None = None


@dataclass(frozen=True)
class Facts:
    """What the manifests of one attempt have in common."""

    fence: int
    identity: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, Any]


class Saver:
    """Saves checkpoints. All ranks make a Saver and call `save` and `wait` at the same steps; only rank 0 writes."""

    def __init__(
        self,
        cfg: CheckpointConfig,
        store: Store,
        engine: Stateful,
        backend: Backend,
        facts: Facts,
        *,
        may_commit: Callable[[], None],
        after_commit: Callable[[], None],
        newest: int | None = None,
    ) -> None:
        """`may_commit` raises if the run folder is no longer ours; `after_commit` is called in the thread. `newest` is
        the step of the checkpoint that the run resumes from.
        """
        self.cfg, self.store, self.facts = cfg, store, facts
        self.engine, self.backend, self.world = engine, backend, backend.world
        self.may_commit, self.after_commit = may_commit, after_commit
        self.staging, self.retention = Staging(), Retention(store, cfg.keep)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.flight: Future[Saved] | None = None
        self.flight_began_s = 0.0
        self.results: list[Saved] = []  # since the last call of `take`
        self.failures_in_a_row = 0
        self.newest = newest  # committed
        self.kept: tuple[int, Path] | None = None  # step and copy of a save that could not be committed
        self.stalls_s: list[float] = []
        self.save_s = 0.0  # how long the last save took
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
        beat: Callable[[], None] = no_beat,
    ) -> None:
        """Begin to save this step. `own` is this rank's own state: small, plain values or tensors on the host.

        While the last save is being written, the next one waits for checkpoint.max_wait_s and is then left out; with
        `must` it waits as long as it takes. A commit that fails is retried for `patience_s`.
        """
        began_s = time.monotonic()
        if must:
            self.wait(beat)
        if not self.world.share(self.world.rank == 0 and self.is_free(progress.step, began_s))[0]:
            return
        self.engine.check_replicas()
        ranks = self.world.gather({"rng": self.backend.rng_state(), **own})
        whole = self.engine.state()
        if self.world.rank != 0:
            return
        self.warming.result()
        state = self.staging.copy(whole, self.backend)
        manifest = Manifest(
            step=progress.step,
            **vars(self.facts),
            progress=asdict(progress),
            world_size=self.world.size,
            backend=self.backend.name,
            metric=metric,
        )
        self.flight_began_s = time.monotonic()
        stall_s = self.flight_began_s - began_s
        self.stalls_s.append(stall_s)
        state = {**state, "ranks": {"ranks": ranks}}
        self.flight = self.pool.submit(self._write, state, manifest, stall_s, began_s, patience_s)

    def warm(self) -> None:
        """Make the host memory of the first save in the thread, while the first steps run."""
        state = self.engine.state()
        if self.world.rank == 0:
            self.warming = self.pool.submit(self.staging.warm, state, self.backend)

    def wait(self, beat: Callable[[], None] = no_beat) -> None:
        """Wait until the last save is committed or has failed."""
        self.world.wait_until(lambda: self.flight is None or self.flight.done(), beat)

    def is_free(self, step: int, began_s: float) -> bool:
        """Whether the last save has ended, on rank 0; waits for it a while."""
        if self.flight is None:
            return True
        wait_for([self.flight], timeout=max(0.0, self.cfg.max_wait_s - (time.monotonic() - began_s)))
        self.collect()
        if self.flight is None:
            return True
        now_s = time.monotonic()
        why = f"left out: the save before has been under way for {now_s - self.flight_began_s:.0f} s"
        self.results.append(Saved(step, now_s - began_s, now_s - began_s, 0, why))
        # A slow save is no failure until more work is at risk than may be lost.
        self.failures_in_a_row += now_s - self.flight_began_s > self.cfg.max_loss_s
        return False

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        if self.flight is not None and self.flight.done():
            saved, self.flight = self.flight.result(), None
            if saved.num_bytes:
                self.newest, self.save_s = saved.step, saved.save_s
            self.failures_in_a_row = 0 if saved.failure is None else self.failures_in_a_row + 1
            self.results.append(saved)

    def take(self) -> list[Saved]:
        """The results of the saves that ended since the last call."""
        self.collect()
        results, self.results = self.results, []
        return results

    @property
    def failure(self) -> SavesFail | None:
        """The reason why the run has to end; None if saves succeed."""
        if self.failures_in_a_row < self.cfg.max_failures:
            return None
        return SavesFail(f"{self.failures_in_a_row} saves in a row failed; {self.newest_text}")

    @property
    def newest_text(self) -> str:
        newest = "there is no checkpoint" if self.newest is None else f"the newest checkpoint is of step {self.newest}"
        return f"{newest} ({self.store.location}){self.kept_text}"

    @property
    def kept_text(self) -> str:
        if self.kept is None or not (self.kept[1] / FILE).is_file():  # it may have made room for a newer one
            return ""
        step, folder = self.kept
        return f"; step {step} is whole in {folder}: the next start on this machine uploads it"

    def _write(self, state: State, manifest: Manifest, stall_s: float, began_s: float, patience_s: float) -> Saved:
        """Write, commit and prune, in the thread. A failure is logged and returned; several in a row end the run."""
        num_bytes, failure = 0, None
        try:
            num_bytes = self._publish(state, manifest, patience_s)
            self.after_commit()
            self.retention.prune()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}" if not num_bytes else f"it is there, but {error}"
            logger.error("saving step %d: %s%s", manifest.step, failure, self.kept_text)
        return Saved(manifest.step, stall_s, time.monotonic() - began_s, num_bytes, failure)

    def _publish(self, state: State, manifest: Manifest, patience_s: float) -> int:
        name = first_not_finite({"weights": state["model"], "moments": state["optimizer"]})
        if name is not None:
            raise FloatingPointError(f"{name} is no longer finite; such a state is not saved")
        scratch = self.store.scratch(manifest.step, num_bytes_of(state))
        try:
            names = {part: FileName(f"{part}.pt") for part in state}
            files = {name: self._write_file(state[part], scratch / name) for part, name in names.items()}
            manifest = self.store.keep(scratch, replace(manifest, files=files))
            self._commit(scratch, manifest, patience_s)
        except BaseException as error:
            if isinstance(error, UNSENT) and (scratch / FILE).is_file():
                self.kept = manifest.step, scratch
            elif scratch.is_dir():
                shutil.rmtree(scratch)
            raise
        self.kept = None
        return manifest.num_bytes

    def _commit(self, scratch: Path, manifest: Manifest, patience_s: float) -> None:
        """Commit, and retry for `patience_s` if the service does not answer."""

        def warn(state: RetryCallState) -> None:
            error, left_s = state.outcome and state.outcome.exception(), patience_s - (state.seconds_since_start or 0)
            logger.warning("saving step %d: %s; tried again for up to %.0f s", manifest.step, error, left_s)

        for attempt in Retrying(
            retry=retry_if_exception_type(UNSENT),
            stop=stop_after_delay(patience_s),
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before_sleep=warn,
            reraise=True,
        ):
            with attempt:
                self.may_commit()
                self.store.commit(scratch, manifest)

    def _write_file(self, content: State, path: Path) -> FileEntry:
        with path.open("wb") as raw:
            file = Hashing(raw)
            try:
                self.backend.save(content, file)  # type: ignore[arg-type]
            except RuntimeError as error:
                raise file.refusal or error from None  # torch's own error is about its archive: "unexpected pos"
            raw.flush()
            os.fsync(raw.fileno())
        return {"bytes": file.num_bytes, "sha256": Sha256(file.digest.hexdigest())}

    def close(self, *, waits: bool) -> None:
        self.pool.shutdown(wait=waits, cancel_futures=not waits)


class Hashing:
    """A file that computes the checksum of the bytes it is given, whatever the disk then makes of them."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.num_bytes = file, hashlib.sha256(), 0
        self.refusal: OSError | None = None  # the disk's error

    def write(self, content: bytes | memoryview) -> int:
        self.digest.update(content)
        self.num_bytes += memoryview(content).nbytes
        try:
            return self.file.write(content)
        except OSError as error:
            self.refusal = error
            raise

    def flush(self) -> None:
        self.file.flush()
