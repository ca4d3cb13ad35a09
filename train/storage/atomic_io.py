"""Functions that write a file or folder completely or not at all, even if the process is killed or the power fails.

A file or folder is made under a temporary name next to its final name, synced, and renamed. If a file cannot be
removed, a warning is logged and no error is raised.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

logger = logging.getLogger("train")
TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9a-f]{32}")  # 38 bytes longer than the final name
# errors of rename() if the new name is taken
TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# errors of link() on SMB, exFAT and gcsfuse
LINKLESS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# errors of fsync() for folders on such disks
UNSYNCED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
# errors of unlink() if there is nothing to remove
MISSING = (FileNotFoundError, NotADirectoryError)
said = set[object]()  # keys of the warnings that this process has logged


def temporary_for(path: Path) -> Path:
    """Return a name next to `path` that no other thread, process or machine uses."""
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex}")


def is_temporary(path: Path) -> bool:
    return TEMPORARY.fullmatch(path.name) is not None


def remove_temporaries(folder: Path, name: str, *, dry: bool = False) -> list[str]:
    """Remove the temporary files and folders that killed processes left, if their final names match the regex `name`.

    The caller must know that no process is still writing them. Returns the names that were removed or, with `dry`,
    would be removed.
    """
    matches = [
        match for path in folder.glob(".*.tmp-*") if (match := TEMPORARY.fullmatch(path.name))
    ]
    names = sorted(match[0] for match in matches if re.fullmatch(name, match[1]))
    for each in [] if dry else names:
        discard(folder / each)
    return [each for each in names if dry or not (folder / each).exists()]


def discard(path: Path) -> None:
    """Remove a file, or a folder with its contents, that is no longer needed."""
    # Files that are open on NFS, or that belong to another user, cannot be removed. One warning is then logged.
    failures = list[OSError]()

    def remember(_function: object, _path: str, info: Any) -> None:
        if not isinstance(info[1], MISSING):
            failures.append(info[1])

    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=remember)
    else:
        try:
            with suppress(*MISSING):
                path.unlink()
        except OSError as error:
            failures.append(error)
    # on a read-only disk, removing a missing file fails too
    if failures and os.path.lexists(path):
        text = f"{path} cannot be removed: {failures[0].strerror}; it is no longer needed"
        warn_once((path.parent, failures[0].errno), text)


def warn_once(key: object, text: str) -> None:
    if key not in said:
        said.add(key)
        logger.warning("%s", text)


def free_bytes(folder: Path) -> float:
    """Return the free bytes on a folder's disk; infinity if its file system does not count blocks, as with FUSE."""
    usage = shutil.disk_usage(folder)
    return usage.free if usage.total else math.inf


# ---- files ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_whole(
    path: Path, *, publish: Callable[[Path, Path], None] = os.replace
) -> Iterator[BinaryIO]:
    """Open a new file. When the block ends, `publish` renames it to `path`; if the block fails, the file is removed."""
    temporary = temporary_for(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    finally:
        discard(temporary)
    sync(path.parent)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file. After a crash, the file has either its old or its new content."""
    with open_whole(path) as file:
        file.write(content)


def create_atomic(path: Path, content: bytes) -> bool:
    """Write a whole file unless it exists. Returns whether it was written: only one of several writers gets True."""
    try:
        with open_whole(path, publish=link) as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def link(temporary: Path, path: Path) -> None:
    """Give a temporary file its final name.

    Unlike os.replace, this raises FileExistsError if the name is taken. On a disk without hard links, an empty file of
    that name is created first, and readers may see it briefly.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in LINKLESS:
            raise
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        temporary.replace(path)


def sync(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk: a rename changes the folder, not the file."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in UNSYNCED or not path.is_dir():
            raise
        text = "its disk cannot sync folders, so a power failure may lose the newest files"
        warn_once("fsync", f"{path}: {text} ({error.strerror})")


# ---- folders -------------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(path: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yield an empty folder, which is renamed to `path` when the block ends. If the block fails, it is removed.

    Raises FileExistsError if `path` exists at the end of the block, unless `replaces` is set.
    """
    temporary = begin_folder(path)
    try:
        yield temporary
        sync_tree(temporary)
        publish_folder(temporary, path, replaces=replaces)
    finally:
        discard(temporary)


def begin_folder(path: Path) -> Path:
    """Make an empty folder next to `path`, and any missing parents. `publish_folder` renames it later."""
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        sync(path.parent.parent)
    temporary = temporary_for(path)
    temporary.mkdir()
    return temporary


def publish_folder(temporary: Path, path: Path, *, replaces: bool = False) -> None:
    """Give a folder from `begin_folder` its final name. All files in it must already be synced.

    Raises FileNotFoundError if somebody has removed the folder, and FileExistsError if `path` exists, unless `replaces`
    is set.
    """
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno not in TAKEN:
            raise
        if not replaces:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        remove_folder(path, instead=temporary)
    sync(path.parent)


def remove_folder(path: Path, *, instead: Path | None = None) -> None:
    """Remove a folder. Other processes see it disappear in one step. The folder `instead`, if given, takes its name.

    A folder that this user may not write to is kept, with a warning, since somebody may have protected it.
    """
    if instead is None and not os.access(path, os.W_OK | os.X_OK):
        warn_once(path, f"{path} is not removed: this user may not write to it")
        return
    doomed = temporary_for(path)
    path.rename(doomed)
    if instead is not None:
        instead.rename(path)
    sync(path.parent)  # otherwise the name could reappear after a power failure, without its files
    discard(doomed)


def sync_tree(folder: Path) -> None:
    """Sync a folder and everything in it."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def made_once(
    path: Path, make: Callable[[Path], object], *, is_whole: Callable[[Path], bool] = Path.is_dir
) -> Path:
    """Return the folder `path`. If it is not whole, one process fills it with `make`, and other processes wait."""
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_whole(path):
            remove_temporaries(path.parent, re.escape(path.name))
            with new_folder(path, replaces=True) as folder:
                make(folder)
    return path
