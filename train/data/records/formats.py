"""Labelled rows as tables: CSV, JSON lines, Parquet and SQuAD files, what save_to_disk wrote, and the Hub."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets

from train.config import ColumnsConfig, RecordsConfig, S3Config, check
from train.data.files.errors import LIBRARY_ERRORS, naming
from train.data.files.rows import BATCH_ROWS, Values, csv_dialect, csv_rows, json_rows, open_parquet
from train.data.files.text import open_text
from train.data.records.conll import conll_rows
from train.data.records.sources import (
    FILE_FORMATS,
    SUFFIXES,
    File,
    S3File,
    layout,
    naming_hub,
    s3_folder,
    saved_files,
    split_files,
    split_names,
)
from train.data.records.squad import SQUAD_START, squad_rows
from train.storage.folders import is_s3, local_path, sha256_json
from train.storage.schema import BadContent, FileName, of_type, read_object

PARQUET_START = b"PAR1"
SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"
START_CHARS = 4096  # in which SQuAD differs from other JSON
MAX_FIELD_CHARS = 2**20  # of CSV; an open quote swallows no more than this

LocatedRow = tuple[str, Values]  # where a row is, as file.csv:17, and its values


@dataclass(frozen=True)
class Table:
    """Rows of one file or split, in their order; `rows` begins anew at every call and holds few of them in memory."""

    where: str  # as errors name it
    rows: Callable[[], Iterator[LocatedRow]]
    columns: list[str] | None = None  # None: those of the first rows
    class_names: dict[str, list[str]] = field(default_factory=dict)  # of columns that hold numbers: what they mean
    keys: ColumnsConfig | None = None  # of a format whose columns have names of their own


def open_splits(cfg: RecordsConfig, wanted: Collection[str], s3: S3Config, scratch: Path) -> dict[str, list[Table]]:
    """The tables of each split. Formats that have columns are read for the `wanted` ones alone; files in S3 come to
    `scratch`. InputError if one is missing, or is in the training data and in a validation split.
    """
    source = layout(cfg, s3)
    if source == "files":
        files = split_files(cfg, s3)
        return {split: [file_table(file, cfg, wanted, scratch) for file in paths] for split, paths in files.items()}
    names = split_names(cfg)
    if source == "saved":
        splits = saved_splits(saved_folder(cfg, s3, scratch), cfg.path, names)
    else:
        splits = {split: load_hub(cfg, name or "train", scratch) for split, name in names.items()}
    sources = {split: f"data set {cfg.path}, split {name or 'train'}" for split, name in names.items()}
    return {split: [dataset_table(splits[split], where, wanted)] for split, where in sources.items()}


def file_table(file: File, cfg: RecordsConfig, wanted: Collection[str], scratch: Path) -> Table:
    """The rows of one file, which errors name as it is named where it is."""
    path, name = local_copy(file, scratch), str(file)
    form = format_of(path, name, cfg)
    if form == "parquet":
        return parquet_table(path, name, wanted)
    if form == "squad":
        return Table(name, lambda: squad_rows(path, name, cfg.encoding), keys=ColumnsConfig(id="id"))

    def rows() -> Iterator[LocatedRow]:
        with open_text(path, cfg.encoding) as (text, _):
            if form == "csv":
                lines = csv_lines(text, name, cfg)
            else:
                lines = (conll_rows if form == "conll" else json_rows)(text, cfg.encoding)
            yield from ((f"{name}:{number}", row) for number, row in lines)

    return Table(name, rows, keys=ColumnsConfig() if form == "conll" else None)


def format_of(path: Path, name: str, cfg: RecordsConfig) -> str:
    """One of FILE_FORMATS, by `data.format` or the file's name and, of .json, its first characters. Parquet is Parquet
    whatever it is said to be: read as text it would hold no row.
    """
    with naming(f"{name} cannot be read", (OSError,)), path.open("rb") as file:
        if file.read(len(PARQUET_START)) == PARQUET_START:
            return "parquet"
    if cfg.format in FILE_FORMATS:
        return cfg.format
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    known = ", ".join(FILE_FORMATS)
    check(suffix in SUFFIXES, f"{name}: the name does not say the format; set data.format to one of: {known}")
    if suffix != ".json":
        return "csv" if suffix == ".tsv" else suffix[1:]
    with open_text(path, cfg.encoding) as (text, _):
        start = text.read(START_CHARS)
    hint = "write one object a line, as jq -c '.[]' does"
    check(not start.lstrip().startswith("["), f"{name}: one JSON list, which cannot be read in pieces; {hint}")
    return "squad" if SQUAD_START.match(start) else "jsonl"


def csv_lines(text: Iterator[str], name: str, cfg: RecordsConfig) -> Iterator[tuple[int, Values]]:
    """Rows in the dialect of the settings; files whose names end in .tsv have tabs by themselves."""
    is_tsv = name.lower().removesuffix(".gz").endswith(".tsv")
    delimiter = "\t" if is_tsv and cfg.delimiter == "," else cfg.delimiter
    marks = [mark for mark in (delimiter, cfg.quote, cfg.escape) if mark is not None]
    usable = len(set(marks)) == len(marks) and not set(marks) & set("\r\n")
    check(usable, f"data.delimiter, data.quote and data.escape are {marks}: they must differ, and be no line ends")
    dialect = csv_dialect(delimiter, cfg.quote, cfg.escape)
    return csv_rows(text, name, cfg.encoding, header=cfg.header, max_field_chars=MAX_FIELD_CHARS, dialect=dialect)[1]


def parquet_table(path: Path, name: str, wanted: Collection[str]) -> Table:
    """Names of labels that `datasets` wrote into the file count."""
    with open_parquet(path, name) as file:
        schema = file.schema_arrow
        features = datasets.Features.from_arrow_schema(schema)

    def rows() -> Iterator[LocatedRow]:
        with open_parquet(path, name) as file:
            yield from numbered(file.iter_batches(BATCH_ROWS, columns=present(wanted, schema.names)), name)

    return Table(name, rows, schema.names, class_names(features))


def dataset_table(dataset: datasets.Dataset, where: str, wanted: Collection[str]) -> Table:
    columns = list(dataset.column_names)

    def rows() -> Iterator[LocatedRow]:
        with naming(f"{where} cannot be read to its end", LIBRARY_ERRORS):
            arrow = dataset.select_columns(present(wanted, columns)).with_format("arrow")
            yield from numbered(arrow.iter(BATCH_ROWS), where)

    return Table(where, rows, columns, class_names(dataset.features))


def present(wanted: Collection[str], columns: list[str]) -> list[str]:
    """The wanted ones of a table's columns; a name with a dot wants the column before the dot."""
    return [name for name in columns if any(name == item or item.startswith(f"{name}.") for item in wanted)]


