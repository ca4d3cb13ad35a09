"""Where checkpoints are: the protocol for a folder on disk and for S3, the folder on disk, and what opens either.

On disk, which all ranks see, a step is a folder that gets its name by a rename. No torch here.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Protocol

from train.checkpoints.manifest import FILE, LATEST, Damaged, Manifest, check_files, step_name, step_of
from train.storage.atomic_io import (
    begin_folder,
    publish_folder,
    remove_folder,
    remove_temporaries,
    sync,
    write_atomic,
)
from train.storage.checksums import fault_of
from train.storage.folders import Folder, LocalFolder, check_space
from train.storage.schema import FileName


class Store(Protocol):
    """The checkpoints of a run, by their steps. A broken one is put in quarantine under another name, never deleted.

    A save calls `begin`, on other ranks with a part of the state `join`, then `prepare`, `send` on every rank, and
    `commit`; a load calls `fetch`, `path_of`, `release`.
    """

    location: str
    compares_when_written: bool = False  # whether the service compares checksums as it takes files, as S3 does

    def steps(self) -> list[int]:
        """The steps that are there by name, ascending, valid or not."""

    def quarantined(self) -> list[str]:
        """Names of the checkpoints in quarantine."""

    def manifest(self, step: int) -> Manifest:
        """Raises Damaged."""

    def size(self, manifest: Manifest, name: FileName) -> int | None:
        """Bytes of a file of a step; None if it is missing."""

    def look(self, step: int) -> Manifest:
        """The manifest, after comparing the length of each file. Raises Damaged."""
        manifest = self.manifest(step)
        for name, entry in manifest.files.items():
            if (fault := fault_of(entry, self.size(manifest, name))) is not None:
                raise Damaged(f"{name} {fault}")
        return manifest

    def fetch(self, step: int) -> Path:
        """A folder on this machine that holds the step's files, each verified. Raises Damaged."""

    def path_of(self, manifest: Manifest) -> Path:
        """The folder to which this or another rank of this machine has fetched the step."""

    def release(self, fetched: Path) -> None:
        """Remove the files that `fetch` has copied."""

    def begin(self, step: int, num_bytes: int) -> Path:
        """An empty folder of this machine for rank 0's files of a step. OSError if `num_bytes` do not fit."""

    def join(self, name: str, num_bytes: int) -> Path:
        """A folder of this machine for the files of another rank; `name` is that of rank 0's folder. OSError if
        `num_bytes` do not fit, or rank 0's folder is gone.
        """

    def prepare(self, scratch: Path, manifest: Manifest) -> Manifest:
        """Return the manifest to commit, now that all files of the step are written on their machines. In S3 it says
        where they go; if `scratch` has all of them, it is from now on a checkpoint that can be uploaded by hand.
        """

    def send(self, folder: Path, manifest: Manifest, names: list[FileName]) -> None:
        """Bring a rank's files to where `commit` needs them. They are synced."""

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        """Make a step of the files that were sent. It exists when this returns, and not before."""

    def quarantine(self, step: int, why: str) -> str:
        """Rename a step so that it no longer counts, and return the new name, which says why."""

    def remove(self, step: int) -> None: ...

    def remove_uncommitted(self, leases: range, *, dry: bool = False) -> list[str]:
        """Remove the files of saves of these leases, all of which have ended, that were not committed. Returns the
        names of their folders; with `dry` it removes nothing.
        """

    def collect_garbage(self, *, ended_below: int) -> None:
        """Remove leftovers of killed saves of leases below this number. Only the run folder's owner calls it."""


class LocalStore(Store):
    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def path_of_step(self, step: int) -> Path:
        return self.path / step_name(step)

    def steps(self) -> list[int]:
        numbers = [step_of(path.name) for path in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(step for step in numbers if step is not None)

    def quarantined(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("step_*.*"))

    def manifest(self, step: int) -> Manifest:
        try:
            return Manifest.from_json((self.path_of_step(step) / FILE).read_bytes(), step=step)
        except (FileNotFoundError, NotADirectoryError) as error:  # other errors are of the disk, and may pass
            raise Damaged(f"{FILE}: {error.strerror}") from error

    def size(self, manifest: Manifest, name: FileName) -> int | None:
        return LocalFolder(self.path_of(manifest)).size(name)

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
        sync(self.path)
        return target.name

    def remove(self, step: int) -> None:
        remove_folder(self.path_of_step(step))

    def remove_uncommitted(self, leases: range, *, dry: bool = False) -> list[str]:
        return []  # a save that fails removes them

    def collect_garbage(self, *, ended_below: int) -> None:
        """Remove the leftovers of all leases: a save whose folder was removed cannot be committed any more."""
        remove_temporaries(self.path, rf"step_\d{{8,}}|{LATEST}")


def open_store(folder: Folder, scratch: Path) -> Store:
    """The checkpoints of a run folder; `scratch` is on this machine, for files on their way to and from S3."""
    if isinstance(folder, LocalFolder):
        return LocalStore(folder.path / "checkpoints")
    from train.checkpoints.store_s3 import S3Store  # boto3 takes long to import
    from train.storage.s3 import S3Folder

    assert isinstance(folder, S3Folder)
    return S3Store(folder, scratch)
