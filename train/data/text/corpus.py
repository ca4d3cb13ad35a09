"""Sources of text: the Python documentation, local files or Hugging Face data sets, as a stream of documents.

Every source yields the same documents in the same order each time, with only a few of them in memory. Bad input raises
an InputError that names the line; nothing is left out silently. To add a source, add a class and a line in SOURCES.
"""

from __future__ import annotations

import ast
import glob
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Protocol

from train.config import (
    CorpusConfig,
    HFCorpusConfig,
    HFDataset,
    InputError,
    check,
)
from train.data.files.data_sets import open_builder
from train.data.files.errors import LIBRARY_ERRORS, naming
from train.data.files.find import matching
from train.data.text.corpus_files import Csv, JsonLines, Parquet, TextFiles
from train.data.text.documents import (
    WHOLE,
    CorpusPart,
    Document,
    Reading,
    check_column,
    clean,
    listing,
    readings,
    text_of,
)
from train.storage.folders import sha256_json
from train.storage.hub_access import asking_hub, hub_or_path, why_missing
from train.storage.schema import BadContent, record

MIN_PYDOC_CHARS = 100
# folders of the standard library
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo"}


class Corpus(Protocol):
    @property
    def remarks(self) -> Sequence[str]:
        """Lines on the files that are read, and on those that are left out."""

    @property
    def total_bytes(self) -> int | None:
        """The sum of all source_bytes, or slightly more if blanks follow the last text; None if unknown."""

    @property
    def seekable(self) -> bool:
        """True if reading any small part costs little."""

    @property
    def most_parts(self) -> int:
        """The maximum number of parts that can be read in parallel without reading anything twice."""

    def documents(self, part: CorpusPart = WHOLE) -> Iterator[Document]:
        """Yield the documents of a part, the same at every call. In a reading, each document is in exactly one part."""

    def validation(self) -> Iterator[Document] | None:
        """Return the documents of corpus.validation, which are also in the parts; None if it is not set."""

    def fingerprint(self) -> str:
        """Return a hash that changes when the input does. It costs little, because no text is read."""


def open_corpus(cfg: CorpusConfig) -> Corpus:
    """Return the corpus that `corpus.kind` names. Raises InputError if files are missing."""
    return SOURCES[cfg.kind](cfg)


class PyDocs:
    """Topics of the language reference and docstrings of the standard library, from this Python installation."""

    seekable = True
    remarks = ()
    most_parts = 1  # the text has only a few MB

    def __init__(self, cfg: CorpusConfig) -> None:
        check(
            cfg.weights is None and cfg.validation is None,
            "corpus=pydocs is one corpus without a validation part: leave out corpus.weights and corpus.validation",
        )
        self.root = Path(sysconfig.get_path("stdlib"))
        tops = [path for path in self.root.iterdir() if path.name not in SKIPPED]
        found = [path for top in tops for path in (top, *top.rglob("*.py"))]
        # links may lead nowhere
        self.modules = [
            path
            for path in sorted(found)
            if path.suffix == ".py" and path.is_file() and not SKIPPED & {*path.parts}
        ]
        check(
            bool(self.modules),
            f"corpus.kind=pydocs finds no sources in {self.root}; choose another corpus",
        )

    def fingerprint(self) -> str:
        # Some distributions leave out modules, so the version alone does not identify the text.
        files = [
            [path.relative_to(self.root).as_posix(), path.stat().st_size] for path in self.modules
        ]
        return sha256_json([platform.python_version(), files])

    @property
    def total_bytes(self) -> int:
        return sum(document.source_bytes for document in self._documents)

    def documents(self, part: CorpusPart = WHOLE) -> Iterator[Document]:
        yield from self._documents[slice(*part.span(len(self._documents)))]

    def validation(self) -> None:
        return None

    @cached_property  # parsing takes seconds, and the result is small
    def _documents(self) -> list[Document]:
        texts = [topics[name] for name in sorted(topics)]
        seen: set[str] = set()
        for path in self.modules:
            try:
                tree = ast.parse(path.read_bytes())
            except (SyntaxError, ValueError):  # a file that is intentionally not valid Python
                continue
            new = [text for text in dict.fromkeys(docstrings(tree)) if text not in seen]
            seen.update(new)
            texts.append("\n\n".join(new))
        return [
            Document(text, len(text.encode()))
            for text in map(clean, texts)
            if len(text) >= MIN_PYDOC_CHARS
        ]


def docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings of a module and of all that it defines, in source order. Nothing is imported or run."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        text = ast.get_docstring(node)
        if text:
            yield text
    for child in ast.iter_child_nodes(node):
        # expressions define nothing
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from docstrings(child)


