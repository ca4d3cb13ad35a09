"""Labelled rows as tables, from CSV, JSON lines, Parquet, SQuAD and CoNLL files, save_to_disk folders and the Hub."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow

from train.config import (
    ColumnsConfig,
    InputError,
    RecordsConfig,
    S3Config,
    check,
    plural,
    shortlist,
)
from train.config.data import SUFFIXES
from train.data.files.data_sets import PLAIN, kinds_of, open_builder
from train.data.files.errors import LIBRARY_ERRORS, BadRow, naming
from train.data.files.rows import (
    BATCH_ROWS,
    Values,
    holds_objects,
    json_rows,
    json_value,
    open_parquet,
)
from train.data.files.text import bounded_lines, bounded_text, line_end_of, open_text, start_of
from train.data.records.conll import conll_rows
from train.data.records.delimited import Lines, csv_lines
from train.data.records.sources import (
    FILE_FORMATS,
    NO_FILE,
    File,
    S3File,
    layout,
    naming_hub,
    s3_folder,
    saved_files,
    split_files,
    split_names,
)
from train.storage.folders import is_s3, local_path, sha256_json
from train.storage.foreign import check_folder, open_inside, read_whole
from train.storage.schema import BadContent, FileName, of_type, read_object

PARQUET_START = b"PAR1"
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
SQUAD_START = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')
LEVELS = ("data", "paragraphs", "qas")  # SQuAD's nested lists, from the outside in
NO_ANSWERS = (("", -1), ("", 0))  # texts and starts
SHOWN_CHARS = 40  # maximum characters of a text in an error

LocatedRow = tuple[str, Values]  # the location of a row, such as file.csv:17, and its values


@dataclass(frozen=True)
class Table:
    """The rows of one file or split, in order. Each call of `rows` starts over. Few rows are in memory at a time."""

    where: str  # the file or split, as errors name it
    rows: Callable[[], Iterator[LocatedRow]]
    columns: list[str] | None = None  # None: the columns of the first rows
    # label names by column, whose numbers index them
    class_names: dict[str, list[str]] = field(default_factory=dict)
    keys: ColumnsConfig | None = None  # replaces data.columns if the format has fixed column names
    lines: Lines = field(default_factory=Lines)

    def names_of(self, column: str | tuple[str, ...]) -> Sequence[str] | None:
        """Return the labels that a column's numbers stand for, if known; for several columns, the columns' names."""
        return column if isinstance(column, tuple) else self.class_names.get(column)


def open_splits(
    cfg: RecordsConfig, wanted: Collection[str], s3: S3Config, scratch: Path
) -> dict[str, list[Table]]:
    """Open the tables of each split. Columnar formats read only the `wanted` columns.

    Files in S3 are copied to `scratch`. Raises InputError if a file is missing, or is in both the training and a
    validation split.
    """
    source = layout(cfg, s3)
    if source == "files":
        files = split_files(cfg, s3)
        return {
            split: [file_table(file, cfg, wanted, scratch) for file in paths]
            for split, paths in files.items()
        }
    names = split_names(cfg)
    if source == "saved":
        for file in saved_files(cfg, s3):
            local_copy(file, scratch)
        folder = (
            s3_copies(s3_folder(cfg.path, s3).location, scratch)
            if is_s3(cfg.path)
            else local_path(cfg.path)
        )
        splits = saved_splits(folder, cfg.path, names)
    else:
        splits = {split: load_hub(cfg, name or split, scratch) for split, name in names.items()}
    sources = {
        split: f"data set {cfg.path}, split {name or split}" for split, name in names.items()
    }
    return {
        split: [dataset_table(splits[split], where, wanted)] for split, where in sources.items()
    }


def file_table(file: File, cfg: RecordsConfig, wanted: Collection[str], scratch: Path) -> Table:
    """Return the table of one file. Errors name its original location."""
    path, name = local_copy(file, scratch), str(file)
    form = format_of(path, name, cfg)
    if form == "parquet":
        return parquet_table(path, name, wanted)
    if form == "squad":
        return Table(
            name, lambda: squad_rows(path, name, cfg.encoding), keys=ColumnsConfig(id="id")
        )
    start = start_of(path, cfg.encoding)
    if form == "jsonl" and is_document(start):
        return Table(name, lambda: document_rows(path, name, cfg.encoding))

    lines = Lines()

    def rows() -> Iterator[LocatedRow]:
        with open_text(path, cfg.encoding, newline=line_end_of(start)) as (file, _):
            text = bounded_lines(file, name)
            if form == "csv":
                found = csv_lines(lines.counted(text, int(cfg.header)), name, cfg)
            elif form == "conll":
                found = conll_rows(text, name, cfg.encoding, cfg.columns)
            else:
                found = json_rows(text, cfg.encoding)
            yield from ((f"{name}:{number}", row) for number, row in found)

    return Table(name, rows, keys=ColumnsConfig() if form == "conll" else None, lines=lines)


def format_of(path: Path, name: str, cfg: RecordsConfig) -> str:
    """Return a file's format, one of FILE_FORMATS. `data.format`, the suffix or, for .json, the content decides."""
    # Parquet is recognised whatever the settings are: read as text, it would have no rows.
    check(path.is_file(), f"{name} is {NO_FILE}")
    with naming(f"{name} cannot be read", (OSError,)), open_inside(path) as file:
        if file.read(len(PARQUET_START)) == PARQUET_START:
            return "parquet"
    if cfg.format in FILE_FORMATS:
        return cfg.format
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    known = ", ".join(FILE_FORMATS)
    check(
        suffix in SUFFIXES,
        f"{name}: the name does not say the format; set data.format to one of: {known}",
    )
    if suffix != ".json":
        return "csv" if suffix == ".tsv" else suffix[1:]
    start = start_of(path, cfg.encoding)
    return "squad" if SQUAD_START.match(start) and '"paragraphs"' in start else "jsonl"


