"""Save beside the training, load what was saved. The loop's door to checkpoints.

A save costs the training a copy to host memory. A thread of each rank that has a part of the state writes and uploads
that, and rank 0's commits it; at most one is in flight. A save that fails is an alarm, several in a row end the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from train.checkpoints.manifest import Manifest
from train.checkpoints.progress import Progress
from train.checkpoints.retention import Retention
from train.checkpoints.staging import Staging, State
from train.checkpoints.store import Store
from train.checkpoints.writer import Writer
from train.config import CheckpointConfig, Failure, NotPermitted
from train.host.threads import pool_beside_training
from train.ranks import no_beat

if TYPE_CHECKING:
    from train.backend import Backend
    from train.parallel import Stateful

logger = logging.getLogger("train")


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
    """Saves checkpoints. All ranks make a Saver and call `save` and `wait` at the same steps; rank 0 commits."""

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
        self.after_commit = after_commit
        self.staging, self.retention = Staging(), Retention(store, cfg.keep)
        self.writer = Writer(store, backend, may_commit)
        self.pool = pool_beside_training("save")
        self.flight: Future[Saved | None] | None = None  # gives None on other ranks than rank 0
        self.flight_began_s = 0.0
        self.results: list[Saved] = []  # since the last call of `take`
        self.failures: list[str] = []  # the reasons of saves that failed in a row
        self.newest = newest  # committed
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
        if not self.world.broadcast(self.world.rank == 0 and self.is_free(progress.step, began_s)):
            return
        self.engine.check_replicas()
        ranks = self.world.gather({"rng": self.backend.rng_state(), **own})
        part = self.engine.state()
        self.writer.open(part)
        if self.world.rank != 0 and not self.writer.is_split:
            return
        self.warming.result()
        state = self.staging.copy(part, self.backend)
        if self.world.rank != 0:
            self.flight = self.pool.submit(self.writer.write_part, state, patience_s)
            return
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
        part = self.engine.state()
        self.writer.open(part)
        if part:
            self.warming = self.pool.submit(self.staging.warm, part, self.backend)

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
        if now_s - self.flight_began_s > self.cfg.max_loss_s:
            self.failures.append(why)
        return False

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def collect(self) -> None:
        if self.flight is not None and self.flight.done():
            saved, self.flight = self.flight.result(), None
            if saved is None:
                return
            if saved.num_bytes:
                self.newest, self.save_s = saved.step, saved.save_s
            self.failures = [] if saved.failure is None else [*self.failures, saved.failure]
            self.results.append(saved)

    def take(self) -> list[Saved]:
        """The results of the saves that ended since the last call."""
        self.collect()
        results, self.results = self.results, []
        return results

    @property
    def failure(self) -> SavesFail | None:
        """The reason why the run has to end; None if saves succeed."""
        if len(self.failures) < self.cfg.max_failures:
            return None
        return SavesFail(
            f"{len(self.failures)} saves in a row failed, the last: {self.failures[-1]}; {self.newest_text}"
        )

    @property
    def newest_text(self) -> str:
        newest = "there is no checkpoint" if self.newest is None else f"the newest checkpoint is of step {self.newest}"
        return f"{newest} ({self.store.location}){self.writer.kept_text}"

    def _write(self, state: State, manifest: Manifest, stall_s: float, began_s: float, patience_s: float) -> Saved:
        """Write, commit and prune, in the thread. A failure is logged and returned; several in a row end the run."""
        num_bytes, failure = 0, None
        try:
            num_bytes = self.writer.publish(state, manifest, patience_s)
            self.after_commit()
            if self.failures:
                with suppress(NotPermitted):
                    self.store.remove_uncommitted(range(self.facts.fence, self.facts.fence + 1))
            self.retention.prune()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}" if not num_bytes else f"it is there, but {error}"
            logger.error("saving step %d: %s%s", manifest.step, failure, self.writer.kept_text)
        return Saved(manifest.step, stall_s, time.monotonic() - began_s, num_bytes, failure)

    def close(self, *, waits: bool) -> None:
        self.pool.shutdown(wait=waits, cancel_futures=not waits)
