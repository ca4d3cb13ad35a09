"""Folders on this machine or in S3 that contain the files of a run or a data set.

Readers never see incomplete files: atomic_io.py ensures this on disk, and S3 shows only complete objects.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from train.config import InputError, NotPermitted, S3Config, check, check_printable
from train.storage import atomic_io
from train.storage.atomic_io import (
    create_atomic,
    discard,
    is_temporary,
    open_whole,
    write_atomic,
)
from train.storage.foreign import check_regular, open_inside, read_whole
from train.storage.schema import Head, RelativePath

# A name with ":/", or with a known scheme and ":", was meant to be a URL.
NO_URL = re.compile(
    r"\s*([a-z][a-z0-9+.-]*:/|(s3[an]?|gs|gcs|hdfs|abfss?|az|wasbs?|https?|file|hf|dbfs):)",
    re.IGNORECASE,
)
CHECKPOINTS = "checkpoints"  # subfolder of a run that may be a link
PRIVATE = 0o700  # mode of a new folder; an existing one keeps its mode
SPACE_FACTOR = 1.1  # required free bytes / bytes to write
AT_ONCE = 16  # number of threads: hashing releases the GIL, and requests to S3 or a shared disk wait for the network
Item = TypeVar("Item")
Result = TypeVar("Result")


class Folder(Protocol):
    """Files named by relative paths, such as `model/config.json`. Faults that a user can fix raise InputError."""

    location: str  # as the user wrote it

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError if it is missing."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for random access. S3 files are held in memory. Raises FileNotFoundError if it is missing."""

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file, replacing an earlier one."""

    def create(self, name: str, content: bytes) -> bool:
        """Write a whole file unless it exists. Returns whether it was written: True for only one of several writers."""

    def upload(self, name: str, path: Path) -> None:
        """Copy the local file `path` into this folder, replacing an earlier file."""

    def download(self, name: str, path: Path) -> None:
        """Copy a file to the local `path`; the caller must verify it. Raises FileNotFoundError if it is missing."""

    def head(self, name: str) -> Head | None:
        """Return the length and version of a file; None if it is missing."""

    def size(self, name: str) -> int | None:
        """Return the length of a file in bytes; None if it is missing."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists. Raises NotPermitted if it cannot be removed."""

    def names(self, prefix: str = "") -> list[str]:
        """Return the sorted names, at any depth, that begin with `prefix`. Names that are invalid paths are skipped."""

    def listing(self, prefix: str = "") -> dict[str, Head]:
        """Return the length and version of each file that `names` returns. S3 lists 1,000 files per request."""

    def names_here(self) -> set[str]:
        """Return the names of the files and subfolders directly in this folder."""


def is_s3(location: str) -> bool:
    return location.startswith("s3://")


def open_folder(location: str, s3: S3Config) -> Folder:
    """Return the folder at a path or a file:// or s3:// URL; it need not exist. Raises InputError on other URLs."""
    check_place(location)
    if is_s3(location):
        from train.storage.s3 import S3Folder  # imported late because boto3 is slow to import

        return S3Folder(location, s3)
    return LocalFolder(local_path(location))