class HFCorpus:
    """Data sets of the Hub or of local folders, streamed one after the other. A null is an empty row.

    A part consists of whole files, as `datasets` counts them. No document continues in the next file.
    """

    total_bytes = None
    seekable = False
    remarks = ()

    def __init__(self, cfg: HFCorpusConfig) -> None:
        self.readings = readings(cfg.weights, cfg.sources)
        self.datasets = list(cfg.datasets)
        if cfg.validation is not None:
            says = "must be like an entry of corpus.datasets, {path: user/set, split: validation}"
            with naming(f"corpus.validation={cfg.validation} {says}", (BadContent,)):
                self.datasets.append(record(HFDataset, cfg.validation))
            self.readings.append(Reading(len(cfg.datasets), is_validation=True))
        for dataset in self.datasets:
            rows = dataset.rows_per_document
            says = f"rows_per_document={rows} of {dataset.path} must be above 0"
            check(rows > 0, f"corpus.datasets: {says}")

    def fingerprint(self) -> str:
        files = [[asdict(dataset), listing(local_files(dataset))] for dataset in self.datasets]
        return sha256_json(files)

    @property
    def most_parts(self) -> int:
        return len(self.files)

    @cached_property  # asks the Hub once, whatever the number of parts
    def files(self) -> list[tuple[Reading, HFDataset, Any, int]]:
        """The files of all readings: the reading, the data set's settings, the opened data set, the file's index."""
        opened = [stream(dataset) for dataset in self.datasets]
        found: list[tuple[Reading, HFDataset, Any, int]] = []
        for reading in self.readings:
            rows = opened[reading.corpus]
            dataset = self.datasets[reading.corpus]
            found += [(reading, dataset, rows, number) for number in range(rows.num_shards)]
        return found

    def validation(self) -> Iterator[Document] | None:
        files = [file for file in self.files if file[0].is_validation]
        if files:
            return self.read_all(files)
        return None

    def documents(self, part: CorpusPart = WHOLE) -> Iterator[Document]:
        yield from self.read_all(self.files[slice(*part.span(len(self.files)))])

    def read_all(self, files: list[tuple[Reading, HFDataset, Any, int]]) -> Iterator[Document]:
        for reading, dataset, rows, number in files:
            texts = texts_of(dataset, rows.shard(rows.num_shards, number), number)
            while block := list(islice(texts, dataset.rows_per_document)):
                text = clean("\n".join(block))
                if text:
                    yield Document(text, len(text.encode()), reading)


def stream(dataset: HFDataset) -> Any:
    """Open a data set for reading row by row. Only its text column is read if the columns are known beforehand.

    Raises InputError if the data set cannot be opened, or has no such column.
    """
    with opening(dataset):
        builder = open_builder(
            hub_or_path(dataset.path), name=dataset.name, data_files=data_files(dataset)
        )
        rows = builder.as_streaming_dataset(split=dataset.split)
    if rows.column_names is None:
        return rows
    check_column(dataset.column, rows.column_names, f"data set {dataset.path}")
    return rows.select_columns([dataset.column])


@contextmanager
def opening(dataset: HFDataset) -> Iterator[None]:
    path = hub_or_path(dataset.path)
    source = "" if local_files(dataset) else path
    try:
        with asking_hub(source):
            yield
    except LIBRARY_ERRORS as error:
        hint = "; a local folder works too" if isinstance(error, OSError) else ""
        raise InputError(
            f"data set {path} cannot be opened: {why_missing(source, error)}{hint}"
        ) from error


def texts_of(dataset: HFDataset, rows: Iterable[dict[str, Any]], file: int) -> Iterator[str]:
    where = f"data set {dataset.path}" + (f", file {file + 1}" if file else "")
    with naming(f"data set {dataset.path} cannot be read completely", LIBRARY_ERRORS):
        for number, row in enumerate(rows, 1):
            null = row.get(dataset.column, "") is None
            yield "" if null else text_of(row, dataset.column, f"{where}, row {number}")


def local_files(dataset: HFDataset) -> list[Path]:
    """Return the files of a data set if it is on this machine; [] if it is on the Hub."""
    path = hub_or_path(dataset.path)
    files = data_files(dataset)
    if Path(path).is_dir():
        folder = glob.escape(path)
    else:
        folder = ""
    if folder or files:
        return matching(str(Path(folder, files or "**")))
    return []


def data_files(dataset: HFDataset) -> str | None:
    if dataset.data_files is None:
        return None
    return hub_or_path(dataset.data_files)


SOURCES: dict[str, Callable[[Any], Corpus]] = {
    "pydocs": PyDocs,
    "text": TextFiles,
    "jsonl": JsonLines,
    "csv": Csv,
    "parquet": Parquet,
    "hf": HFCorpus,
}
