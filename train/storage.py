"""Folders that hold a run's or a data set's files, on this machine or in S3. A file is either whole or not there.

On disk every write goes to a temporary name, is synced, and renamed; S3 shows an object when all of it has arrived.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from train.config import InputError, S3Config

CHUNK_BYTES = 8 * 2**20
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4096  # of Linux: NAME_MAX, PATH_MAX
TEMPORARY_GLOB = ".*.tmp-*"  # files that are not whole yet


class Folder(Protocol):
    """Names are relative, with slashes: `tokenizer/tokenizer.json`. What the user has to mend is an InputError."""

    location: str  # as the user writes it

    def read(self, name: str) -> bytes:
        """A whole file; FileNotFoundError if there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file, or replace one."""

    def create(self, name: str, content: bytes) -> bool:
        """The same, unless there is one: then False and nothing is written. Of several writers one succeeds."""

    def size(self, name: str) -> int | None:
        """Bytes; None if there is no such file."""

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    def names(self, prefix: str = "") -> list[str]:
        """Files whose names begin with `prefix`, in order, those in subfolders too."""

    def names_here(self) -> set[str]:
        """Files and subfolders of the folder itself."""


def is_s3(location: str) -> bool:
    return location.startswith("s3://")


def open_folder(location: str, s3: S3Config) -> Folder:
    """The folder at a path, a file:// or an s3:// URL; it need not exist. InputError for another kind of URL."""
    if is_s3(location):
        from train.s3 import S3Folder  # boto3 is for those who need it

        return S3Folder(location, s3)
    return LocalFolder(local_path(location))


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def read(self, name: str) -> bytes:
        with telling("read", self.path / name):
            return (self.path / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        with telling("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)

    def create(self, name: str, content: bytes) -> bool:
        path = self.path / name
        with telling("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with written_beside(path, content) as temporary:
                try:
                    os.link(temporary, path)  # unlike a rename, fails if the name is taken
                except FileExistsError:
                    return False
            sync_folder(path.parent)
        return True

    def size(self, name: str) -> int | None:
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def remove(self, name: str) -> None:
        with telling("delete", self.path / name):
            (self.path / name).unlink(missing_ok=True)

    def names(self, prefix: str = "") -> list[str]:
        place = self.path / prefix.rpartition("/")[0]  # no further: beside it, files may come and go
        files = (path for path in place.rglob("*") if path.is_file() and not path.match(TEMPORARY_GLOB))
        found = (path.relative_to(self.path).as_posix() for path in files)
        return sorted(name for name in found if name.startswith(prefix))

    def names_here(self) -> set[str]:
        return {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()


@contextmanager
def telling(verb: str, path: Path) -> Iterator[None]:
    """What the disk refuses is for the user to mend; a file to read that is missing is not."""
    try:
        yield
    except OSError as error:
        if verb == "read" and isinstance(error, FileNotFoundError):
            raise
        hint = "; free some space or choose another folder" if verb == "write" else ""
        raise InputError(f"cannot {verb} {path}: {error.strerror}{hint}") from error


def local_path(location: str) -> Path:
    """The path of a folder given by the user, where only local ones will do."""
    if "://" in location and not location.startswith("file://"):
        raise InputError(f"{location}: only local folders are supported here; copy it to this machine first")
    if not location.removeprefix("file://"):
        raise InputError("a path is empty (a variable that is not set?); name a file or folder")
    path = Path(location.removeprefix("file://"))
    long = any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in path.parts)
    if long or len(os.fsencode(path)) >= MAX_PATH_BYTES:
        raise InputError(
            f"{location[:40]}... is too long for a path: {MAX_NAME_BYTES} bytes is the longest name, "
            f"{MAX_PATH_BYTES - 1} the longest path"
        )
    return path


def make_folder(path: Path) -> Path:
    """Create `path` with its parents and show that it can be written to; InputError if not."""
    probe = path / f".write-test-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}; choose a folder of your own") from error
    return path


def sync_folder(path: Path) -> None:
    """Make renames inside `path` durable (POSIX: a rename lives in the folder, not in the file)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


@contextmanager
def written_beside(path: Path, content: bytes) -> Iterator[Path]:
    """A synced file with this content next to `path`, under a name that no other thread, process or machine uses.

    It is removed in the end, unless it was renamed.
    """
    temporary = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(content)
        sync_file(temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file; after a crash either the old content is there or the new one."""
    with written_beside(path, content) as temporary:
        temporary.replace(path)
    sync_folder(path.parent)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The same bytes for the same value, readable."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
