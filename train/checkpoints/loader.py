"""The loader of the newest valid checkpoint. It may have been saved on another backend, by more or fewer ranks."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from train.checkpoints.manifest import Damaged, Manifest, NoneValid, Progress, Untrusted
from train.checkpoints.store import Store
from train.config import Failure
from train.parallel.backend import load as load_file
from train.parallel.pieces import Tensors
from train.parallel.ranks import World, no_wait
from train.run_folder.identity import check_same_run, differences
from train.storage.schema import BadContent, shown

if TYPE_CHECKING:
    from train.parallel.backend import Backend, State
    from train.parallel.engines import Engine

logger = logging.getLogger("train")


@dataclass
class Loaded:
    progress: Progress = field(default_factory=Progress)
    faults: list[str] = field(default_factory=list)  # why newer checkpoints were not loaded
    # what each rank saved as `own`, see `AsyncSaver.save`
    ranks: list[State] = field(default_factory=list)


def newest_valid(
    store: Store,
    world: World | None = None,
    on_wait: Callable[[], None] = no_wait,
    check_owner: Callable[[], None] = lambda: None,
) -> tuple[Manifest | None, list[str]]:
    """Fetch the newest valid checkpoint on each machine.

    All ranks of `world` must call this function; if `world` is None, only this process does. Returns the checkpoint's
    manifest (None if there never was a checkpoint), and the faults of newer checkpoints. These are put in quarantine,
    unless `check_owner` raises an error.

    Raises NoneValid, without changing anything, if checkpoints exist but none is valid.
    """
    world = world or World()
    faults = dict[int, str]()
    while (
        manifest := world.run_on_rank0(lambda: newest_whole(store, faults), on_wait)
    ) is not None:
        fault = fetch_everywhere(store, manifest.step, world, on_wait)
        if fault is None:
            break
        add_fault(faults, manifest.step, fault)

    def quarantine_faulty() -> list[str]:
        check_owner()
        for damaged in faults if manifest is not None else ():
            logger.warning(
                "a damaged checkpoint was put in quarantine as %s",
                store.quarantine(damaged, "damaged"),
            )
        return list(faults.values())

    return manifest, world.run_on_rank0(quarantine_faulty, on_wait)


def newest_whole(store: Store, faults: dict[int, str]) -> Manifest | None:
    """Return the newest manifest whose files have the right lengths. Skips steps in `faults`, and adds new faults."""
    for step in reversed(store.steps()):
        if step not in faults:
            try:
                return store.look(step)
            except Damaged as error:
                add_fault(faults, step, str(error))
    if faults or store.quarantined():
        raise NoneValid(
            f"none of the checkpoints in {store.location} is valid "
            f"({'; '.join(faults.values()) or 'all are in quarantine'}); repair one, or choose another run_dir"
        )
    return None


def fetch_everywhere(
    store: Store, step: int, world: World, on_wait: Callable[[], None]
) -> str | None:
    """Fetch and verify a step on each machine. Returns rank 0's fault, or None, on all ranks.

    Raises Failure on all ranks if a file is damaged for another rank but valid for rank 0.
    """

    def fetch() -> str | None:
        try:
            store.fetch(step)
        except Damaged as error:
            return str(error)
        return None

    faults = world.all_gather_object(world.run_on_local_rank0(fetch, on_wait))
    others = [rank for rank, fault in enumerate(faults) if fault]
    if others and faults[0] is None:
        raise Failure(
            f"checkpoint of step {step} is valid for rank 0 but damaged for rank {others[0]} "
            f"({faults[others[0]]}); to retry, run the same command again"
        )
    return faults[0]


def add_fault(faults: dict[int, str], step: int, fault: str) -> None:
    faults[step] = f"checkpoint of step {step} is damaged ({fault}): falling back to an older one"
    logger.warning(faults[step])


def load(
    store: Store,
    engine: Engine,
    backend: Backend,
    identity: dict[str, Any],
    settings: dict[str, Any],
    *,
    force: bool,
    on_wait: Callable[[], None] = no_wait,
    check_owner: Callable[[], None] = lambda: None,
) -> Loaded:
    """Restore weights, optimizer and random number generators from the newest valid checkpoint. Call this on all ranks.

    Raises InputError if the checkpoint belongs to another run (unless `force`), and NoneValid on all ranks if every
    checkpoint is damaged.
    """
    world = backend.world
    manifest, faults = newest_valid(store, world, on_wait, check_owner)
    if manifest is None:
        return Loaded(faults=faults)
    source = f"{store.location} at step {manifest.step}"
    check_same_run(manifest.identity, identity, source=source, force=force)
    known = {key: value for key, value in settings.items() if key in manifest.settings}
    changed = differences(manifest.settings, known)
    if changed:
        logger.info("settings changed since step %d: %s", manifest.step, ", ".join(changed))
    path = store.path_of(manifest)
    ranks = world.agree(lambda: restore(path, manifest, engine, backend))
    if world.local_rank == 0:
        store.release(path)
    logger.info("resuming from the checkpoint of step %d", manifest.step)
    return Loaded(Progress(**manifest.progress), faults, ranks)


def restore(path: Path, manifest: Manifest, engine: Engine, backend: Backend) -> list[State]:
    """Load this rank's part of a step that was fetched to `path`. Returns what each rank saved as `own`."""
    world = backend.world
    with world.stagger_local_ranks(), fitting(path):
        weights = read_weights(path, manifest)
        engine.load(weights, read_optimizer(path, manifest))
        ranks: list[State] = read(path / "ranks.pt")["ranks"]
        if not isinstance(ranks, list) or len(ranks) != manifest.world_size:
            raise BadContent(f"ranks.pt does not have the state of {manifest.world_size} ranks")
        if manifest.world_size == world.size:
            backend.set_rng_state(ranks[world.rank]["rng"])
        for own in ranks:
            # It may be memory-mapped from the file, which is removed later.
            own.pop("rng", None)
        return ranks


