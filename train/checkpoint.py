"""Checkpoints: one folder per step, written under another name, with a manifest last, and renamed when whole.

`checkpoints/step_00001000/` holds `state.pt` (tensors and plain containers, the same for every backend) and
`manifest.json` (step, identity, length and sha256 of each file). What has no manifest, or whose files are not what it
says, is not a checkpoint: loading falls back to the newest that is, and stops if there were some but none is whole.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from train.optim import load_state
from train.run_folder import check_same_run
from train.storage import canonical_json, sha256_file, sync_file, sync_folder, write_atomic

if TYPE_CHECKING:
    from train.backend import Backend

logger = logging.getLogger("train")
FORMAT = 1
NONE = -1


@dataclass
class Progress:
    """How far a run has come: all that is saved beside weights, optimizer and random numbers."""

    step: int = 0  # optimizer steps done; the place in the data follows from it
    window_shards: int | None = None  # shuffled together; None: not yet decided
    windows_grow: bool = False
    best_loss: float | None = None  # of the evaluations so far
    evals_since_best: int = 0

    def saw(self, loss: float, *, min_delta: float) -> None:
        """Take note of an evaluation."""
        if self.best_loss is None or loss < self.best_loss - min_delta:
            self.best_loss, self.evals_since_best = loss, 0
        else:
            self.evals_since_best += 1


def save(
    folder: Path,
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backend: Backend,
    *,
    identity: dict[str, Any],
    keep: int,
) -> dict[str, float]:
    """Publish a checkpoint of this step; all ranks call it. Gives seconds and bytes, for the metrics."""
    began_s = time.monotonic()
    backend.check_same(list(model.parameters()))
    rng = backend.gather(backend.rng_state())
    moments = backend.optimizer_state(optimizer)
    written_bytes = 0
    if backend.rank == 0:
        final = folder / f"step_{progress.step:08d}"
        temporary = folder / f".{final.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        state = temporary / "state.pt"
        backend.save(
            {"model": model.state_dict(), "optimizer": moments, "rng": rng, "progress": asdict(progress)}, state
        )
        sync_file(state)
        written_bytes = state.stat().st_size
        manifest = {
            "format": FORMAT,
            "step": progress.step,
            "identity": identity,
            "world_size": backend.world_size,
            "backend": backend.name,
            "files": {state.name: {"bytes": written_bytes, "sha256": sha256_file(state)}},
        }
        write_atomic(temporary / "manifest.json", canonical_json(manifest))
        if final.exists():  # a damaged one that was passed over: put aside, never deleted
            final.rename(folder / f"{final.name}.broken-{time.time_ns()}")
        temporary.rename(final)
        sync_folder(folder)
        prune(folder, keep)
    backend.barrier()
    return {"save_s": time.monotonic() - began_s, "bytes": written_bytes}


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` published checkpoints; 0 keeps all."""
    published = steps(folder)
    for step in published[:-keep] if keep else []:
        shutil.rmtree(folder / f"step_{step:08d}")


def steps(folder: Path) -> list[int]:
    """Steps that have a folder, ascending, whole or not."""
    found = [path.name.removeprefix("step_") for path in folder.glob("step_*")] if folder.is_dir() else []
    return sorted(int(name) for name in found if name.isdigit())


def damage(folder: Path, step: int) -> str | None:
    """What is wrong with a checkpoint, None if its files are what its manifest says."""
    path = folder / f"step_{step:08d}"
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        for name, entry in manifest["files"].items():
            size = (path / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if sha256_file(path / name) != entry["sha256"]:
                return f"{name} does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def newest_whole(folder: Path) -> tuple[int, list[str]]:
    """The newest checkpoint that is whole, NONE if there never was one, and what is wrong with those passed over.

    Raises:
        RuntimeError: there are checkpoints, but none is whole.
    """
    found = steps(folder)
    faults: list[str] = []
    for step in reversed(found):
        reason = damage(folder, step)
        if reason is None:
            return step, faults
        faults.append(f"checkpoint of step {step} is damaged ({reason}): falling back to an older one")
        logger.warning(faults[-1])
    if found:
        raise RuntimeError(
            f"none of the {len(found)} checkpoints in {folder} is whole; repair one, or remove the folder to start over"
        )
    return NONE, []


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backend: Backend,
    *,
    identity: dict[str, Any],
) -> tuple[Progress, list[str]]:
    """Put back the newest whole checkpoint, the same on all ranks; a new Progress if there is none.

    Gives also, on rank 0, what was wrong with newer ones.
    """
    step, faults = newest_whole(folder) if backend.rank == 0 else (NONE, [])
    step = backend.broadcast(step)
    if step == NONE:
        return Progress(), faults
    path = folder / f"step_{step:08d}"
    manifest = json.loads((path / "manifest.json").read_bytes())
    check_same_run(manifest["identity"], identity, place=path)
    with backend.in_turn():
        state = backend.load(path / "state.pt")
        model.load_state_dict(state["model"])
        load_state(optimizer, state["optimizer"])
        if backend.rank < len(state["rng"]) and manifest["world_size"] == backend.world_size:
            backend.set_rng_state(state["rng"][backend.rank])
        progress = Progress(**state["progress"])
        del state
    logger.info("going on from the checkpoint of step %d", step)
    return progress, faults
