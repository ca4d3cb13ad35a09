"""Restores the newest valid checkpoint, the same on all ranks, whatever their number and backend."""

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

from train.backend.base import load as load_file
from train.checkpoints.manifest import Damaged, Manifest, NoneValid, Progress, Untrusted
from train.checkpoints.store import Store
from train.config import Failure
from train.parallel.pieces import Tensors
from train.ranks import World, no_wait
from train.run_folder.folder import check_same_run, differences
from train.storage.schema import BadContent, shown

if TYPE_CHECKING:
    from train.backend import Backend, State
    from train.parallel import Checkpointed

logger = logging.getLogger("train")


@dataclass
class Loaded:
    progress: Progress = field(default_factory=Progress)
    faults: list[str] = field(default_factory=list)  # on rank 0: what was wrong with newer checkpoints
    ranks: list[State] = field(default_factory=list)  # the state of each rank of the saved run


def newest_valid(store: Store) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint that matches its manifest, None if there never was one, and what is wrong with newer ones,
    which are put in quarantine.

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
            logger.warning("in quarantine as %s", store.quarantine(damaged, "damaged"))
        return manifest, list(faults.values())
    if faults or store.quarantined():
        raise NoneValid(
            f"none of the checkpoints in {store.location} is valid "
            f"({'; '.join(faults.values()) or 'all are in quarantine'}); repair one, or choose another run_dir"
        )
    return None, []


def load(
    store: Store,
    engine: Checkpointed,
    backend: Backend,
    identity: dict[str, Any],
    settings: dict[str, Any],
    *,
    force: bool,
    on_wait: Callable[[], None] = no_wait,
) -> Loaded:
    """Restore weights, optimizer and random numbers of the newest valid checkpoint; all ranks call it.

    Raises InputError if it is of another run (unless `force`), NoneValid on all ranks if there are only damaged ones.
    """
    world = backend.world
    manifest, faults = world.run_on_rank0(lambda: newest_valid(store), on_wait)
    if manifest is None:
        return Loaded(faults=faults)
    check_same_run(manifest.identity, identity, source=f"{store.location} at step {manifest.step}", force=force)
    changed = differences(manifest.settings, {key: settings[key] for key in settings if key in manifest.settings})
    if changed:
        logger.info("changed since step %d: %s", manifest.step, ", ".join(changed))
    world.run_on_local_rank0(lambda: bring(store, manifest.step, world), on_wait)
    path = store.path_of(manifest)

    def restore() -> list[State]:
        with world.stagger_local_ranks(), fitting(path):
            engine.load(read_weights(path, manifest), read_optimizer(path, manifest))
            ranks = read(path / "ranks.pt")["ranks"]
            if manifest.world_size == world.size:
                backend.set_rng_state(ranks[world.rank]["rng"])
            # Copies: `ranks` may be mapped from the file, which is removed below.
            return [{name: value for name, value in own.items() if name != "rng"} for own in ranks]

    plain = world.agree(restore)
    if world.local_rank == 0:
        store.release(path)
    logger.info("resuming from the checkpoint of step %d", manifest.step)
    if not backend.continues_dropout and has_dropout(engine.model):
        logger.warning(
            "dropout on a %s was never seen to continue where a checkpoint left it: losses may differ from those of a "
            "run that did not stop, as between two seeds; without dropout a resume is exact",
            backend.device_name,
        )
    return Loaded(Progress(**manifest.progress), faults, plain)


def has_dropout(model: nn.Module) -> bool:
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())


def bring(store: Store, step: int, world: World) -> None:
    """Fetch a checkpoint to a machine that may not see rank 0's disk."""
    if world.rank != 0:
        try:
            store.fetch(step)
        except Damaged as error:
            raise Failure(
                f"checkpoint of step {step} is whole for rank 0 and damaged for rank {world.rank} ({error}); the "
                "same command tries again"
            ) from error


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Raise Untrusted if what the block reads from a checkpoint's folder is not the state of this model."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, LookupError, TypeError, AttributeError, BadContent) as error:
        if isinstance(error, Failure):
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise Untrusted(
            f"{path} does not hold the state of this model, though its checksums are right "
            f"({type(error).__name__}: {reason}); who wrote it?"
        ) from error


def read_weights(folder: Path, manifest: Manifest) -> Tensors:
    """The weights of a verified checkpoint, from the files of all ranks that wrote some. Called in `fitting`."""
    return Tensors({name: read(folder / name) for name in manifest.files_of("model")})


def read_optimizer(folder: Path, manifest: Manifest) -> State:
    """The optimizer's state, the same way: its "state" has the tensors of each parameter, by number."""
    contents = {name: read(folder / name) for name in manifest.files_of("optimizer")}
    first, *others = contents.values()
    by_number: dict[Any, dict[str, Any]] = {}
    for name, content in contents.items():
        for number, tensors in content["state"].items():
            by_number.setdefault(number, {})[name] = tensors
    state = {number: Tensors(parts) for number, parts in sorted(by_number.items())}
    lacking = {number for group in first["param_groups"] for number in group["params"]} - state.keys()
    if others and lacking:  # a single file may hold no moments: not every optimizer has some
        raise BadContent(f"{', '.join(contents)}: no moments of parameter {shown(min(lacking))}")
    return {**first, "state": state}


def read(path: Path) -> State:
    """The content of a checkpoint's file, whose checksum was compared before. Raises Untrusted for a file that holds
    code, or tensors other than plain ones on the CPU, or that is missing because the manifest does not name it.
    """
    try:
        state = load_file(path)
    except (FileNotFoundError, pickle.UnpicklingError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        content = "holds more than tensors and plain containers, though its checksum is right"
        fault = "is missing, and its manifest does not name it" if is_missing else content
        raise Untrusted(f"{path} is rejected: it {fault}; who wrote it?") from error
    inner: list[Any] = [state]
    seen = set[int]()
    for value in inner:  # which grows
        if isinstance(value, torch.Tensor):
            plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
            if not plain or value.is_quantized or value.is_nested:
                raise Untrusted(f"{path} is rejected: it holds a tensor that is not plain numbers; who wrote it?")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:  # a list may hold itself
            seen.add(id(value))
            inner += value.values() if isinstance(value, dict) else value
    return state