class LocalFolder:
    """A folder on this machine. A new one is private, whatever the umask: it may contain users' texts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.location = str(path)

    def at(self, name: str) -> Path:
        """Return the path of a file. Raises BadContent if the name would lead out of the folder."""
        return self.path / RelativePath(name)

    def root_of(self, name: str) -> Path:
        """Return the folder that a file may not lead out of. A run's checkpoints may lie on another disk."""
        if name.startswith(f"{CHECKPOINTS}/"):
            return self.path / CHECKPOINTS
        return self.path

    def read(self, name: str) -> bytes:
        path = self.at(name)
        with disk_errors("read", path):
            return read_whole(path, self.root_of(name))

    def open(self, name: str) -> BinaryIO:
        path = self.at(name)
        with disk_errors("read", path):
            if not path.is_file():  # a pipe counts as missing: reading it could block forever
                raise FileNotFoundError(path)
            return open_inside(path, self.root_of(name))

    def write(self, name: str, content: bytes) -> None:
        path = self.at(name)
        with disk_errors("write", path):
            self._make_parents(path)
            write_atomic(path, content)

    def _make_parents(self, path: Path) -> None:
        self.path.mkdir(PRIVATE, parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)

    def create(self, name: str, content: bytes) -> bool:
        path = self.at(name)
        with disk_errors("write", path):
            self._make_parents(path)
            # Callers try again with what they read, and a pipe is never read.
            with suppress(FileNotFoundError):
                check_regular(path, path.lstat())
            return create_atomic(path, content)

    def upload(self, name: str, path: Path) -> None:
        target = self.at(name)
        with disk_errors("write", target), path.open("rb") as file:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open_whole(target) as copy:
                shutil.copyfileobj(file, copy)

    def download(self, name: str, path: Path) -> None:
        with self.open(name) as file, path.open("wb") as copy:
            shutil.copyfileobj(file, copy)

    def head(self, name: str) -> Head | None:
        path = self.at(name)
        # Another process may remove it after is_file().
        with suppress(FileNotFoundError), disk_errors("read", path):
            if path.is_file():
                return head_of(path)
            return None
        return None

    def size(self, name: str) -> int | None:
        head = self.head(name)
        return head and head.size

    def remove(self, name: str) -> None:
        path = self.at(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise NotPermitted(f"cannot delete {path}: {error.strerror}") from error

    def names(self, prefix: str = "") -> list[str]:
        found = []
        for path in files_below(self.path / prefix.rpartition("/")[0]):
            name = path.relative_to(self.path).as_posix()
            if name.startswith(prefix) and not is_temporary(path) and path.is_file():
                found.append(name)
        return sorted(found)

    def listing(self, prefix: str = "") -> dict[str, Head]:
        found = {}
        for name in self.names(prefix):
            head = self.head(name)
            if head is not None:
                found[name] = head
        return found

    def names_here(self) -> set[str]:
        with disk_errors("list", self.path):
            if self.path.is_dir():
                return {path.name for path in self.path.iterdir()}
            return set()


def head_of(path: Path) -> Head:
    status = path.stat()
    return Head(status.st_size, f"{status.st_ino}-{status.st_mtime_ns}")


def files_below(top: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, except temporary files.

    A subfolder that another process removes meanwhile is skipped. Raises InputError if a folder cannot be read.
    """

    def stop(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise InputError(f"cannot list {error.filename}: {error.strerror}") from error

    for parent, names, files in os.walk(top, onerror=stop):
        names[:] = [name for name in names if not is_temporary(Path(name))]
        yield from (Path(parent, name) for name in files)


def is_full(error: Exception) -> bool:
    """Return whether an error says that a disk is full. Libraries written in Rust raise exceptions of other classes."""
    number = getattr(error, "errno", None)
    return number in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)


@contextmanager
def disk_errors(action: str, path: Path) -> Iterator[None]:
    """Raise each OSError of the block as InputError, except FileNotFoundError if `action` is "read"."""
    try:
        yield
    except OSError as error:
        if action == "read" and isinstance(error, FileNotFoundError):
            raise
        hint = ""
        if action == "write":
            hint = "; choose another folder"
            if is_full(error):
                hint = "; free some space or choose another folder"
        raise InputError(f"cannot {action} {path}: {error.strerror or error}{hint}") from error


def check_place(location: str) -> None:
    """Raise InputError if a path or URL contains control characters, or a variable that no shell has expanded."""
    check_printable(location)
    found = re.search(r"\$[A-Za-z_]\w*", location)
    if found:
        raise InputError(
            f"{location}: {found[0]} is not expanded here; let the shell expand it (no single quotes)"
        )


def local_path(location: str) -> Path:
    """Return a local path given by the user, with "~" expanded. Raises InputError if it is invalid or inaccessible."""
    check_place(location)
    is_url = "://" in location
    if is_url and not location.startswith("file://"):
        raise InputError(
            f"{location}: only local folders are supported here; copy it to this machine first"
        )
    # A path library may have turned "//" into "/".
    if not is_url and NO_URL.match(location):
        raise InputError(
            f"{location} is neither a URL (s3://bucket/name) nor a plain path; begin a local path with ./"
        )
    name = location.removeprefix("file://")
    check(name != "", "a path is empty (is a variable unset?); name a file or folder")
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # the user is unknown or has no home folder
        raise InputError(f"{location}: {error}; write the full path") from error
    # A relative path is checked together with the working folder.
    check_printable(str(path.absolute()))
    with disk_errors("open", path), suppress(FileNotFoundError, NotADirectoryError):
        path.stat()  # the caller may create a missing one
    return path


def make_folder(path: Path) -> Path:
    """Create `path`, private to this user, and its parents. Raises InputError if it cannot be written to."""
    try:
        path.mkdir(PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}; choose a folder of your own"
        ) from error
    check(
        os.access(path, os.W_OK | os.X_OK),
        f"cannot write to {path}: this user may not; choose a folder of your own",
    )
    return path


def check_space(folder: Path, num_bytes: int) -> None:
    """If the folder's disk lacks space for `num_bytes`, remove the folder and raise OSError."""
    needed_bytes = num_bytes * SPACE_FACTOR
    available_bytes = atomic_io.free_bytes(folder)
    if available_bytes < needed_bytes:
        discard(folder)
        text = f"{needed_bytes / 1e9:.3g} GB are needed, {available_bytes / 1e9:.3g} GB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {text}", str(folder.parent))


def at_once(
    action: Callable[[Item], Result], items: Iterable[Item], threads: int = AT_ONCE
) -> Generator[Result, None, None]:
    """Yield the result of `action` for each item, in order; several actions run at the same time.

    The first failure is raised. Actions that have not begun by then are cancelled.
    """
    pool = ThreadPoolExecutor(threads)
    try:
        yield from pool.map(action, items)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a folder in TMPDIR, which is removed when the block ends. Raises InputError if its disk fills up."""
    with tempfile.TemporaryDirectory(prefix="baretrain-", ignore_cleanup_errors=True) as folder:
        try:
            yield Path(folder)
        except Exception as error:
            if is_full(error):
                hint = "free some space, or set TMPDIR to another folder"
                raise InputError(f"{Path(folder).parent} is full; {hint}") from error
            raise


def sha256_file(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Return indented JSON. Equal values give equal bytes. Undecodable bytes of names become escapes of JSON."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode(
        errors="backslashreplace"
    )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file that this program wrote; None if it is missing."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