def class_names(features: datasets.Features) -> dict[str, list[str]]:
    inner = {name: getattr(item, "feature", item) for name, item in features.items()}  # of a list, that of its items
    return {name: item.names for name, item in inner.items() if isinstance(item, datasets.ClassLabel)}


def numbered(batches: Any, where: str) -> Iterator[LocatedRow]:
    rows = (row for batch in batches for row in batch.to_pylist())
    return ((f"{where}, row {number}", row) for number, row in enumerate(rows, 1))


def local_copy(file: File, scratch: Path) -> Path:
    """A file as it lies here, or its copy below `scratch`."""
    return file.download(s3_copies(file.location, scratch)) if isinstance(file, S3File) else file


def s3_copies(location: str, scratch: Path) -> Path:
    return scratch / "s3" / sha256_json(location)[:16]


# ---- what `datasets` holds -----------------------------------------------------------------------------------------


def saved_folder(cfg: RecordsConfig, s3: S3Config, scratch: Path) -> Path:
    """The folder of such a data set on this machine."""
    folder = local_path(cfg.path) if not is_s3(cfg.path) else s3_copies(s3_folder(cfg.path, s3).location, scratch)
    for file in saved_files(cfg, s3):
        local_copy(file, scratch)
    return folder


def saved_splits(folder: Path, location: str, names: dict[str, str | None]) -> dict[str, datasets.Dataset]:
    """The splits that the settings name; a single data set is the training split."""
    saved = load_saved(folder, location)
    if isinstance(saved, datasets.Dataset):
        given = [name for name in names.values() if name is not None]
        check(not given, f"data.path={location} holds one data set, not splits {', '.join(given)}; leave them out")
        return {"train": saved}
    wanted = {split: name or "train" for split, name in names.items()}
    missing = sorted(set(wanted.values()) - set(saved))
    check(not missing, f"data.path={location} has no split {', '.join(missing)}; there are {', '.join(saved)}")
    return {split: saved[name] for split, name in wanted.items()}


def load_saved(folder: Path, name: str | None = None) -> Any:
    """What `save_to_disk` wrote, a Dataset or a DatasetDict, memory-mapped. Its index names files, which are checked
    before the library opens them: InputError if it cannot be read or one is outside its folder. `name`: how errors name
    it, if not by its folder.
    """
    with naming(f"{name or folder} cannot be read as a saved data set", LIBRARY_ERRORS):
        check_saved(folder)
        return datasets.load_from_disk(str(folder))


def check_saved(folder: Path) -> None:
    """Raises BadContent for an index with a name that leads out of the folder."""
    parts, index = [folder], folder / SPLITS_FILE
    if index.is_file():
        parts = [folder / split for split in listed(index, "splits", list[FileName])]
    for state in [part / STATE_FILE for part in parts]:
        if state.is_file():
            listed(state, "_data_files", list[dict[str, FileName]])


def listed(path: Path, key: str, hint: Any) -> Any:
    try:
        return of_type(hint, read_object(path.read_bytes()).get(key), key)
    except BadContent as error:
        raise BadContent(f"{path}: {error}") from None


def load_hub(cfg: RecordsConfig, split: str, scratch: Path) -> datasets.Dataset:
    """A split of a Hub data set, or of a folder laid out like one. A Hub id uses the library's own cache (HF_HOME),
    which is how data gets to machines that are offline; a folder, as of a cloned repository, leaves no trace there.
    """
    path = local_path(cfg.path)
    where = {"path": str(path), "cache_dir": str(scratch / "hub")} if path.is_dir() else {"path": cfg.path}
    with naming_hub(cfg):
        return datasets.load_dataset(**where, name=cfg.name, revision=cfg.revision, split=split)
