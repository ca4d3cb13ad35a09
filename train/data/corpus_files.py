"""Local files as a corpus: plain text, JSON lines, CSV, Parquet. See corpus.py."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.config import FilesCorpusConfig, InputError, check
from train.data.documents import (
    LIBRARY_ERRORS,
    Document,
    check_column,
    clean,
    find_files,
    listing,
    naming,
    opened,
    text_of,
)
from train.storage import sha256_json

MAX_DOCUMENT_CHARS = 2**24  # a stretch without separators is cut at a line end after this, so that memory is bounded
MAX_FIELD_CHARS = 2**31 - 1  # of CSV, the most that a C long holds everywhere
BATCH_ROWS = 256  # of Parquet, decoded at once
BUFFER_BYTES = 2**20  # of Parquet, read at once; without it a whole row group is
STRING_TYPES = ("string", "large_string", "dictionary<values=string", "dictionary<values=large_string")  # of Parquet
SURROGATE = re.compile("[\ud800-\udfff]")


class FilesCorpus(ABC):
    """Files read one after the other in the order of their names."""

    suffixes: tuple[str, ...]  # what is taken from a folder

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        self.cfg = cfg
        with naming(f"corpus.encoding={cfg.encoding} is not known, try utf-8 or latin-1", (LookupError,)):
            io.TextIOWrapper(io.BytesIO(), encoding=codecs.lookup(cfg.encoding).name)
        self.files = find_files(cfg.path, self.suffixes)
        self.listing = listing(self.files)

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size, _ in self.listing)

    def fingerprint(self) -> str:
        return sha256_json(self.listing)

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            before = 0
            for raw, position in self.read(path):
                text = clean(raw)
                if text:
                    yield Document(text, position - before)
                    before = position

    @abstractmethod
    def read(self, path: Path) -> Iterator[tuple[str, int]]:
        """Texts of a file, each with the bytes of the file consumed up to its end."""


class TextFiles(FilesCorpus):
    """A line in which `separator` is found starts a new document and, if it is not blank, is part of it."""

    suffixes = (".txt", ".text", ".md", ".rst")

    def __init__(self, cfg: FilesCorpusConfig) -> None:
        with naming(f"corpus.separator={cfg.separator} is no regular expression", (re.error,)):
            self.separator = None if cfg.separator is None else re.compile(cfg.separator)
        super().__init__(cfg)

    def read(self, path: Path) -> Iterator[tuple[str, int]]:
        with opened(path, self.cfg) as (lines, position):
            part: list[str] = []
            size = 0
            for line in lines:
                if self.separator and (size > MAX_DOCUMENT_CHARS or self.separator.search(line.rstrip("\n"))):
                    yield "".join(part), position()
                    part, size = [], 0
                part.append(line)
                size += len(line)
            yield "".join(part), position()


class JsonLines(FilesCorpus):
    suffixes = (".jsonl", ".json")

    def read(self, path: Path) -> Iterator[tuple[str, int]]:
        with opened(path, self.cfg) as (lines, position):
            for number, line in enumerate(lines, 1):
                if not line.isspace():
                    yield self.field(line, f"{path}:{number}"), position()

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

    def read(self, path: Path) -> Iterator[tuple[str, int]]:
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

    @property
    def total_bytes(self) -> int:
        return sum(self.sizes.values())

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

    def read(self, path: Path) -> Iterator[tuple[str, int]]:
        with self.opened(path) as file:
            done = 0
            for batch in file.iter_batches(BATCH_ROWS, columns=[self.cfg.column]):
                for text in batch.column(0).to_pylist():
                    done += 1
                    yield text or "", self.sizes[path] * done // file.metadata.num_rows