def squad_rows(path: Path, name: str, encoding: str) -> Iterator[tuple[str, Values]]:
    """Yield the location and values of each question of SQuAD, https://arxiv.org/abs/1606.05250 (v2: 1806.03822).

    The file is read as a whole, up to a limit; SQuAD itself takes about 200 MB of memory. Its form is {"data":
    [{"paragraphs": [{"context": ..., "qas": [{"id", "question", "answers": [{"text", "answer_start"}],
    "is_impossible"}]}]}]}.
    """
    document = read_document(path, name, encoding)
    is_squad = isinstance(document, dict) and isinstance(document.get("data"), list)
    check(is_squad, f'{name} is not SQuAD: there is no list "data" at the top level')
    for where, row in questions(document, LEVELS, "", {}):
        own = row.get("id") if isinstance(row, dict) else None
        yield f"{name}, " + (f"question {own}" if isinstance(own, str) else where), row


def read_document(path: Path, name: str, encoding: str) -> Any:
    """Return a JSON value that fills a file. Raises InputError if the file is too long, or is not JSON."""
    with open_text(path, encoding) as (text, _):
        content = bounded_text(
            text, name, "split its list into several files in one folder, or write JSON lines"
        )
        try:
            return json.loads(content)
        except json.JSONDecodeError as error:
            raise InputError(f"{name}:{error.lineno}: not JSON: {error.msg}") from error
        except RecursionError:
            raise InputError(f"{name}: not JSON: it is nested too deeply") from None


def is_document(start: str) -> bool:
    """Return whether a file that begins so is one JSON value, such as a list of rows, and has no row per line."""
    lines = start.strip().splitlines() or [""]
    if lines[0].startswith("["):
        return len(lines) == 1 or isinstance(json_value(lines[0]), BadRow)
    return (
        len(lines) > 1
        and lines[0].startswith("{")
        and lines[0].rstrip().endswith(("{", "[", ",", ":"))
    )


def document_rows(path: Path, name: str, encoding: str) -> Iterator[LocatedRow]:
    """Yield the rows of a file that is one JSON list of objects, or one object with such a list in it."""
    document = read_document(path, name, encoding)
    lists = (
        [document]
        if isinstance(document, list)
        else list(filter(holds_objects, document.values()))
    )
    check(
        len(lists) == 1,
        f"{name}: one JSON object, with {plural(len(lists), 'list')} of rows; write one row per line, as jq -c does, "
        "or pandas' to_json(FILE, orient='records', lines=True)",
    )
    for number, row in enumerate(lists[0], 1):
        is_row = isinstance(row, dict)
        yield (
            f"{name}, row {number}",
            row if is_row else BadRow(f"a {type(row).__name__} where an object should be"),
        )


