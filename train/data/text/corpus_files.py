"""Local files as a corpus: plain text, JSON lines, CSV, Parquet. See corpus.py."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, dropwhile, islice, takewhile
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
    check_length,
    is_seekable,
    open_text,
    stretches,
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
# text without separators is cut at the first line end after this, to limit memory
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
# the settings to change if a byte does not decode
DECODING = f"{ENCODING} or corpus.errors=replace"


class FilesCorpus(ABC):
    """Files that are read one after the other, in the order of their names.

    A part is a range of the bytes of all files; its documents are those that begin in the range. Files outside the
    range are not opened. Plain text and JSON lines are read from the first byte of the range, Parquet from the row
    group at that byte. Three kinds of files must be read from their beginning: gzipped files, CSV, and text in an
    encoding whose line ends cannot be found from an arbitrary byte. Such a file belongs to the part in which it begins.
    If it is longer than a part, however, several parts read it, and each skips the documents of the others.
    """

    suffixes: tuple[str, ...]  # suffixes of the files that are read in a folder

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        self.cfg = cfg
        check_encoding(cfg.encoding, ENCODING)
        found = [find_files(path, self.suffixes) for path in cfg.sources]
        self.pieces = [
            (each, path)
            for each in readings(cfg.weights, cfg.sources)
            for path in found[each.corpus]
        ]
        for path in [] if cfg.validation is None else paths_of(cfg.validation):
            found.append(find_files(path, self.suffixes, "corpus.validation"))
            self.pieces += [(OF_VALIDATION, file) for file in found[-1]]
        self.found, self.listings = found, list(map(listing, found))
        sizes = (size for rows in self.listings for _, size, _ in rows)
        self.sizes = dict(zip(chain(*found), sizes, strict=True))

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
        sizes = [self.read_at_once(path) for path in self.sizes]
        return max(1, (self.total_bytes + len(self.pieces)) // max(PART_BYTES, *sizes))

    def read_at_once(self, path: Path) -> int:
        """Return the bytes of a file's largest unit that must be read from its start; 0 if any byte can be a start."""
        return 0 if self.can_seek(path) else self.sizes[path] + 1

    def fingerprint(self) -> str:
        count = len(self.cfg.sources)
        corpora, validation = self.listings[:count], self.listings[count:]
        return sha256_json(
            [corpora, validation] if validation else corpora if count > 1 else corpora[0]
        )

    def remarks(self) -> Iterable[str]:
        given = [
            *self.cfg.sources,
            *([] if self.cfg.validation is None else paths_of(self.cfg.validation)),
        ]
        why = f"corpus={self.cfg.kind} reads {', '.join(self.suffixes)}"
        return [files_line(*pair, why) for pair in zip(given, self.found, strict=True)]

    def documents(self, part: CorpusPart = WHOLE) -> Iterator[Document]:
        return self.read_all(self.spans(part))

    def validation(self) -> Iterator[Document] | None:
        whole = [
            (each, path, 0, self.sizes[path] + 1)
            for each, path in self.pieces
            if each.is_validation
        ]
        return self.read_all(whole) if whole else None

    def read_all(self, spans: Iterable[tuple[Reading, Path, int, int]]) -> Iterator[Document]:
        for reading, path, first, last in spans:
            before = first
            end = min(last, self.sizes[path])
            if self.can_seek(path):
                texts = self.read(path, first, last)
            else:
                texts = beginning_in(self.read(path, 0, self.sizes[path] + 1), first, last)
            for raw, position in texts:
                text = clean(raw)
                if text and reading.has(text):
                    yield Document(text, max(0, min(position, end) - before), reading)
                    before = min(position, end)

    def spans(self, part: CorpusPart) -> Iterator[tuple[Reading, Path, int, int]]:
        """Yield each file of a part, with the part's bytes [first, last) in it. A file's end counts as one more byte.

        The second reading of a corpus follows the first, so that two copies of a document are far apart.
        """
        total = self.total_bytes + len(self.pieces)
        first, last = part.span(total)
        for reading, path in self.pieces:
            size = self.sizes[path]
            if self.can_seek(path) or (size + 1) * part.count > total:
                if first <= size and last > 0:
                    yield reading, path, max(first, 0), min(last, size + 1)
            elif first <= 0 < last:
                yield reading, path, 0, size + 1
            first, last = first - size - 1, last - size - 1

    @contextmanager
    def opened(
        self, path: Path, first: int = 0, last: int | None = None
    ) -> Iterator[tuple[IO[str], Callable[[], int]]]:
        """Open the lines that begin in bytes [first, last) of a text file, with a counter of the bytes read."""
        errors = "surrogateescape" if self.cfg.errors == "strict" else self.cfg.errors
        with open_text(
            path,
            self.cfg.encoding,
            key=ENCODING,
            errors=errors,
            newline=None,
            first=first,
            last=last,
        ) as (
            text,
            raw,
        ):
            yield text, raw.tell

    @abstractmethod
    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        """Yield the texts that begin in bytes [first, last) of a file, each with the count of bytes read so far."""
        # For a file that cannot be read from an arbitrary byte, the range is always the whole file.


def line_name(path: Path, first: int, number: int) -> str:
    """Return the name of a line for errors. `number` counts lines from byte `first`."""
    return f"{path}, line {number} after byte {first}" if first else f"{path}:{number}"


