"""Where checkpoints are: one protocol for a folder on disk and for S3, and what opens either. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from train.checkpoints.manifest import Manifest
from train.checkpoints.store_disk import LocalStore
from train.storage.folders import Folder, LocalFolder
from train.storage.schema import FileName


class Store(Protocol):
    """The checkpoints of a run, by their steps. A broken one is put in quarantine under another name, never deleted.

    A save calls `begin`, on other ranks with a part of the state `join`, then `prepare`, `send` on every rank, and
    `commit`; a load calls `fetch`, `path_of`, `release`.
    """

    location: str
    compares_when_written: bool  # whether the service compares checksums as it takes files, as S3 does

    def steps(self) -> list[int]:
        """The steps that are there by name, ascending, valid or not."""

    def quarantined(self) -> list[str]:
        """Names of the checkpoints in quarantine."""

    def manifest(self, step: int) -> Manifest:
        """Raises Damaged."""

    def look(self, step: int) -> Manifest:
        """The manifest, after comparing the length of each file. Raises Damaged."""

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


def open_store(folder: Folder, scratch: Path) -> Store:
    """The checkpoints of a run folder; `scratch` is on this machine, for files on their way to and from S3."""
    if isinstance(folder, LocalFolder):
        return LocalStore(folder.path / "checkpoints")
    from train.checkpoints.store_s3 import S3Store  # boto3 takes long to import
    from train.storage.s3 import S3Folder

    assert isinstance(folder, S3Folder)
    return S3Store(folder, scratch)
