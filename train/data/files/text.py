"""Text files, plain or gzipped, read so that errors can name a byte that does not decode, and its line."""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from train.config import check
from train.data.files.errors import naming
from train.storage.foreign import open_inside

# A longer line is rejected: a gzip file of a megabyte can contain a line of a gigabyte.
LONGEST_LINE_CHARS = 2**27
START_CHARS = 2**16  # first characters, which show the line end, and how JSON is laid out
# Prefixes of encodings in which 0x0a is always a line end.
SEEKABLE = ("utf-8", "ascii", "iso8859", "cp125")


@contextmanager
def open_text(
    path: Path,
    encoding: str,
    *,
    key: str = "data.encoding",
    errors: str = "surrogateescape",
    newline: str | None = "\n",
    first: int = 0,
    last: int | None = None,
) -> Iterator[tuple[io.TextIOWrapper, IO[bytes]]]:
    """Yield a file opened as text, and the underlying binary file, whose position in a .gz counts compressed bytes.

    `key`: the setting that chooses the encoding, named in errors. `errors`: see `open`; by default, bytes that do not
    decode become surrogates, which `unreadable` finds. `first`, `last`: read only the lines that begin in bytes
    [first, last) of a seekable file.

    Raises InputError if the file cannot be opened or read.
    """
    check_encoding(encoding, key)
    if codecs.lookup(encoding).name == "utf-8" and first == 0:
        encoding = "utf-8-sig"  # this drops a byte order mark
    with (
        naming(f"{path} cannot be read", (OSError, EOFError, zlib.error)),
        naming(f"{path} cannot be read", (UnicodeError,), f"; is {key} right?"),
        open_inside(path) as raw,
        io.TextIOWrapper(
            window(raw, path, first, last),
            encoding=encoding,
            errors=errors,
            newline=newline,
        ) as text,
    ):
        yield text, raw


def start_of(path: Path, encoding: str) -> str:
    """Return the first characters of a file."""
    with open_text(path, encoding) as (text, _):
        return text.read(START_CHARS)


def line_end_of(start: str) -> str:
    """Return how lines end in a text that begins so: in a carriage return alone, as in old files of Macs, or not."""
    if "\r" in start and "\n" not in start:
        return "\r"
    return "\n"


def check_encoding(encoding: str, key: str) -> None:
    """Raise InputError if an encoding is unknown, or is not for text. `key`: the setting that chooses it."""
    with naming(f"{key}={encoding} cannot be used (try utf-8 or latin-1)", (LookupError,)):
        io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def is_packed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def is_seekable(path: Path, encoding: str) -> bool:
    """Return whether reading can start at any byte: the file is not gzipped, and 0x0a is always a line end."""
    return not is_packed(path) and codecs.lookup(encoding).name.startswith(SEEKABLE)


def window(raw: IO[bytes], path: Path, first: int, last: int | None) -> Any:
    if last is None or last >= path.stat().st_size:
        end = None
    else:
        end = line_start(raw, last)
    raw.seek(line_start(raw, first))
    if end is not None:
        return BoundedFile(raw, end)
    if is_packed(path):
        return gzip.GzipFile(fileobj=raw)
    return raw


def line_start(raw: IO[bytes], offset: int) -> int:
    """Return the start of the first line that begins at byte `offset` or later; the file's size if there is none."""
    if offset == 0:
        return 0
    position = raw.seek(offset - 1)
    while chunk := raw.read(io.DEFAULT_BUFFER_SIZE):
        line_end = chunk.find(b"\n")
        if line_end >= 0:
            return position + line_end + 1
        position += len(chunk)
    return position


class BoundedFile(io.RawIOBase):
    """A view of a file up to byte `end`."""

    def __init__(self, raw: IO[bytes], end: int) -> None:
        self.raw, self.end = raw, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self.raw.read(min(len(buffer), self.end - self.raw.tell()))
        buffer[: len(content)] = content
        return len(content)


def bounded_lines(text: IO[str], name: str, most: int | None = None) -> Iterator[str]:
    """Yield lines. Raises InputError if one is longer than `most`, or LONGEST_LINE_CHARS, without reading all of it."""
    most = most or LONGEST_LINE_CHARS
    number = 0
    while line := text.readline(most + 1):
        number += 1
        check(
            len(line) <= most,
            f"{name}:{number}: a line of more than {most:,} characters, which is the limit; are line ends missing "
            "(fold -s)?",
        )
        yield line


def bounded_text(text: IO[str], name: str, cure: str) -> str:
    """Return a whole text. Raises InputError, without reading all of it, if it exceeds LONGEST_LINE_CHARS."""
    content = text.read(LONGEST_LINE_CHARS + 1)
    check(
        len(content) <= LONGEST_LINE_CHARS,
        f"{name}: more than {LONGEST_LINE_CHARS:,} characters, which is the limit for a file read as a whole; {cure}",
    )
    return content
