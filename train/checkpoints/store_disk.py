"""Checkpoints in a folder that all ranks see: a step is a folder that gets its name by a rename."""

from __future__ import annotations

import uuid
from pathlib import Path

from train.checkpoints.manifest import FILE, LATEST, Damaged, Manifest, check_files, check_sizes, step_name, step_of
from train.storage.atomic_io import (
    begin_folder,
    publish_folder,
    remove_folder,
    remove_temporaries,
    sync_folder,
    write_atomic,
)
from train.storage.folders import LocalFolder, check_space
from train.storage.schema import FileName


class LocalStore:
    """See `train.checkpoints.store.Store`."""

    compares_when_written = False

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def path_of_step(self, step: int) -> Path:
        return self.path / step_name(step)

    def steps(self) -> list[int]:
        numbers = [step_of(path.name) for path in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(step for step in numbers if step is not None)

    def quarantined(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("step_*.*")) if self.path.is_dir() else []

    def manifest(self, step: int) -> Manifest:
        try:
            manifest = Manifest.from_json((self.path_of_step(step) / FILE).read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:  # other errors are of the disk, and may pass
            raise Damaged(f"{FILE}: {error.strerror}") from error
        manifest.check_step(step)
        return manifest

    def look(self, step: int) -> Manifest:
        manifest = self.manifest(step)
        check_sizes(LocalFolder(self.path_of_step(step)).size, manifest)
        return manifest

    def fetch(self, step: int) -> Path:
        check_files(self.path_of_step(step), self.manifest(step))
        return self.path_of_step(step)

    def path_of(self, manifest: Manifest) -> Path:
        return self.path_of_step(manifest.step)

    def release(self, fetched: Path) -> None: ...

    def begin(self, step: int, num_bytes: int) -> Path:
        folder = begin_folder(self.path_of_step(step))
        check_space(folder, num_bytes)
        return folder

    def join(self, name: str, num_bytes: int) -> Path:
        check_space(self.path / name, num_bytes)
        return self.path / name  # never made here: a new owner of the run folder may have removed it

    def prepare(self, scratch: Path, manifest: Manifest) -> Manifest:
        return manifest

    def send(self, folder: Path, manifest: Manifest, names: list[FileName]) -> None: ...

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        """Fails, and changes nothing, if a new owner of the run folder has removed `scratch`."""
        write_atomic(scratch / FILE, manifest.to_json())  # syncs the folder as well; the files in it are synced
        path = self.path_of_step(manifest.step)
        try:
            publish_folder(scratch, path)
        except FileExistsError:
            self.quarantine(manifest.step, "replaced")
            publish_folder(scratch, path)
        write_atomic(self.path / LATEST, f"{path.name}\n".encode())

    def quarantine(self, step: int, why: str) -> str:
        path = self.path_of_step(step)
        target = path.with_name(f"{path.name}.{why}-{uuid.uuid4().hex[:8]}")
        path.rename(target)
        sync_folder(self.path)
        return target.name

    def remove(self, step: int) -> None:
        remove_folder(self.path_of_step(step))

    def remove_uncommitted(self, leases: range, *, dry: bool = False) -> list[str]:
        return []  # a save that fails removes them

    def collect_garbage(self, *, ended_below: int) -> None:
        """Remove the leftovers of all leases: a save whose folder was removed cannot be committed any more."""
        remove_temporaries(self.path, rf"step_\d{{8,}}|{LATEST}")
