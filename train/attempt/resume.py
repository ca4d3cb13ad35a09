"""Resuming from the newest checkpoint of a run folder, at the start and after a rollback."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from train.attempt import goodput
from train.checkpoints.loader import Loaded, load
from train.checkpoints.manifest import NoneValid
from train.checkpoints.store import Store
from train.config import NotPermitted, flat

if TYPE_CHECKING:
    from train.attempt.attempt import Attempt
    from train.backend import Backend
    from train.parallel import Engine


def go_on(attempt: Attempt, store: Store, engine: Engine, backend: Backend) -> Loaded:
    """Put back the newest valid checkpoint, if there is one, once the store is in order.

    Raises NoneValid on all ranks if the metrics name a checkpoint and the store has none.
    """
    newest = backend.world.run_on_rank0(lambda: tidy(attempt, store), attempt.watch.beat)
    loaded = load_newest(attempt, store, engine, backend)
    if not loaded.ranks and newest is not None:
        raise NoneValid(
            f"metrics.jsonl says that step {newest} was saved, and there is no checkpoint in {store.location}: "
            "is a disk not mounted? Mount it, or choose another run_dir to start over"
        )
    return loaded


def load_newest(attempt: Attempt, store: Store, engine: Engine, backend: Backend) -> Loaded:
    """Put back weights, optimizer and random numbers of the newest valid checkpoint; `ranks` is empty without one."""
    return load(
        store,
        engine,
        backend,
        identity=attempt.identity,
        settings=flat(attempt.cfg),
        force=attempt.cfg.resume.force,
        beat=attempt.watch.beat,
    )


def tidy(attempt: Attempt, store: Store) -> int | None:
    """Remove what killed attempts left behind. Returns the newest step that was saved according to the metrics. Only
    rank 0 calls it.
    """
    newest = goodput.newest_saved(attempt.folder.metrics)
    if attempt.lease is not None:
        with suppress(NotPermitted):
            store.collect_garbage(ended_below=attempt.lease.ended_below)
    return newest
