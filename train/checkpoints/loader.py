"""Put back the newest valid checkpoint, the same on all ranks, whatever their number and backend."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from train.checkpoints.manifest import Damaged, Manifest, NoneValid, Untrusted
from train.checkpoints.progress import Progress
from train.checkpoints.store import Store
from train.config import Failure
from train.optim import load_state
from train.run_folder import check_same_run, differences
from train.together import meanwhile, together

if TYPE_CHECKING:
    from train.backend import Backend, State

logger = logging.getLogger("train")


@dataclass
class Loaded:
    progress: Progress = field(default_factory=Progress)
    faults: list[str] = field(default_factory=list)  # rank 0: what was wrong with newer ones, what has changed
    ranks: list[State] = field(default_factory=list)  # what each rank of the saved run had for itself


def newest_valid(store: Store) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint that is what its manifest says, None if there never was one, and what is wrong with newer
    ones, which are put aside.

    Raises:
        NoneValid: there are checkpoints, and none is valid. All stay as they are.
    """
    faults: dict[int, str] = {}
    for step in reversed(store.steps()):
        try:
            store.fetch(step)
            manifest = store.manifest(step)
        except Damaged as error:
            faults[step] = f"checkpoint of step {step} is damaged ({error}): falling back to an older one"
            logger.warning(faults[step])
            continue
        for damaged in faults:
            logger.warning("put aside as %s", store.put_aside(damaged, "damaged"))
        return manifest, list(faults.values())
    if faults or store.aside():
        raise NoneValid(
            f"none of the checkpoints in {store.location} is valid "
            f"({'; '.join(faults.values()) or 'all were put aside'}); mend one, or choose another run_dir to start over"
        )
    return None, []


def load(
    store: Store,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backend: Backend,
    *,
    identity: dict[str, Any],
    settings: dict[str, Any],
    force: bool,
    beat: Callable[[], None] = lambda: None,
) -> Loaded:
    """Put back weights, optimizer and random numbers from the newest valid checkpoint; all ranks call it.

    Raises InputError if it is of another run (unless `force`), NoneValid on all ranks if there are only damaged ones.
    """
    manifest, faults = backend.share(meanwhile(backend, lambda: newest_valid(store), beat) or (None, []))[0]
    if manifest is None:
        return Loaded(faults=faults)
    check_same_run(manifest.identity, identity, place=f"{store.location} at step {manifest.step}", force=force)
    changed = differences(manifest.settings, {key: settings[key] for key in settings if key in manifest.settings})
    if changed:
        logger.info("changed since step %d: %s", manifest.step, ", ".join(changed))
    together(backend, lambda: bring(store, manifest.step, backend))
    path = store.place(manifest)
    with backend.in_turn(), fitting(path):
        model.load_state_dict(read(path / "model.pt", backend))
        load_state(optimizer, read(path / "optimizer.pt", backend))
        ranks = read(path / "ranks.pt", backend)["ranks"]
        if manifest.world_size == backend.world_size:
            backend.set_rng_state(ranks[backend.rank]["rng"])
        plain = [{name: value for name, value in own.items() if name != "rng"} for own in ranks]  # the file may go
    backend.barrier()
    if backend.local_rank == 0:
        store.let_go(path)
    logger.info("going on from the checkpoint of step %d", manifest.step)
    return Loaded(Progress(**manifest.progress), faults, plain)


def bring(store: Store, step: int, backend: Backend) -> None:
    """To machines that do not share rank 0's disk."""
    if backend.local_rank == 0 and backend.rank != 0:
        try:
            store.fetch(step)
        except Damaged as error:
            raise Failure(
                f"checkpoint of step {step} is whole for rank 0 and damaged for rank {backend.rank} ({error}); the "
                "same command tries again"
            ) from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """What is read from a checkpoint's folder and put back: Untrusted if it is not the state of this model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, Failure):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise Untrusted(
            f"{path} does not hold the state of this model, though its checksums are right "
            f"({type(error).__name__}: {reason}); who wrote it?"
        ) from error


def read(path: Path, backend: Backend) -> State:
    """A file of a checkpoint, its checksum compared before. Untrusted if it holds code, or is not there: the manifest
    does not name it.
    """
    try:
        return backend.load(path)
    except FileNotFoundError as error:
        raise Untrusted(f"{path} is missing, and its manifest does not name it; who wrote it?") from error
    except pickle.UnpicklingError as error:
        raise Untrusted(
            f"{path} is refused: it holds more than tensors and plain containers, though its checksum is right; who "
            "wrote it?"
        ) from error