@contextmanager
def fitting(path: Path | str) -> Iterator[None]:
    """Raise errors of the block, which loads the checkpoint at `path`, as Untrusted: it does not fit the model."""
    try:
        yield
    except (torch.OutOfMemoryError, Failure):
        raise
    except (
        RuntimeError,
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        OverflowError,
    ) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise Untrusted(
            f"{path} does not contain the state of this model, though its checksums are right "
            f"({type(error).__name__}: {reason}); find out who wrote it"
        ) from error


def read_weights(folder: Path, manifest: Manifest) -> Tensors:
    """Read the weights of a verified checkpoint from the files of all ranks that wrote weights.

    Call this inside `fitting`.
    """
    return Tensors({name: read(folder / name) for name in manifest.files_of("model")})


def read_optimizer(folder: Path, manifest: Manifest) -> State:
    """Read the optimizer's state, inside `fitting`. Its "state" maps each parameter's index to tensors."""
    contents = {name: read(folder / name) for name in manifest.files_of("optimizer")}
    first, *others = contents.values()
    by_number: dict[Any, dict[str, Any]] = {}
    for name, content in contents.items():
        for number, tensors in content["state"].items():
            by_number.setdefault(number, {})[name] = tensors
    state = {number: Tensors(parts) for number, parts in sorted(by_number.items())}
    lacking = set[Any]()
    for group in first["param_groups"]:
        lacking.update(group["params"])
    lacking -= state.keys()
    # a single file may lack moments, since not every optimizer has moments
    if others and lacking:
        raise BadContent(f"{', '.join(contents)}: no moments of parameter {shown(min(lacking))}")
    return {**first, "state": state}


def read(path: Path) -> State:
    """Read a file of a checkpoint. Its checksum must have been verified.

    Raises Untrusted if the file contains code, or tensors other than plain CPU tensors, or if it is missing because the
    manifest does not name it.
    """
    try:
        state = load_file(path)
    except (FileNotFoundError, pickle.UnpicklingError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        content = "contains more than tensors and plain containers, though its checksum is right"
        fault = "is missing, and its manifest does not name it" if is_missing else content
        raise Untrusted(f"{path} is rejected: it {fault}; find out who wrote it") from error
    inner: list[Any] = [state]
    seen = set[int]()  # a list may contain itself
    for value in inner:  # `inner` grows in this loop
        if isinstance(value, torch.Tensor) and not is_plain(value):
            raise Untrusted(
                f"{path} is rejected: it has a tensor that is not plain numbers; find out who wrote it"
            )
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            inner += value.values() if isinstance(value, dict) else value
    return state


def is_plain(tensor: torch.Tensor) -> bool:
    is_usual = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return (
        is_usual and tensor.device.type == "cpu" and not (tensor.is_quantized or tensor.is_nested)
    )
