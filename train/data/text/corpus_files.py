"""Local files as a corpus: plain text, JSON lines, CSV, Parquet. See corpus.py."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import IO

from train.config import FilesCorpusConfig, InputError, check
from train.config.prepare import paths_of
from train.data.files.errors import SURROGATE, BadRow, naming, unreadable
from train.data.files.rows import BATCH_ROWS, QUOTES, csv_rows, json_rows, open_parquet
from train.data.files.text import (
    LONGEST_LINE_CHARS,
    bounded_lines,
    check_encoding,
    is_seekable,
    open_text,
)
from train.data.text.documents import (
    OF_VALIDATION,
    WHOLE,
    CorpusPart,
    Document,
    Reading,
    check_column,
    clean,
    files_line,
    find_files,
    listing,
    readings,
    text_of,
)
from train.storage.folders import sha256_json

PART_BYTES = 16 * 2**20  # text that one process prepares at a time, a few seconds of work
# Text without separators is cut at the first line end after this, to limit memory.
MAX_DOCUMENT_CHARS = 2**24
# Prefixes of the Arrow types of text columns.
STRING_TYPES = (
    "string",
    "large_string",
    "dictionary<values=string",
    "dictionary<values=large_string",
)
BLANK = r"^\s*$"  # the default separator, which str.isspace tests faster
ENCODING = "corpus.encoding"
DECODING = f"{ENCODING} or corpus.errors=replace"  # what to change if a byte does not decode


class FilesCorpus(ABC):
    """Files that are read one after the other, in the order of their names.

    A part is a range of the bytes of all files; its documents are those that begin in the range. Files outside the
    range are not opened. Plain text and JSON lines are read from the first byte of the range, Parquet from the first
    row group in it. Three kinds of files must be read from their beginning: gzipped files, CSV, and text in an encoding
    whose line ends cannot be found from an arbitrary byte. Such a file belongs to the part in which it begins.
    """

    suffixes: tuple[str, ...]  # suffixes of the files that are read in a folder

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        self.cfg = cfg
        check_encoding(cfg.encoding, ENCODING)
        self.places = list(cfg.sources)
        self.found = [find_files(path, self.suffixes) for path in cfg.sources]
        self.pieces: list[tuple[Reading, Path]] = []
        for reading in readings(cfg.weights, cfg.sources):
            self.pieces += [(reading, path) for path in self.found[reading.corpus]]
        validation = []
        if cfg.validation is not None:
            validation = paths_of(cfg.validation)
        for place in validation:
            files = find_files(place, self.suffixes, "corpus.validation")
            self.places.append(place)
            self.found.append(files)
            self.pieces += [(OF_VALIDATION, path) for path in files]
        self.remarks = list(map(files_line, self.places, self.found))
        self.listings = [listing(files) for files in self.found]
        self.sizes: dict[Path, int] = {}
        for files, rows in zip(self.found, self.listings, strict=True):
            for path, (_, size, _) in zip(files, rows, strict=True):
                self.sizes[path] = size

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes[path] for _, path in self.pieces)

    @property
    def seekable(self) -> bool:
        return all(map(self.can_seek, self.sizes))

    def can_seek(self, path: Path) -> bool:
        return is_seekable(path, self.cfg.encoding)

    @property
    def most_parts(self) -> int:
        return max(1, self.total_bytes // PART_BYTES)

    def fingerprint(self) -> str:
        count = len(self.cfg.sources)
        return sha256_json([self.listings[:count], self.listings[count:]])

    def documents(self, part: CorpusPart = WHOLE) -> Iterator[Document]:
        return self.read_all(self.spans(part))

    def validation(self) -> Iterator[Document] | None:
        spans = [span for span in self.spans(WHOLE) if span[0].is_validation]
        if spans:
            return self.read_all(spans)
        return None

    def read_all(self, spans: Iterable[tuple[Reading, Path, int, int]]) -> Iterator[Document]:
        for reading, path, first, last in spans:
            before = first
            end = min(last, self.sizes[path])
            for raw, position in self.read(path, first, last):
                text = clean(raw)
                if text:
                    yield Document(text, max(0, min(position, end) - before), reading)
                    before = min(position, end)

    def spans(self, part: CorpusPart) -> Iterator[tuple[Reading, Path, int, int]]:
        """Yield each file of a part, with the part's bytes [first, last) in it. A file's end counts as one more byte.

        The second reading of a corpus follows the first, so that two copies of a document are far apart.
        """
        first, last = part.span(self.total_bytes + len(self.pieces))
        for reading, path in self.pieces:
            size = self.sizes[path] + 1
            if not self.can_seek(path):
                if first <= 0 < last:
                    yield reading, path, 0, size
            elif first < size and last > 0:
                yield reading, path, max(first, 0), min(last, size)
            first -= size
            last -= size

    @contextmanager
    def opened(
        self, path: Path, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[IO[str], Callable[[], int]]]:
        """Open the lines that begin in bytes [first, last) of a text file, with a counter of the bytes read."""
        errors = "surrogateescape" if self.cfg.errors == "strict" else self.cfg.errors
        opened = open_text(
            path,
            self.cfg.encoding,
            key=ENCODING,
            errors=errors,
            newline=None,
            first=first,
            last=last,
        )
        with opened as (text, raw):
            yield text, raw.tell

    @abstractmethod
    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        """Yield the texts that begin in bytes [first, last) of a file, each with the count of bytes read so far."""
        # For a file that cannot be read from an arbitrary byte, the range is always the whole file.


def name_of(path: Path, first: int) -> str:
    """Return the name of a file for errors, whose lines are counted from byte `first`."""
    if first:
        return f"{path}, after byte {first}"
    return str(path)


class TextFiles(FilesCorpus):
    """Text files in which a line that matches `separator` starts a new document and, if not blank, is part of it.

    Without a separator, every file is one document.
    """

    suffixes = (".txt", ".text", ".md", ".rst")

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        with naming(f"corpus.separator={cfg.separator} is not a regular expression", (re.error,)):
            if cfg.separator is None:
                self.separator = None
            else:
                self.separator = re.compile(cfg.separator)
        self.begins = str.isspace if cfg.separator == BLANK else self.matches
        super().__init__(cfg)

    def matches(self, line: str) -> bool:
        return self.separator is not None and self.separator.search(line.rstrip("\n")) is not None

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with self.opened(path, first, last) as (lines, position):
            part: list[str] = []
            num_chars = 0
            is_full = False
            for line in self.whole_documents(self.checked(lines, path, first), path, first, last):
                if self.begins(line) or (self.separator and is_full):
                    yield "".join(part), position()
                    part = []
                    num_chars = 0
                part.append(line)
                num_chars += len(line)
                is_full = num_chars > MAX_DOCUMENT_CHARS
            yield "".join(part), position()

    def whole_documents(
        self, lines: Iterator[str], path: Path, first: int, last: int
    ) -> Iterator[str]:
        """Yield the lines, except those of a document that began earlier, and complete the last document."""
        if first > 0:
            lines = dropwhile(self.continues, lines)
        is_empty = True
        for line in lines:
            is_empty = False
            yield line
        if not is_empty and last < self.sizes[path]:
            with self.opened(path, last) as (text, _):
                yield from takewhile(self.continues, self.checked(text, path, last))

    def continues(self, line: str) -> bool:
        return not self.begins(line)

    def checked(self, text: IO[str], path: Path, first: int) -> Iterator[str]:
        """Yield lines. Raises InputError on NUL and undecodable bytes."""
        name = name_of(path, first)
        for number, line in enumerate(bounded_lines(text, name, MAX_DOCUMENT_CHARS), 1):
            bad = unreadable(line, self.cfg.encoding, DECODING)
            check(bad is None, f"{name}:{number}: {bad}")
            yield line


class JsonLines(FilesCorpus):
    suffixes = (".jsonl", ".json")

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with self.opened(path, first, last) as (text, position):
            name = name_of(path, first)
            for number, row in json_rows(bounded_lines(text, name), self.cfg.encoding, DECODING):
                where = f"{name}:{number}"
                if isinstance(row, BadRow):
                    raise InputError(f"{where}: {row}")
                value = text_of(row, self.cfg.column, where)
                # A JSON escape can be half of a surrogate pair, which cannot be encoded and which tokenizers reject.
                if not value.isascii() and SURROGATE.search(value):
                    check(
                        self.cfg.errors == "replace",
                        f"{where}: half of a surrogate pair; set corpus.errors=replace",
                    )
                    value = SURROGATE.sub("\ufffd", value)
                yield value, position()


class Csv(FilesCorpus):
    suffixes = (".csv",)

    def can_seek(self, path: Path) -> bool:
        return False  # a field may contain line ends

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with self.opened(path) as (text, position):
            lines = bounded_lines(text, str(path))
            columns, rows = csv_rows(
                lines, str(path), self.cfg.encoding, DECODING, max_field_chars=LONGEST_LINE_CHARS
            )
            check_column(self.cfg.column, columns or [], f"{path}:1")
            for line, row in rows:
                if isinstance(row, BadRow):
                    raise InputError(f"{path}:{line}: {row}; {QUOTES}")
                yield row[self.cfg.column], position()


class Parquet(FilesCorpus):
    """Parquet files. A file's size is the uncompressed size of its text column. A null is an empty document."""

    suffixes = (".parquet",)

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        super().__init__(cfg)
        self.groups = {path: self.group_bytes(path) for path in self.sizes}
        self.sizes = {path: sum(sizes) for path, sizes in self.groups.items()}

    def can_seek(self, path: Path) -> bool:
        return True

    def group_bytes(self, path: Path) -> list[int]:
        """Return the uncompressed bytes of the text column in each row group.

        Raises InputError if the column is missing or not text.
        """
        name = self.cfg.column
        with open_parquet(path) as file:
            check_column(name, file.schema_arrow.names, str(path))
            kind = str(file.schema_arrow.field(name).type)
            check(
                kind.startswith(STRING_TYPES),
                f"{path}: column {name} is {kind}; set corpus.column to a text column",
            )
            sizes = [0] * file.metadata.num_row_groups
            for number in range(len(sizes)):
                group = file.metadata.row_group(number)
                for index in range(group.num_columns):
                    column = group.column(index)
                    if column.path_in_schema == name:
                        sizes[number] += column.total_uncompressed_size
        return sizes

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with open_parquet(path) as file:
            begin = 0
            for number, size in enumerate(self.groups[path]):
                if first <= begin < last:
                    batches = file.iter_batches(
                        BATCH_ROWS, row_groups=[number], columns=[self.cfg.column]
                    )
                    for batch in batches:
                        for text in batch.column(0).to_pylist():
                            yield text or "", begin + size
                begin += size
