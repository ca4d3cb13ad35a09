"""Local files as a corpus: plain text, JSON lines, CSV, Parquet. See corpus.py."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, dropwhile, islice, takewhile
from pathlib import Path
from typing import Any

from train.config import FilesCorpusConfig, InputError, check
from train.data.documents import (
    LIBRARY_ERRORS,
    WHOLE,
    Document,
    Part,
    check_column,
    clean,
    find_files,
    line_place,
    listing,
    naming,
    opened,
    seekable,
    text_of,
)
from train.storage import sha256_json

MAX_DOCUMENT_CHARS = 2**24  # a stretch without separators is cut at a line end after this, so that memory is bounded
MAX_FIELD_CHARS = 2**31 - 1  # of CSV, the most that a C long holds everywhere
BATCH_ROWS = 256  # of Parquet, decoded at once
BUFFER_BYTES = 2**20  # of Parquet, read at once; without it a whole row group is
STRING_TYPES = ("string", "large_string", "dictionary<values=string", "dictionary<values=large_string")  # of Parquet
BLANK = r"^\s*$"  # the usual separator, for which str.isspace is the same and faster
SURROGATE = re.compile("[\ud800-\udfff]")


class FilesCorpus(ABC):
    """Files read one after the other in the order of their names.

    A part is a stretch of bytes of all files and holds the documents that begin in it; files outside are not opened.
    Plain text and JSON lines are read from there, Parquet from the row group; of packed files, CSV and encodings whose
    line ends cannot be told from any byte on, all before it in the file is read too and left out.
    """

    suffixes: tuple[str, ...]  # what is taken from a folder

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        self.cfg = cfg
        with naming(f"corpus.encoding={cfg.encoding} is not known, try utf-8 or latin-1", (LookupError,)):
            io.TextIOWrapper(io.BytesIO(), encoding=codecs.lookup(cfg.encoding).name)
        self.files = find_files(cfg.path, self.suffixes)
        self.listing = listing(self.files)
        self.sizes = {path: size for path, (_, size, _) in zip(self.files, self.listing, strict=True)}

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def seekable(self) -> bool:
        return all(map(self.can_seek, self.files))

    def can_seek(self, path: Path) -> bool:
        return seekable(path, self.cfg.encoding)

    def fingerprint(self) -> str:
        return sha256_json(self.listing)

    def documents(self, part: Part = WHOLE) -> Iterator[Document]:
        for path, first, last in self.spans(part):
            before = first
            end = min(last, self.sizes[path])
            seek = self.can_seek(path)
            found = self.read(path, first, last) if seek else self.read(path, 0, self.sizes[path] + 1)
            for raw, position in found if seek else beginning_in(found, first, last):
                text = clean(raw)
                if text:
                    yield Document(text, max(0, min(position, end) - before))
                    before = min(position, end)

    def spans(self, part: Part) -> Iterator[tuple[Path, int, int]]:
        """The files of a part, each with its bytes [first, last). A file has a place behind its last byte too."""
        first, last = part.span(self.total_bytes + len(self.files))
        for path, size in self.sizes.items():
            if first <= size and last > 0:
                yield path, max(first, 0), min(last, size + 1)
            first, last = first - size - 1, last - size - 1

    @abstractmethod
    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        """Texts that begin in bytes [first, last) of a file, each with the bytes of it consumed up to its end.

        Where there is no seeking, only asked for whole files.
        """


def beginning_in(found: Iterable[tuple[str, int]], first: int, last: int) -> Iterator[tuple[str, int]]:
    """Those of a file's texts that begin in [first, last), where each begins at the position that the last one left."""
    begin = 0
    for text, position in found:
        if begin >= last:
            return
        if begin >= first:
            yield text, position
        begin = position


class TextFiles(FilesCorpus):
    """A line in which `separator` is found starts a new document and, if it is not blank, is part of it.

    Of a very long line the separator is looked for in each stretch (see `stretches`), and each ends a document, unless
    a file is to be one.
    """

    suffixes = (".txt", ".text", ".md", ".rst")

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        with naming(f"corpus.separator={cfg.separator} is no regular expression", (re.error,)):
            self.separator = None if cfg.separator is None else re.compile(cfg.separator)
        self.begins = str.isspace if cfg.separator == BLANK else self.matches
        super().__init__(cfg)

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with opened(path, self.cfg, first, last, in_stretches=True) as (lines, position):
            part: list[str] = []
            size, is_cut = 0, False
            for line in self.whole_documents(lines, path, first, last):
                if self.begins(line) or (self.separator and (is_cut or size > MAX_DOCUMENT_CHARS)):
                    yield "".join(part), position()
                    part, size = [], 0
                part.append(line)
                size += len(line)
                is_cut = not line.endswith("\n")  # a very long line: each stretch of it ends a document
            yield "".join(part), position()

    def whole_documents(self, lines: Iterator[str], path: Path, first: int, last: int) -> Iterator[str]:
        """Without the end of a document that began before the lines, and with the end of the one that goes on."""
        if first > 0:
            lines = dropwhile(lambda line: not self.begins(line), lines)
        begin = list(islice(lines, 1))
        return chain(begin, lines, self.rest(path, last)) if begin else iter(())

    def rest(self, path: Path, last: int) -> Iterator[str]:
        """Lines from byte `last` on to the end of the document."""
        if last < self.sizes[path]:
            with opened(path, self.cfg, last, in_stretches=True) as (lines, _):
                yield from takewhile(lambda line: not self.begins(line), lines)

    def matches(self, line: str) -> bool:
        return self.separator is not None and self.separator.search(line.rstrip("\n")) is not None


