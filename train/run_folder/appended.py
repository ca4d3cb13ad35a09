"""Files to which a run appends, as stored in S3: the file NAME contains the newest lines, and parts the older ones.

    metrics.jsonl                   NAME
    metrics/00000002-000001.jsonl   a part: lease number of its writer, number of the part

When NAME grows beyond PART_BYTES, its older lines move to a part, which never changes. NAME then begins with a line
that counts the parts. NAME is written after the parts, so a reader always finds each line exactly once. A part that
NAME does not count was left by a job that was killed between the two writes, or that lost the folder; its lines are
still in NAME. Importing this does not import torch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from train.config import InputError
from train.storage.atomic_io import open_alike, open_whole
from train.storage.folders import Folder
from train.storage.foreign import check_size
from train.storage.schema import BadContent, FileName, of_type, read_object

# size of a part, and the most that a save uploads, unless more was written since the previous save
PART_BYTES = 2**18
MAX_PARTS = 10**6  # maximum number of parts, whose names fit in memory
BLOCK_BYTES = 2**16  # bytes read at a time when reading backwards
MOST_LINE_BYTES = 2**24  # a usual line has some hundred bytes
MARK = b'{"kind": "parts", '


@dataclass(frozen=True)
class Parts:
    """The parts of a file, in the order of their lines."""

    # number of parts by writer (8 digits of its lease number)
    counts: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0  # bytes of all parts together

    @property
    def head(self) -> bytes:
        """The first line of a file NAME that follows these parts; empty without parts."""
        values = {"kind": "parts", "parts": self.counts, "bytes": self.num_bytes}
        return json.dumps(values).encode() + b"\n" if self.counts else b""

    def names(self, name: str) -> list[str]:
        return [
            of(name, writer, part)
            for writer, count in self.counts.items()
            for part in range(1, count + 1)
        ]

    def next_of(self, writer: str, num_bytes: int) -> tuple[str, int, Parts]:
        """Return the next part's writer and number, and all parts including it. Parts' lease numbers never decrease."""
        writer = max([writer, *self.counts])
        number = self.counts.get(writer, 0) + 1
        return writer, number, Parts({**self.counts, writer: number}, self.num_bytes + num_bytes)


def of(name: str, writer: str, number: int) -> str:
    """Return the name of a part of the file `name`."""
    stem, _, suffix = name.rpartition(".")
    return f"{stem}/{writer}-{number:06d}.{suffix}"


def read_head(file: BinaryIO, where: str) -> Parts:
    """Return the parts that line 1 of a file counts, if it counts any. Raises BadContent if it is damaged."""
    if file.read(len(MARK)) != MARK:
        file.seek(0)
        return Parts()
    try:
        head = read_object(MARK + file.readline())
        counts = of_type(dict[FileName, int], head.get("parts"), "parts")
        if sum(counts.values()) > MAX_PARTS:
            raise BadContent(f"{sum(counts.values())} parts, more than {MAX_PARTS}")
        return Parts(counts, of_type(int, head.get("bytes"), "bytes"))
    except BadContent as error:
        text = "it should count the parts that precede this file"
        raise BadContent(f"{where} line 1 is damaged: {text} ({error})") from error


def open_part(folder: Folder, name: str) -> BinaryIO:
    """Open a part. Raises InputError if it is missing."""
    try:
        return folder.open(name)
    except FileNotFoundError as error:
        raise InputError(
            f"{folder.location}/{name} is missing: it contained older lines of the run"
        ) from error


def rows(folder: Folder, name: str) -> Iterator[bytes]:
    """Yield the lines of a file and its parts, oldest first. Raises FileNotFoundError if the file is missing."""
    with folder.open(name) as newest:
        for part in read_head(newest, f"{folder.location}/{name}").names(name):
            with open_part(folder, part) as file:
                yield from whole_lines(file, name)
        yield from whole_lines(newest, name)


def whole_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield lines without their ends. Raises InputError if one is too long, without reading all of it."""
    while line := file.readline(MOST_LINE_BYTES + 1):
        check_size(f"a line of {name}", len(line), MOST_LINE_BYTES)
        yield line.rstrip(b"\n")


def rows_back(folder: Folder, name: str) -> Iterator[bytes]:
    """Yield the lines that `rows` yields, newest first. Blocks are read only as needed."""
    with folder.open(name) as newest:
        parts = read_head(newest, f"{folder.location}/{name}").names(name)
        yield from back(newest, newest.tell())
    for part in reversed(parts):
        with open_part(folder, part) as file:
            yield from back(file, 0)


def back(file: BinaryIO, first: int) -> Iterator[bytes]:
    """Yield the lines after byte `first`, newest first. The line yielded first is empty or half written."""
    pieces: list[bytes] = []
    end = file.seek(0, 2)
    while end > first:
        begin = max(first, end - BLOCK_BYTES)
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


class Appender:
    """A file on this machine to which threads append lines. Lines that the disk does not take now are kept in memory.

    The disk may have taken half a line, which the next write continues.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.kept, self.lock = path, bytearray(), threading.Lock()
        self.file: BinaryIO | None = None

    def append(self, lines: bytes = b"") -> None:
        """Append the lines that were kept, and `lines`. Raises OSError if some of them are still kept."""
        with self.lock:
            self.kept += lines
            try:
                while self.kept:
                    self.file = self.file or open_alike(self.path, "ab", buffering=0)
                    del self.kept[: self.file.write(self.kept)]
            except OSError:
                self.close()  # its handle may be stale
                raise

    def close(self) -> None:
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
            self.file = None


class Mirrored:
    """A growing file on this machine, and its copy in S3."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name, self.parts = path, name, Parts()

    def upload(self, folder: Folder, replace: Callable[[str, bytes], None], writer: str) -> None:
        """Write new parts to `folder`, and newer lines with `replace`. The last line may be half written."""
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(self.parts.num_bytes)
            while True:
                content = file.read(PART_BYTES)
                content += file.readline()
                if file.tell() >= size:  # these are the newest lines; NAME always has at least one
                    break
                name, number, parts = self.parts.next_of(writer, len(content))
                folder.write(of(self.name, name, number), content)
                self.parts = parts
            file.seek(self.parts.num_bytes)
            replace(self.name, self.parts.head + file.read())

    def download(self, folder: Folder) -> None:
        """Copy the file from S3.

        A local copy is kept if it begins with all complete lines of the file in S3. If it does not, the run has since
        continued on another machine, or was removed from S3 for a new run.
        """
        self.parts = Parts()
        try:
            newest = folder.open(self.name)
        except FileNotFoundError:
            self.path.unlink(missing_ok=True)
            return
        with newest:
            self.parts = read_head(newest, f"{folder.location}/{self.name}")
            content = newest.read()
        whole = content[: content.rfind(b"\n") + 1]
        if self.path.is_file() and (whole or not self.parts.counts):
            with self.path.open("rb") as file:
                file.seek(self.parts.num_bytes)
                if file.read(len(whole)) == whole:
                    return
        with open_whole(self.path) as file:
            for name in self.parts.names(self.name):
                with open_part(folder, name) as part:
                    file.write(part.read())
            self.parts = Parts(self.parts.counts, file.tell())
            file.write(content)
