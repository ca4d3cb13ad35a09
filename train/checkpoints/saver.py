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

import torch
from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential
from torch import nn

from train.checkpoints.manifest import FILE, Manifest
from train.checkpoints.progress import Progress
from train.checkpoints.retention import Retention
from train.checkpoints.staging import Staging, State, first_not_finite, num_bytes_of, state_of
from train.checkpoints.store import Store
from train.config import CheckpointConfig, Failure, InputError, Unreachable
from train.untrusted import FileEntry, FileName, Sha256

if TYPE_CHECKING:
    from train.backend import Backend

logger = logging.getLogger("train")
POLL_S = 0.05  # between looks at the last save, while all ranks wait for it
UNSENT = (InputError, Unreachable)  # a service that is away or refuses: what it did not take may be given to it later
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 10.0  # at most, between attempts to commit: random, doubling


class SavesFail(Failure):
    """Checkpoints cannot be written: going on would put more and more work at risk."""


@dataclass(frozen=True)
class Saved:
    """What came of a save, for the metrics."""

    step: int
    stall_s: float  # that the training waited
    save_s: float  # until it was committed, or failed
    num_bytes: int
    failure: str | None = None


@dataclass(frozen=True)
class Facts:
    """What the manifests of a run have in common."""

    fence: int
    identity: dict[str, Any]
    settings: dict[str, Any]
    versions: dict[str, Any]


class Saver:
    """All ranks make one and call `save` and `finish` at the same steps; rank 0 alone writes."""

    def __init__(
        self,
        cfg: CheckpointConfig,
        store: Store,
        backend: Backend,
        facts: Facts,
        *,
        may_commit: Callable[[], None],
        after_commit: Callable[[], None],
    ) -> None:
        """`may_commit` raises if the run folder is no longer ours; `after_commit` is called in the thread."""
        self.cfg, self.store, self.backend, self.facts = cfg, store, backend, facts
        self.may_commit, self.after_commit = may_commit, after_commit
        self.staging, self.retention = Staging(), Retention(store, cfg.keep)
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.flight: Future[Saved] | None = None
        self.flight_began_s = 0.0
        self.results: list[Saved] = []  # not yet asked for
        self.failures_in_a_row = 0
        self.newest: int | None = None  # committed
        self.kept: tuple[int, Path] | None = None  # step and copy of a save that could not be committed
        self.stalls_s: list[float] = []
        self.save_s = 0.0  # that the last one took
        self.warming = self.pool.submit(lambda: None)

    # ---- all ranks -----------------------------------------------------------------------------------------------

    def save(
        self,
        progress: Progress,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        own: State,
        *,
        metric: float | None,
        must: bool = False,
        patience_s: float = 0.0,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to save this step. `own` is what each rank has for itself: small, plain or tensors on the host.

        One that comes while the last is being written waits for checkpoint.max_wait_s and is then left out; one that
        must be waits as long as it takes. Its commit is tried again for `patience_s`.
        """
        began_s = time.monotonic()
        if must:
            self.wait(beat)
        if not self.backend.broadcast(self.is_free(progress.step, began_s)):
            return
        self.backend.check_same(list(model.parameters()))
        ranks = self.backend.gather({"rng": self.backend.rng_state(), **own})
        moments = self.backend.optimizer_state(optimizer)
        if self.backend.rank != 0:
            return
        self.warming.result()
        state = self.staging.copy(state_of(model, moments), self.backend)
        manifest = Manifest(
            step=progress.step,
            fence=self.facts.fence,
            identity=self.facts.identity,
            settings=self.facts.settings,
            progress=asdict(progress),
            world_size=self.backend.world_size,
            backend=self.backend.name,
            metric=metric,
            versions=self.facts.versions,
        )
        self.flight_began_s = time.monotonic()
        stall_s = self.flight_began_s - began_s
        self.stalls_s.append(stall_s)
        state = {**state, "ranks": {"ranks": ranks}}
        self.flight = self.pool.submit(self._write, state, manifest, stall_s, began_s, patience_s)

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """Until the last save is committed or has failed."""
        while self.backend.sum([self.flight is not None and not self.flight.done()])[0]:
            beat()
            time.sleep(POLL_S)

    def is_free(self, step: int, began_s: float) -> bool:
        """Rank 0: whether the last save is done with; waits for it a while."""
        if self.flight is None:
            return True
        wait_for([self.flight], timeout=max(0.0, self.cfg.max_wait_s - (time.monotonic() - began_s)))
        self.collect()
        if self.flight is None:
            return True
        now_s = time.monotonic()
        why = f"left out: the one before has been on its way for {now_s - self.flight_began_s:.0f} s"
        left_out = Saved(step, now_s - began_s, now_s - began_s, 0, why)
        if now_s - self.flight_began_s > self.cfg.max_loss_s:
            self.failed(left_out)  # slow is no failure, until more is at risk than may be lost
        else:
            self.results.append(left_out)
        return False

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        if self.flight is not None and self.flight.done():
            saved, self.flight = self.flight.result(), None
            if saved.num_bytes:
                self.newest, self.save_s = saved.step, saved.save_s
            if saved.failure is None:
                self.failures_in_a_row = 0
                self.results.append(saved)
            else:
                self.failed(saved)

    def take(self) -> list[Saved]:
        """What saves came to since the last call."""
        self.collect()
        found, self.results = self.results, []
        return found

    def failed(self, saved: Saved) -> None:
        self.failures_in_a_row += 1
        self.results.append(saved)

    @property
    def failure(self) -> SavesFail | None:
        """Why the run has to end."""
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
        """In the thread. What fails is not hidden: it is an alarm, and several in a row end the run."""
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
        """Again and again while there is time: `patience_s`."""

        def say(state: RetryCallState) -> None:
            error, left_s = state.outcome and state.outcome.exception(), patience_s - (state.seconds_since_start or 0)
            logger.warning("saving step %d: %s; tried again for up to %.0f s", manifest.step, error, left_s)

        for attempt in Retrying(
            retry=retry_if_exception_type(UNSENT),
            stop=stop_after_delay(patience_s),
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_S, max=LONGEST_PAUSE_S),
            before_sleep=say,
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
                raise file.refusal or error from None  # torch tells of its own archive: "unexpected pos"
            raw.flush()
            os.fsync(raw.fileno())
        return {"bytes": file.num_bytes, "sha256": Sha256(file.digest.hexdigest())}

    def warm(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Rank 0: make the host memory of the first save in the thread, while the first steps run."""
        if self.backend.rank == 0:
            moments = {"state": optimizer.state_dict()["state"]}  # the settings, tensors maybe, are not saved
            self.warming = self.pool.submit(self.staging.warm, state_of(model, moments), self.backend)

    def close(self, *, waits: bool) -> None:
        self.pool.shutdown(wait=waits, cancel_futures=not waits)


class Hashing:
    """A file that knows the checksum of what was written to it: of what was meant, not of what the disk made of it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest, self.num_bytes = file, hashlib.sha256(), 0
        self.refusal: OSError | None = None  # what the disk said

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