def beginning_in(
    texts: Iterable[tuple[str, int]], first: int, last: int
) -> Iterator[tuple[str, int]]:
    """Yield the texts of a file that begin in bytes [first, last). Each begins where the previous one ended."""
    begin = 0
    for text, position in texts:
        if begin >= last:
            return
        if begin >= first:
            yield text, position
        begin = position


class TextFiles(FilesCorpus):
    """Text files in which a line that matches `separator` starts a new document and, if not blank, is part of it.

    A very long line is read in stretches (see `stretches`). The separator is tested on each stretch, and each stretch
    ends a document. Without a separator, every file is one document.
    """

    suffixes = (".txt", ".text", ".md", ".rst")

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        with naming(f"corpus.separator={cfg.separator} is not a regular expression", (re.error,)):
            self.separator = None if cfg.separator is None else re.compile(cfg.separator)
        self.begins = str.isspace if cfg.separator == BLANK else self.matches
        super().__init__(cfg)

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with self.opened(path, first, last) as (lines, position):
            part: list[str] = []
            size, is_cut = 0, False
            for line in self.whole_documents(self.checked(lines, path, first), path, first, last):
                if self.begins(line) or (self.separator and (is_cut or size > MAX_DOCUMENT_CHARS)):
                    yield "".join(part), position()
                    part, size = [], 0
                part.append(line)
                size += len(line)
                # a very long line: each stretch of it ends a document
                is_cut = not line.endswith("\n")
            yield "".join(part), position()

    def whole_documents(
        self, lines: Iterator[str], path: Path, first: int, last: int
    ) -> Iterator[str]:
        """Yield the lines, except those of a document that began earlier, and complete the last document."""
        begin = lines if first == 0 else dropwhile(lambda line: not self.begins(line), lines)
        is_empty = True
        for line in begin:
            is_empty = False
            yield line
        if not is_empty and last < self.sizes[path]:
            with self.opened(path, last) as (text, _):
                yield from takewhile(
                    lambda line: not self.begins(line), self.checked(text, path, last)
                )

    def checked(self, text: IO[str], path: Path, first: int) -> Iterator[str]:
        """Yield lines, very long ones in stretches. Raises InputError on NUL and undecodable bytes."""
        number, is_whole, num_chars = 0, True, 0
        for line in stretches(text):
            number += is_whole
            num_chars = len(line) if is_whole else num_chars + len(line)
            is_whole = line.endswith("\n")
            check_length(num_chars, lambda at=number: line_name(path, first, at))  # type: ignore[misc]
            if bad := unreadable(line, self.cfg.encoding, DECODING):
                raise InputError(f"{line_name(path, first, number)}: {bad}")
            yield line

    def matches(self, line: str) -> bool:
        return self.separator is not None and self.separator.search(line.rstrip("\n")) is not None


class JsonLines(FilesCorpus):
    suffixes = (".jsonl", ".json")

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with self.opened(path, first, last) as (text, position):
            lines = bounded_lines(text, str(path) if first == 0 else f"{path}, after byte {first}")
            for number, row in json_rows(lines, self.cfg.encoding, DECODING):
                where = line_name(path, first, number)
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
            encoding, lines = self.cfg.encoding, bounded_lines(text, str(path))
            columns, rows = csv_rows(
                lines, str(path), encoding, DECODING, max_field_chars=LONGEST_LINE_CHARS
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
        self.largest_groups: dict[
            Path, int
        ] = {}  # bytes of the column in a file's largest row group
        self.sizes = {path: self.column_bytes(path) for path in self.sizes}

    def can_seek(self, path: Path) -> bool:
        return True

    def column_bytes(self, path: Path) -> int:
        """Return the uncompressed bytes of a file's text column. Raises InputError if it is missing or not text."""
        column = self.cfg.column
        with open_parquet(path) as file:
            check_column(column, file.schema_arrow.names, str(path))
            kind = str(file.schema_arrow.field(column).type)
            check(
                kind.startswith(STRING_TYPES),
                f"{path}: column {column} is {kind}; set corpus.column to a text column",
            )
            groups = [
                file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)
            ]
            columns = [
                group.column(index) for group in groups for index in range(group.num_columns)
            ]
            sizes = [
                item.total_uncompressed_size for item in columns if item.path_in_schema == column
            ]
        self.largest_groups[path] = max(sizes, default=0)
        return sum(sizes)

    def read_at_once(self, path: Path) -> int:
        return self.largest_groups[path]

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        # Rows are treated as equally long: row i of n begins at byte size * i // n.
        with open_parquet(path) as file:
            size, num_rows = max(1, self.sizes[path]), file.metadata.num_rows
            first_row, last_row = (
                min(num_rows, -(-byte * num_rows // size)) for byte in (first, last)
            )
            row = 0  # the first row of the group
            for group in range(file.num_row_groups):
                end = row + file.metadata.row_group(group).num_rows
                if row < last_row and end > first_row:
                    batches = file.iter_batches(
                        BATCH_ROWS, row_groups=[group], columns=[self.cfg.column]
                    )
                    texts = enumerate(
                        chain.from_iterable(batch.column(0).to_pylist() for batch in batches),
                        row + 1,
                    )
                    for done, text in islice(texts, max(0, first_row - row), last_row - row):
                        yield text or "", self.sizes[path] * done // num_rows
                row = end
