"""What the sources of text have in common: documents, files found and opened, errors that name the place."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

from train.config import Failure, FilesCorpusConfig, InputError, check
from train.storage import local_path
from train.untrusted import BadContent

logger = logging.getLogger("train")

MAX_LINE_CHARS = 2**20  # a longer line of plain text comes in stretches, so that memory and time are bounded
STRETCH_CHARS = 2**16  # of such a line, at most
STRETCH = re.compile(rf".{{1,{STRETCH_CHARS}}}(?!\S)|.{{1,{STRETCH_CHARS}}}", re.DOTALL)  # ends before a blank

LIBRARY_ERRORS = (OSError, ValueError, RuntimeError)  # of datasets and pyarrow, for data that is bad or not there

SEEKABLE = ("utf-8", "ascii", "iso8859", "cp125")  # encodings


@dataclass(frozen=True)
class Document:
    text: str  # stripped, not empty, lines end in \n
    source_bytes: int  # input consumed since the document before, for progress


@dataclass(frozen=True)
class Part:
    """One of `count` parts of a corpus; `index` counts from 0, what users write from 1."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Of "3/64", which PrepareConfig has checked."""
        number, count = map(int, text.split("/"))
        return cls(number - 1, count)

    def __str__(self) -> str:
        return f"{self.index + 1}/{self.count}"

    def span(self, total: int) -> tuple[int, int]:
        """Which of `total` things are this part's: [first, last). The parts together are all, each once."""
        return total * self.index // self.count, total * (self.index + 1) // self.count

    def divided(self, count: int) -> list[Part]:
        """This part as `count` smaller ones."""
        return [Part(self.index * count + index, self.count * count) for index in range(count)]


WHOLE = Part()


def clean(text: str) -> str:
    return (re.sub(r"\r\n?", "\n", text) if "\r" in text else text).strip()


