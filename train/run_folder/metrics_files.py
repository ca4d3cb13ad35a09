"""The files with a run's metrics lines, and their readers from either end. Importing this does not import torch.

    metrics.jsonl            on disk: the lines of all attempts
    metrics/00000003.jsonl   in S3: the lines of one attempt, under its lease number; each save writes the file anew

A folder that was copied from a disk to S3 or back may have both. The lines of metrics.jsonl are then the oldest.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from train.storage.folders import Folder
from train.storage.foreign import check_size

NAME = "metrics.jsonl"
FOLDER = "metrics/"
OF_ATTEMPT = re.compile(r"metrics/(\d{8,18})\.jsonl")
BLOCK_BYTES = 2**16  # bytes read at a time when reading backwards
MOST_LINE_BYTES = 2**24  # a usual line has some hundred bytes


def files_of(folder: Folder) -> list[str]:
    """Return the names of the files with a run's lines, oldest first."""
    names = [name for name in folder.names(FOLDER) if OF_ATTEMPT.fullmatch(name)]
    if folder.size(NAME) is not None:
        names.insert(0, NAME)
    return names


def next_file(folder: Folder, lease: int) -> str:
    """Return the name of a new file for the owner with this lease number. It follows all other files."""
    number = lease
    for name in folder.names(FOLDER):
        match = OF_ATTEMPT.fullmatch(name)
        if match:
            number = max(number, int(match[1]) + 1)
    return f"{FOLDER}{number:08d}.jsonl"


def rows(folder: Folder) -> Iterator[bytes]:
    """Yield the lines of a run without their ends, oldest first."""
    for name in files_of(folder):
        with folder.open(name) as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                check_size(f"a line of {name}", len(line), MOST_LINE_BYTES)
                yield line.rstrip(b"\n")


def rows_back(folder: Folder, limit_bytes: float = math.inf) -> Iterator[bytes]:
    """Yield the lines in the last `limit_bytes` of a run, newest first. Disks are read only as far as needed."""
    left = limit_bytes
    for name in reversed(files_of(folder)):
        with folder.open(name) as file:
            for row in back(file):
                left -= len(row) + 1
                if left < 0:
                    return
                yield row


def back(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, newest first. The line yielded first is empty or half written."""
    pieces: list[bytes] = []
    end = file.seek(0, 2)
    while end > 0:
        begin = max(0, end - BLOCK_BYTES)
        file.seek(begin)
        piece, *whole = file.read(end - begin).split(b"\n")
        if whole:
            yield whole[-1] + b"".join(reversed(pieces))
            yield from reversed(whole[:-1])
            pieces = []
        pieces.append(piece)
        check_size("a line", len(pieces) * BLOCK_BYTES, MOST_LINE_BYTES)
        end = begin
    yield b"".join(reversed(pieces))


def cut_half_written_line(path: Path) -> None:
    """Cut off a file's last line if a killed process left it half written."""
    with path.open("rb+") as file:
        half = next(back(file))
        file.truncate(file.seek(0, 2) - len(half))


class Appender:
    """A file on this machine to which threads append lines. Lines that the disk does not take now are kept in memory.

    The disk may have taken half a line, which the next write continues.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kept = bytearray()
        self.lock = threading.Lock()
        self.file: BinaryIO | None = None

    def append(self, lines: bytes = b"") -> None:
        """Append the lines that were kept, and `lines`. Raises OSError if some of them are still kept."""
        with self.lock:
            self.kept += lines
            try:
                while self.kept:
                    self.file = self.file or self.path.open("ab", buffering=0)
                    del self.kept[: self.file.write(self.kept)]
            except OSError:
                self.close()  # its handle may be stale
                raise

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
            self.file = None