def questions(
    node: Any, levels: tuple[str, ...], where: str, above: dict[str, Any]
) -> Iterator[tuple[str, Values]]:
    """Yield the location and values of each innermost object in nested lists, with the "context" of an outer object."""
    if not isinstance(node, dict):
        yield where, BadRow(f"a {type(node).__name__} where an object should be")
    elif not levels:
        row = above | {key: node[key] for key in ("id", "question", "answers") if key in node}
        yield where, row | ({"answers": []} if node.get("is_impossible") is True else {})
    elif not isinstance(node.get(levels[0]), list):
        yield where, BadRow(f"no list {levels[0]}")
    else:
        above = above | ({"context": node["context"]} if "context" in node else {})
        for number, child in enumerate(node[levels[0]]):
            yield from questions(
                child, levels[1:], f"{where}.{levels[0]}[{number}]".lstrip("."), above
            )


def answers_of(value: Any, context: str) -> dict[str, list[Any]]:
    """Return answers as `{"text": [str], "answer_start": [int]}`, from this form or a list of objects.

    Starts are in characters. Raises BadRow if the form is wrong, or if an answer is not at its start in `context`.
    """
    if isinstance(value, str):
        read = "pandas.read_csv(FILE, converters={'answers': ast.literal_eval})"
        raise BadRow(
            f"answers are text, as in CSV files; write JSON lines: {read}.to_json(NEW, 'records', lines=True)"
        )
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {key: [item.get(key) for item in value] for key in ("text", "answer_start")}
    texts, starts = (
        (value.get("text"), value.get("answer_start")) if isinstance(value, dict) else (None, None)
    )
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise BadRow(
            "answers must be equally long lists text and answer_start, or a list of objects with these keys"
        )
    # Data sets without a list of no answers say so with an empty text, at -1 or 0.
    pairs = [pair for pair in zip(texts, starts, strict=True) if pair not in NO_ANSWERS]
    for text, start in pairs:
        if not isinstance(text, str) or not text or type(start) is not int:
            raise BadRow(
                f"an answer must be a text and a number, not {text!r:.40} and {start!r:.40}"
            )
        there = context[max(start, 0) : max(start, 0) + len(text)]
        if start < 0 or there != text:
            at = f"character {start} of the context"
            raise BadRow(
                f"answer {text[:SHOWN_CHARS]!r} is not at {at}, which has {there[:SHOWN_CHARS]!r} there"
            )
    return {"text": [text for text, _ in pairs], "answer_start": [start for _, start in pairs]}


def parquet_table(path: Path, name: str, wanted: Collection[str]) -> Table:
    """Return the table of a Parquet file, with the names of labels if `datasets` wrote them into the file."""
    with open_parquet(path, name) as file:
        schema = file.schema_arrow
        names = present(wanted, schema.names)
        read = pyarrow.schema([field for field in schema if field.name in names], schema.metadata)
        # other columns may have types that `datasets` lacks
        features = datasets.Features.from_arrow_schema(read)

    def rows() -> Iterator[LocatedRow]:
        with open_parquet(path, name) as file:
            yield from numbered(file.iter_batches(BATCH_ROWS, columns=names), name)

    return Table(name, rows, schema.names, class_names(features))


def dataset_table(dataset: datasets.Dataset, where: str, wanted: Collection[str]) -> Table:
    columns = list(dataset.column_names)

    def rows() -> Iterator[LocatedRow]:
        with naming(f"{where} cannot be read completely", LIBRARY_ERRORS):
            arrow = dataset.select_columns(present(wanted, columns)).with_format("arrow")
            yield from numbered(arrow.iter(BATCH_ROWS), where)

    return Table(where, rows, columns, class_names(dataset.features))


def present(wanted: Collection[str], columns: list[str]) -> list[str]:
    """Return the columns of a table that are wanted; a wanted name with a dot means the column before the dot."""
    return [
        name
        for name in columns
        if any(name == item or item.startswith(f"{name}.") for item in wanted)
    ]


