"""Where checkpoints are: one protocol for a folder on disk and for S3, and the first of the two. No torch here."""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Protocol

from train.checkpoints.manifest import (
    FILE,
    LATEST,
    Damaged,
    Manifest,
    check_files,
    check_sizes,
    size_of,
    step_name,
    step_of,
)
from train.storage import TEMPORARY_GLOB, Folder, LocalFolder, sync_folder, write_atomic

OWN_TEMPORARY = re.compile(rf"\.(step_\d{{8,}}|{LATEST})\.tmp-[0-9a-f]{{32}}")
ROOM = 1.1  # times the size of a checkpoint has to be free before it is written


class Store(Protocol):
    """Steps are ascending. What is broken is put aside under another name, never deleted."""

    location: str

    def steps(self) -> list[int]:
        """Those that are there by name, valid or not."""

    def aside(self) -> list[str]:
        """Names of what was put aside."""

    def manifest(self, step: int) -> Manifest:
        """Raises Damaged."""

    def look(self, step: int) -> Manifest:
        """The same, all files of their length."""

    def fetch(self, step: int) -> Path:
        """A folder on this machine that holds the step's files, each verified. Raises Damaged."""

    def place(self, manifest: Manifest) -> Path:
        """That folder, once it was fetched by this or another rank of this machine."""

    def let_go(self, fetched: Path) -> None:
        """Done with what `fetch` gave."""

    def scratch(self, step: int, num_bytes: int) -> Path:
        """An empty folder of this machine to write a step's files to. OSError if there is no room for so much."""

    def keep(self, scratch: Path, manifest: Manifest) -> Manifest:
        """What `commit` is to be given; in S3, where it may fail for long, `scratch` outlasts this process from here
        on.
        """

    def send_kept(self, fence: int) -> None:
        """Commit what earlier starts kept and could not, if it is newer than all that is there."""

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        """Make the step of the files written to `scratch`. It is there when this returns; before, it is not."""

    def put_aside(self, step: int, why: str) -> str:
        """Take a step out of the way under a name that says why; gives the name."""

    def remove(self, step: int) -> None: ...

    def collect_garbage(self, *, ended_below: int) -> None:
        """Remove what killed saves of leases below this number have left. Only the run folder's owner calls it."""


class LocalStore:
    """See Store. A folder that all ranks see."""

    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def steps(self) -> list[int]:
        found = [step_of(path.name) for path in self.path.iterdir()] if self.path.is_dir() else []
        return sorted(step for step in found if step is not None)

    def aside(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("step_*.*")) if self.path.is_dir() else []

    def manifest(self, step: int) -> Manifest:
        try:
            manifest = Manifest.from_json((self.path / step_name(step) / FILE).read_bytes())
        except (FileNotFoundError, NotADirectoryError) as error:  # others are the disk's trouble, and may pass
            raise Damaged(f"{FILE}: {error.strerror}") from error
        if manifest.step != step:
            raise Damaged(f"{FILE} is of step {manifest.step}")
        return manifest

    def look(self, step: int) -> Manifest:
        manifest = self.manifest(step)
        check_sizes({name: size_of(self.path / step_name(step) / name) for name in manifest.files}, manifest)
        return manifest

    def fetch(self, step: int) -> Path:
        check_files(self.path / step_name(step), self.manifest(step))
        return self.path / step_name(step)

    def place(self, manifest: Manifest) -> Path:
        return self.path / step_name(manifest.step)

    def let_go(self, fetched: Path) -> None: ...

    def scratch(self, step: int, num_bytes: int) -> Path:
        if not self.path.is_dir():
            self.path.mkdir(parents=True)
            sync_folder(self.path.parent)  # of no use is a step that is durable in a folder that is not
        folder = self.path / f".{step_name(step)}.tmp-{uuid.uuid4().hex}"
        folder.mkdir()
        check_room(folder, num_bytes)
        return folder

    def keep(self, scratch: Path, manifest: Manifest) -> Manifest:
        return manifest

    def send_kept(self, fence: int) -> None: ...

    def commit(self, scratch: Path, manifest: Manifest) -> None:
        write_atomic(scratch / FILE, manifest.to_json())  # syncs the folder as well; the files in it are synced
        final = self.path / step_name(manifest.step)
        try:
            scratch.rename(final)  # fails first if a new owner of the run folder has removed it: then nothing changes
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            self.put_aside(manifest.step, "replaced")
            scratch.rename(final)
        sync_folder(self.path)
        write_atomic(self.path / LATEST, f"{final.name}\n".encode())

    def put_aside(self, step: int, why: str) -> str:
        folder = self.path / step_name(step)
        target = folder.with_name(f"{folder.name}.{why}-{uuid.uuid4().hex[:8]}")
        folder.rename(target)
        sync_folder(self.path)
        return target.name

    def remove(self, step: int) -> None:
        folder = self.path / step_name(step)
        doomed = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex}")
        folder.rename(doomed)  # at once: a removal that is killed must not leave half a checkpoint
        sync_folder(self.path)  # nor one that a power cut ends
        shutil.rmtree(doomed)

    def collect_garbage(self, *, ended_below: int) -> None:
        """Of all leases: a save whose folder is gone cannot be committed."""
        for path in self.path.glob(TEMPORARY_GLOB):
            if not OWN_TEMPORARY.fullmatch(path.name):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:  # LATEST
                path.unlink()


def check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes * ROOM:
        shutil.rmtree(folder)
        wanted = f"{num_bytes * ROOM / 1e9:.3g} GB are needed, {free / 1e9:.3g} GB free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {wanted}", str(folder.parent))


def open_store(folder: Folder, scratch: Path) -> Store:
    """The checkpoints of a run folder; `scratch` is on this machine, for files on their way to and from S3."""
    if isinstance(folder, LocalFolder):
        return LocalStore(folder.path / "checkpoints")
    from train.checkpoints.store_s3 import S3Store  # boto3 is for those who need it
    from train.s3 import S3Folder

    assert isinstance(folder, S3Folder)
    return S3Store(folder, scratch)
