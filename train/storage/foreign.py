"""The opener of files in folders that others may have written: a run, a model, a data set, a corpus.

Only regular files inside the folder are opened. A pipe could block for ever, opening a device can have effects, and a
link could lead to a private file of this machine. Importing this does not import torch.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from train.config import InputError, check

# of a file read as a whole: the largest tokenizer.json and the manifest of 100,000 shards fit
MOST_BYTES = 2**27
TRIES = 10  # to open a file that is replaced again and again
# a pipe in place of the file does not block
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK


def open_inside(path: Path, root: Path | None = None) -> BinaryIO:
    """Open a regular file for reading; with `root`, only if it lies in this folder after links are followed.

    The file is examined again once it is open, so nobody can exchange it in between; one that its writer has replaced
    meanwhile is opened again. Raises InputError if it is not such a file, and OSError if it cannot be opened.
    """
    for _ in range(TRIES):
        file = open_unless_exchanged(path, root)
        if file is not None:
            return file
    raise InputError(f"{path} was exchanged while it was opened; try again")


def open_unless_exchanged(path: Path, root: Path | None) -> BinaryIO | None:
    """Open a file as `open_inside` does; return None if another file has replaced it meanwhile."""
    check_regular(path, path.stat())
    file = os.fdopen(os.open(path, FLAGS), "rb")
    try:
        opened = os.fstat(file.fileno())
        check_regular(path, opened)
        if root is not None:
            target = Path(os.path.realpath(path))
            check_inside(path, root)
            if not os.path.samestat(opened, target.lstat()):
                file.close()
                return None
    except BaseException:
        file.close()
        raise
    return file


def read_whole(path: Path, root: Path | None = None, most: int = MOST_BYTES) -> bytes:
    """Return the content of a file that `open_inside` opens. Raises InputError if it has more than `most` bytes."""
    with open_inside(path, root) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        check_size(path, num_bytes, most)
        return file.read(num_bytes)


def check_size(name: object, num_bytes: int, most: int = MOST_BYTES) -> None:
    check(
        num_bytes <= most,
        f"{name} has more than {most:,} bytes, the limit for what is read as a whole",
    )


def check_regular(path: Path, status: os.stat_result) -> None:
    kinds = {
        stat.S_IFDIR: "folder",
        stat.S_IFIFO: "pipe",
        stat.S_IFSOCK: "socket",
        stat.S_IFLNK: "link",
    }
    kind = kinds.get(stat.S_IFMT(status.st_mode), "device")
    check(stat.S_ISREG(status.st_mode), f"cannot read {path}: it is a {kind}, not a regular file")


def is_inside(path: Path, root: Path) -> bool:
    """Return whether a path lies in a folder after links are followed."""
    top = Path(os.path.realpath(root))
    tops = [top]
    for parent in top.parents:
        # In the Hub's cache, a file of a snapshot is a link to a blob of the same repository.
        if parent.name == "snapshots":
            tops.append(parent.parent / "blobs")
    real = Path(os.path.realpath(path))
    return any(map(real.is_relative_to, tops))


def check_inside(path: Path, root: Path) -> None:
    check(
        is_inside(path, root),
        f"{path} is a link that leads out of {root}, so it is not read; put the file itself there, or name it",
    )


def check_folder(folder: Path, root: Path | None = None) -> None:
    """Check the files of a folder before a library opens them by name. Files in subfolders are not examined.

    Raises InputError unless all are regular files inside `root`, by default the folder itself.
    """
    for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        if not path.is_dir():
            check_regular(path, path.stat())
            check_inside(path, root or folder)