@contextmanager
def naming(what: str, errors: tuple[type[Exception], ...], hint: str = "") -> Iterator[None]:
    """Turn a library's error into one line that names what was read."""
    try:
        yield
    except BadContent as error:
        raise InputError(f"{what}: {error}{hint}") from None
    except (InputError, Failure):
        raise
    except errors as error:
        lines = str(getattr(error, "strerror", None) or error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{what}: {lines[0]}{hint}") from error


def check_column(column: str, columns: Iterable[str], place: str) -> None:
    if column not in columns:
        raise InputError(f"{place}: no column={column}; the columns are: {', '.join(columns) or '(none)'}")


def text_of(row: dict[str, Any], column: str, place: str) -> str:
    check_column(column, row, place)
    value = row[column]
    if not isinstance(value, str):
        raise InputError(f"{place}: column {column} holds {str(value)[:40]} ({type(value).__name__}), not a string")
    return value


def walk(folder: Path, skipped: tuple[str, ...] = ()) -> list[Path]:
    """Files below a folder that are not hidden, sorted; folders named in `skipped` left out."""
    return each_once(sorted(parent / name for parent, names in folders(folder, skipped) for name in names))


def folders(root: Path, skipped: tuple[str, ...] = ()) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those below it, each once, with the names of its files; nothing that is hidden.

    Links are followed after all that is really there; one to a folder that was read, or that holds the link, is not.
    """

    def stop(error: OSError) -> NoReturn:  # os.walk leaves out what it cannot read
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen: set[tuple[int, int]] = set()
    waiting = [root]
    for top in waiting:  # grows on the way
        if top != root and top.parent.resolve().is_relative_to(top.resolve()):
            report_left_out(top)
            continue
        for parent, names, files in os.walk(top, onerror=stop):
            path = Path(parent)
            found = path.stat()
            if (found.st_dev, found.st_ino) in seen:
                report_left_out(path)
                names.clear()
                continue
            seen.add((found.st_dev, found.st_ino))
            names[:] = [name for name in names if not name.startswith((".", "__pycache__")) and name not in skipped]
            waiting += [path / name for name in sorted(names) if (path / name).is_symlink()]
            yield path, [name for name in files if not name.startswith(".")]


def each_once(paths: list[Path]) -> list[Path]:
    """The same without links to files that are listed themselves."""
    links = {path for path in paths if path.is_symlink()}
    listed = {path.resolve() for path in paths if path not in links} if links else set()
    twice = {path for path in links if path.resolve() in listed}
    for path in sorted(twice):
        report_left_out(path)
    return [path for path in paths if path not in twice]


@cache  # a corpus is listed more than once
def report_left_out(link: Path) -> None:
    logger.warning("%s leads to what is read already, or to a folder that holds the link: left out", link)


def matching(pattern: str) -> list[Path]:
    """Files that a glob matches, sorted; ** stands for folders as `folders` gives them."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return each_once([path for path in map(Path, sorted(glob.glob(pattern))) if path.is_file()])  # noqa: PTH207
    place = parts.index("**")
    below = parts[place + 1 :] or ("*",)
    found: set[Path] = set()
    for top in filter(Path.is_dir, map(Path, glob.glob(str(Path(*parts[:place]))))):  # noqa: PTH207 (absolute patterns)
        for folder, _ in folders(top):
            found.update(matching(str(Path(glob.escape(str(folder)), *below))))
    return each_once(sorted(found))


def find_files(location: str, suffixes: tuple[str, ...]) -> list[Path]:
    """A file, the files of a folder with one of the suffixes (.gz may follow), or what a glob matches."""
    path = local_path(location)
    hint = ""
    with naming(f"corpus.path={location} cannot be read", (OSError,)):
        if path.is_dir():
            found = [item for item in walk(path) if item.name.lower().removesuffix(".gz").endswith(suffixes)]
            hint = f" that ends in {', '.join(suffixes)} or one of these and .gz"
        elif path.is_file():
            found = [path]
        else:
            found = matching(str(path))
    check(bool(found), f"corpus.path={location} matches no file{hint}; give a file, a folder or a glob")
    return found


def listing(paths: list[Path]) -> list[tuple[str, int, int]]:
    """Name, size and time (ns) of each file; names start at the common folder, so that a moved corpus is the same."""
    root = os.path.commonpath([path.parent for path in paths]) if paths else ""
    rows = []
    for path in paths:
        check(path.is_file(), f"{path} is not a regular file, or a link to nowhere; remove it")
        check(os.access(path, os.R_OK), f"{path} cannot be read: permission denied")
        rows.append((path.relative_to(root).as_posix(), path.stat().st_size, path.stat().st_mtime_ns))
    return rows


def seekable(path: Path, encoding: str) -> bool:
    """True if lines can be found from any byte on: not packed, and a byte 0x0a is a line end and nothing else."""
    return path.suffix.lower() != ".gz" and codecs.lookup(encoding).name.startswith(SEEKABLE)


@contextmanager
def opened(
    path: Path, cfg: FilesCorpusConfig, first: int = 0, last: int | None = None, *, in_stretches: bool = False
) -> Iterator[tuple[Iterator[str], Callable[[], int]]]:
    """Lines of a text file, gzipped or not, ending in \\n, and a function that gives the bytes of it read so far.

    Of a seekable file those lines that begin in bytes [first, last). Reading goes ahead by some KB; of a .gz,
    compressed bytes count. With `in_stretches` very long lines are cut, see `stretches`.
    """
    # utf-8-sig is utf-8 that drops a byte order mark.
    encoding = "utf-8-sig" if first == 0 and codecs.lookup(cfg.encoding).name == "utf-8" else cfg.encoding
    with naming(f"{path} cannot be read", (OSError, EOFError, zlib.error, UnicodeError)):
        try:
            with (
                path.open("rb") as raw,
                io.TextIOWrapper(windowed(raw, path, first, last), encoding=encoding, errors=cfg.errors) as text,
            ):
                yield lines_of(stretches(text) if in_stretches else text, path, first), raw.tell
        except UnicodeDecodeError as error:
            raise InputError(undecodable(path, cfg.encoding)) from error


def unpacked(raw: IO[bytes], path: Path) -> Any:
    return gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw


def windowed(raw: IO[bytes], path: Path, first: int, last: int | None) -> Any:
    end = None if last is None or last >= path.stat().st_size else line_start(raw, last)
    raw.seek(line_start(raw, first))
    return unpacked(raw, path) if end is None else Window(raw, end)


def line_start(raw: IO[bytes], place: int) -> int:
    """Where the first line begins that does so at byte `place` or behind it; the file's size if none does."""
    if place == 0:
        return 0
    position = raw.seek(place - 1)
    while chunk := raw.read(io.DEFAULT_BUFFER_SIZE):
        found = chunk.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(chunk)
    return position


class Window(io.RawIOBase):
    """A file that ends at byte `end`."""

    def __init__(self, raw: IO[bytes], end: int) -> None:
        self.raw, self.end = raw, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.raw.read(min(len(buffer), self.end - self.raw.tell()))
        buffer[: len(content)] = content
        return len(content)


def line_place(path: Path, first: int, number: int) -> str:
    """How an error names a line that was found from byte `first` on."""
    return f"{path}, line {number} from byte {first} on" if first else f"{path}:{number}"


def stretches(text: IO[str]) -> Iterator[str]:
    """Lines; one of MAX_LINE_CHARS or more is cut before blanks into stretches of at most STRETCH_CHARS."""
    while line := text.readline(MAX_LINE_CHARS):
        if len(line) < MAX_LINE_CHARS or line.endswith("\n"):
            yield line
            continue
        while len(line) == MAX_LINE_CHARS and not line.endswith("\n"):
            *ready, rest = STRETCH.findall(line)
            yield from ready
            line = rest + text.readline(MAX_LINE_CHARS - len(rest))
        yield from STRETCH.findall(line)


def lines_of(text: Iterable[str], path: Path, first: int) -> Iterator[str]:
    number, is_whole = 0, True
    for line in text:
        number += is_whole
        is_whole = line.endswith("\n")
        if "\0" in line:
            hint = "a binary file, or corpus.encoding is another (utf-16?)"
            raise InputError(f"{line_place(path, first, number)}: a NUL character, which no text has: {hint}")
        yield line


def undecodable(path: Path, encoding: str) -> str:
    """Say which byte of a file does not decode. A second look, because line readers know chunks, not places."""
    decoder = codecs.getincrementaldecoder(encoding)()
    before = 0
    with path.open("rb") as raw:
        stream = unpacked(raw, path)
        while True:
            chunk = stream.read(io.DEFAULT_BUFFER_SIZE)
            waiting = len(decoder.getstate()[0])  # the start of a character that the last chunk cut
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                place = f"byte {error.object[error.start]:#04x} at offset {before - waiting + error.start}"
                right = "corpus.encoding=latin-1 (or what it is) or corpus.errors=replace"
                return f"{path}: {place} is not {encoding}; set {right}"
            if not chunk:
                return f"{path} changed while it was read; start again"
            before += len(chunk)
