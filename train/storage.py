"""Folders that hold a run's or a data set's files, on this machine or in S3. A file is either whole or not there.

On disk every write goes to a temporary name, is synced, and renamed; S3 shows an object when all of it has arrived.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tenacity import RetryCallState, Retrying, retry, retry_if_exception_type, stop_after_attempt, wait_fixed

from train.config import InputError, S3Config
from train.launched import is_first
from train.untrusted import RelativePath

logger = logging.getLogger("train")
Answer = TypeVar("Answer")
CHUNK_BYTES = 2**20  # read at once to be hashed
MAX_NAME_BYTES, MAX_PATH_BYTES = 255, 4096  # of Linux: NAME_MAX, PATH_MAX
READS = 3  # of what does not match its checksum, before it counts as damaged: a bit may have changed on the way only
MISSING_S, MISSING_PAUSE_S = 10.0, 2.0  # a file that must be in S3 is asked for again: a copy may be on its way
TEMPORARY_GLOB = ".*.tmp-*"  # files that are not whole yet


class Mismatch(InputError):
    """What was read is not what its checksum promises."""


read_again = retry(retry=retry_if_exception_type(Mismatch), stop=stop_after_attempt(READS), reraise=True)


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
        """Files whose names begin with `prefix`, in order, those in subfolders too. In S3 anybody may name an object
        anything: those that are no RelativePath are left out.
        """

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


def wait_for_file(folder: Folder, name: str, ask: Callable[[str], Answer], *, until_s: float | None = None) -> Answer:
    """What `ask` gives for a file that must be there. If it raises FileNotFoundError for one in S3 it is called again,
    until MISSING_S have passed, or until a time of time.monotonic().
    """
    if isinstance(folder, LocalFolder):
        return ask(name)
    until_s = time.monotonic() + MISSING_S if until_s is None else until_s

    def say(state: RetryCallState) -> None:
        if state.attempt_number == 1:
            level = logging.WARNING if is_first() else logging.DEBUG
            logger.log(level, "%s/%s is missing; asked again for %g s", folder.location, name, MISSING_S)

    return Retrying(
        retry=retry_if_exception_type(FileNotFoundError),
        stop=lambda _: time.monotonic() >= until_s,
        wait=wait_fixed(MISSING_PAUSE_S),
        before_sleep=say,
        reraise=True,
    )(ask, name)


class LocalFolder:
    def __init__(self, path: Path) -> None:
        self.path, self.location = path, str(path)

    def at(self, name: str) -> Path:
        """The path of a file. BadContent for a name that would lead out of the folder."""
        return self.path / RelativePath(name)

    def read(self, name: str) -> bytes:
        path = self.at(name)
        with telling("read", path):
            return path.read_bytes()

    def write(self, name: str, content: bytes) -> None:
        path = self.at(name)
        with telling("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)

    def create(self, name: str, content: bytes) -> bool:
        path = self.at(name)
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
        path = self.at(name)
        return path.stat().st_size if path.is_file() else None

    def remove(self, name: str) -> None:
        path = self.at(name)
        with telling("delete", path):
            path.unlink(missing_ok=True)

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
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = f"; {'free some space or ' if is_full else ''}choose another folder" if verb == "write" else ""
        raise InputError(f"cannot {verb} {path}: {error.strerror}{hint}") from error


def local_path(location: str) -> Path:
    """The path of a folder given by the user, where only local ones will do; "~" is home, in quotes too."""
    if "://" in location and not location.startswith("file://"):
        raise InputError(f"{location}: only local folders are supported here; copy it to this machine first")
    if not location.removeprefix("file://"):
        raise InputError("a path is empty (a variable that is not set?); name a file or folder")
    try:
        path = Path(location.removeprefix("file://")).expanduser()
    except RuntimeError as error:  # no such user, or one without a home
        raise InputError(f"{location}: {error}; write the folder out") from error
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


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder in TMPDIR for what comes and goes. InputError if there is no room for it, or it fills the disk."""
    hint = "free some space, or set TMPDIR to another folder"
    try:
        temporary = tempfile.TemporaryDirectory(prefix="baretrain-")
    except OSError as error:
        raise InputError(f"no temporary folder can be made: {error.strerror}; {hint}") from error
    with temporary as folder:
        try:
            yield Path(folder)
        except InputError:
            raise
        except Exception as error:  # libraries written in Rust raise plain ones
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error):
                raise InputError(f"{Path(folder).parent} is full; {hint}") from error
            raise


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
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))  # one buffer: new memory costs page faults
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sha256_bytes(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def canonical_json(value: Any) -> bytes:
    """The same bytes for the same value, readable."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """A JSON file that this program wrote; None if there is none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
