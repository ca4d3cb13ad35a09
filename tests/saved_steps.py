"""A run with checkpoints of steps 3 and 6 on disk, and what tests do to them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from running import train_here

from train.checkpoints.store import LocalStore


@pytest.fixture(scope="session")
def finished(tmp_path_factory, prepared) -> Path:
    """The run folder, to be read only; the second step is the better one."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    assert train_here(run_dir, prepared, "telemetry.trackers=[tensorboard]") == ("done", 6)
    return run_dir


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    """A copy of it."""
    return shutil.copytree(finished, tmp_path / "run")


def cut_back(run_dir: Path, target: Path, step: int = 3) -> Path:
    """A copy of a run of six steps that ended at this one."""
    shutil.copytree(run_dir, target)
    for later in store_of(target).steps():
        if later > step:
            shutil.rmtree(step_folder(target, later))
    return target


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def store_of(run_dir: Path) -> LocalStore:
    return LocalStore(run_dir / "checkpoints")


def flip(path: Path, at: int | None = None) -> None:
    """Change a bit of the byte there, or of the one in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def set_manifest(run_dir: Path, step: int, **changes: object) -> None:
    manifest = dataclasses.replace(store_of(run_dir).manifest(step), **changes)  # type: ignore[arg-type]
    (step_folder(run_dir, step) / "manifest.json").write_bytes(manifest.to_json())


def copy_step(run_dir: Path, step: int, number: int, **changes: object) -> None:
    """A copy of a step under another number."""
    shutil.copytree(step_folder(run_dir, step), step_folder(run_dir, number))
    manifest = dataclasses.replace(store_of(run_dir).manifest(step), step=number, **changes)  # type: ignore[arg-type]
    (step_folder(run_dir, number) / "manifest.json").write_bytes(manifest.to_json())