class JsonLines(FilesCorpus):
    suffixes = (".jsonl", ".json")

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        with opened(path, self.cfg, first, last) as (lines, position):
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield self.field(line, line_place(path, first, number)), position()

    def field(self, line: str, place: str) -> str:
        with naming(f"{place}: not a JSON object on one line", (ValueError, RecursionError)):
            row = json.loads(line)
        check(isinstance(row, dict), f"{place}: not a JSON object on one line but a {type(row).__name__}")
        text = text_of(row, self.cfg.column, place)
        if text.isascii() or not SURROGATE.search(text):
            return text
        # JSON can escape half a character, which cannot be encoded again and which tokenizers refuse.
        check(self.cfg.errors == "replace", f"{place}: half of a surrogate pair; set corpus.errors=replace")
        return SURROGATE.sub("\ufffd", text)


class Csv(FilesCorpus):
    suffixes = (".csv",)

    def can_seek(self, path: Path) -> bool:
        return False  # a line end may be in a field

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        csv.field_size_limit(MAX_FIELD_CHARS)
        with opened(path, self.cfg) as (lines, position):
            rows = csv.reader(lines, strict=True)  # strict: an open quote is an error instead of one endless field
            try:
                header = next(rows, [])
                check_column(self.cfg.column, header, f"{path}:1")
                place = header.index(self.cfg.column)
                for row in filter(None, rows):  # blank lines are empty rows
                    if len(row) != len(header):
                        what = f"{len(row)} fields where the header has {len(header)}"
                        raise InputError(
                            f"{path}:{rows.line_num}: {what}; quote fields with commas or line ends in them"
                        )
                    yield row[place], position()
            except csv.Error as error:
                raise InputError(f"{path}:{rows.line_num}: not CSV: {error}; a quote in a field is doubled") from error


class Parquet(FilesCorpus):
    """Bytes are those of the column before compression, as the footers tell. A null is an empty document."""

    suffixes = (".parquet",)

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        super().__init__(cfg)
        self.sizes = {path: self.column_bytes(path) for path in self.files}

    def can_seek(self, path: Path) -> bool:
        return True

    @contextmanager
    def opened(self, path: Path) -> Iterator[Any]:
        import pyarrow.parquet  # here, because only this source needs it and it takes a while

        with (
            naming(f"{path} cannot be read as Parquet", LIBRARY_ERRORS),
            pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES) as file,
        ):
            yield file

    def column_bytes(self, path: Path) -> int:
        """Size of the column in a file; InputError if it is missing or not text."""
        column = self.cfg.column
        with self.opened(path) as file:
            check_column(column, file.schema_arrow.names, str(path))
            kind = str(file.schema_arrow.field(column).type)
            check(
                kind.startswith(STRING_TYPES), f"{path}: column {column} is {kind}; set corpus.column to one of strings"
            )
            groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
            columns = [group.column(index) for group in groups for index in range(group.num_columns)]
            return sum(item.total_uncompressed_size for item in columns if item.path_in_schema == column)

    def read(self, path: Path, first: int, last: int) -> Iterator[tuple[str, int]]:
        """Row i of n begins at byte size * i // n."""
        with self.opened(path) as file:
            size, num_rows = max(1, self.sizes[path]), file.metadata.num_rows
            first_row, last_row = (min(num_rows, -(-place * num_rows // size)) for place in (first, last))
            row = 0  # the first one of the group
            for group in range(file.num_row_groups):
                end = row + file.metadata.row_group(group).num_rows
                if row < last_row and end > first_row:
                    texts = enumerate(self.texts(file, group), row + 1)
                    for done, text in islice(texts, max(0, first_row - row), last_row - row):
                        yield text, self.sizes[path] * done // num_rows
                row = end

    def texts(self, file: Any, group: int) -> Iterator[str]:
        for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[self.cfg.column]):
            yield from (text or "" for text in batch.column(0).to_pylist())