def class_names(features: datasets.Features) -> dict[str, list[str]]:
    # a list: its items
    inner = {name: getattr(item, "feature", item) for name, item in features.items()}
    return {
        name: item.names for name, item in inner.items() if isinstance(item, datasets.ClassLabel)
    }


def numbered(batches: Any, where: str) -> Iterator[LocatedRow]:
    number = 0
    for batch in batches:
        # Arrow does not check offsets while it reads, and a wrong one ends the process
        batch.validate(full=True)
        for row in batch.to_pylist():
            number += 1
            yield f"{where}, row {number}", row


def local_copy(file: File, scratch: Path) -> Path:
    """Return the path of a local file, or of a copy inside `scratch` if the file is in S3."""
    return file.download(s3_copies(file.location, scratch)) if isinstance(file, S3File) else file


def s3_copies(location: str, scratch: Path) -> Path:
    return scratch / "s3" / sha256_json(location)[:16]


def saved_splits(
    folder: Path, location: str, names: dict[str, str | None]
) -> dict[str, datasets.Dataset]:
    """Return the splits in `names`. A data set without splits stands for each. Raises InputError if one is missing."""
    saved = load_saved(folder, location)
    if isinstance(saved, datasets.Dataset):
        given = [name for name in names.values() if name is not None]
        check(
            not given,
            f"data.path={location} is one data set without splits; leave out {', '.join(given)}",
        )
        return dict.fromkeys(names, saved)
    wanted = {split: name or split for split, name in names.items()}
    missing = sorted(set(wanted.values()) - set(saved))
    check(
        not missing,
        f"data.path={location} has no split {shortlist(missing)}; there are {shortlist(saved)}",
    )
    return {split: saved[name] for split, name in wanted.items()}


def load_saved(folder: Path, name: str | None = None) -> Any:
    """Return the Dataset or DatasetDict that `save_to_disk` wrote, memory-mapped. Errors name `name` or `folder`.

    Only columns of types in PLAIN are kept: the library would open the file or URL that a row of an image column names.
    Raises InputError if the data set cannot be read, or if a file is not a regular file inside the folder.
    """
    with naming(f"{name or folder} cannot be read as a saved data set", LIBRARY_ERRORS):
        index = folder / SPLITS_FILE
        if not index.exists():
            return load_split(folder, folder)
        splits = listed(index, folder, "splits", list[FileName])
        return datasets.DatasetDict(
            {split: load_split(folder / split, folder) for split in splits}
        )


def load_split(folder: Path, root: Path) -> datasets.Dataset:
    """Return one table that `save_to_disk` wrote. The files that its index lists are examined before they are read."""
    files = listed(folder / STATE_FILE, root, "_data_files", list[dict[str, FileName]])
    check_folder(folder, root)
    missing = [name for file in files for name in file.values() if not (folder / name).exists()]
    check(
        not missing, f"{folder / STATE_FILE} names {shortlist(missing, 1)}, which does not exist"
    )
    try:
        dataset = datasets.Dataset.load_from_disk(str(folder))
    except IndexError:
        raise BadContent("a split has no rows") from None
    plain = [
        name for name, feature in dataset.features.items() if set(kinds_of(feature)) <= set(PLAIN)
    ]
    return dataset if len(plain) == len(dataset.features) else dataset.select_columns(plain)


def listed(path: Path, root: Path, key: str, hint: Any) -> Any:
    try:
        return of_type(hint, read_object(read_whole(path, root)).get(key), key)
    except BadContent as error:
        raise BadContent(f"{path}: {error}") from None


def load_hub(cfg: RecordsConfig, split: str, scratch: Path) -> datasets.Dataset:
    """Return a split of a Hub data set, or of a folder laid out like one.

    A Hub data set is kept in the library's cache (HF_HOME), from which offline machines can read it. Nothing is cached
    there for a folder, such as a cloned repository.
    """
    path = local_path(cfg.path)
    where = (
        {"path": str(path), "cache_dir": str(scratch / "hub")}
        if path.is_dir()
        else {"path": cfg.path}
    )
    with naming_hub(cfg):
        builder = open_builder(**where, name=cfg.name, revision=cfg.revision)
        builder.download_and_prepare()
        return builder.as_dataset(split=split)
