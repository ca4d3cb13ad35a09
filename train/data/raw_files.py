"""Where the files of labelled data are: below a folder, here or in S3, found by name or glob, and opened as text."""

from __future__ import annotations

import codecs
import glob
import io
import re
import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import ColumnsConfig, RecordsConfig, S3Config, Unreachable, check
from train.data.documents import matching, naming, unpacked, walk
from train.hub_access import is_at_hub
from train.storage import is_s3, local_path, sha256_json
from train.untrusted import RelativePath, checked

if TYPE_CHECKING:
    from train.s3 import S3Folder

SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")  # .gz may follow
FILE_FORMATS = ("csv", "jsonl", "parquet", "squad")
SAVED_MARKS = {"dataset_dict.json", "dataset_info.json", "state.json"}  # of save_to_disk
SQUAD_START = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')
START_CHARS = 4096  # that tell SQuAD from other JSON
MAX_LISTED = 5  # files named in an error
# What no text holds: half of a surrogate pair, which JSON can escape, and the stand-ins of bytes that do not decode.
SURROGATE = re.compile("[\ud800-\udfff]")


class BadRow(Exception):
    """One row cannot be used; the message says why. Its place is told beside it."""


Found = tuple[str, "dict[str, Any] | BadRow"]  # where a row is, as file.csv:17, and its values by column


@dataclass(frozen=True)
class Table:
    """Rows of one file or split, in their order; `rows` begins anew at every call and holds few of them in memory."""

    place: str  # as errors name it
    rows: Callable[[], Iterator[Found]]
    columns: list[str] | None = None  # None: those of the first rows
    class_names: dict[str, list[str]] = field(default_factory=dict)  # of columns that hold numbers: what they mean
    keys: ColumnsConfig | None = None  # of a format whose columns have names of their own


def layout(cfg: RecordsConfig, s3: S3Config) -> str:
    """How `data.path` holds its splits: "files", "saved" (datasets' save_to_disk) or "hub"."""
    if cfg.format != "auto":
        return "files" if cfg.format in FILE_FORMATS else cfg.format
    if is_s3(cfg.path):
        saved = not is_named(cfg.path) and SAVED_MARKS & s3_folder(cfg.path, s3).names_here()
        return "saved" if saved else "files"
    path = local_path(cfg.path)
    if path.is_dir():
        return "saved" if any((path / mark).is_file() for mark in SAVED_MARKS) else "files"
    return "hub" if is_at_hub(cfg.path) and not is_named(cfg.path) else "files"


def is_named(name: str) -> bool:
    """The name says that it is a file, and of which format."""
    return name.lower().removesuffix(".gz").endswith(SUFFIXES)


def format_of(path: Path, cfg: RecordsConfig) -> str:
    """One of FILE_FORMATS, by `data.format` or the file's name and, of .json, its first characters."""
    if cfg.format in FILE_FORMATS:
        return cfg.format
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    known = ", ".join(FILE_FORMATS)
    check(suffix in SUFFIXES, f"{path}: the name does not tell the format; set data.format to one of: {known}")
    if suffix != ".json":
        return "csv" if suffix == ".tsv" else suffix[1:]
    with text_lines(path, cfg.encoding) as text:
        start = text.read(START_CHARS)
    hint = "write one object a line, as jq -c '.[]' does"
    check(not start.lstrip().startswith("["), f"{path}: one JSON list, which is not read bit by bit; {hint}")
    return "squad" if SQUAD_START.match(start) else "jsonl"


@dataclass(frozen=True)
class S3File:
    folder: S3Folder = field(compare=False)
    location: str  # of the folder
    name: str

    def __str__(self) -> str:
        return f"{self.location}/{self.name}"

    def head(self) -> Any:
        """boto3's answer about it; InputError if it is not there."""
        head = self.folder.head(self.name)
        check(head is not None, f"{self}: there is no such file")
        return head


def split_files(cfg: RecordsConfig, s3: S3Config, scratch: Path) -> dict[str, list[Path]]:
    """The files of each split on this machine: those in S3 are fetched to `scratch`. InputError as `split_places`."""
    places = split_places(cfg, s3)
    return {split: [fetched(place, scratch) for place in found] for split, found in places.items()}


def fetched(place: Path | S3File, scratch: Path) -> Path:
    """One place for each, however it is asked for."""
    return place if isinstance(place, Path) else download([place], scratch) / place.name


def split_places(cfg: RecordsConfig, s3: S3Config) -> dict[str, list[Path | S3File]]:
    """The files of each split that the settings name, where they are. InputError if one is missing, or is in the
    training data and in a validation split."""
    patterns: dict[str, tuple[str, str | None]] = {"train": ("data.train", cfg.train)}
    if cfg.validation is not None:
        patterns["validation"] = ("data.validation", cfg.validation)
    patterns |= {name: (f"data.more_validation.{name}", found) for name, found in cfg.more_validation.items()}
    files = {split: find(cfg.path, key, pattern, s3) for split, (key, pattern) in patterns.items()}
    for split, places in files.items():
        both = set(places) & set(files["train"]) if split != "train" else set()
        check(not both, f"{', '.join(sorted(map(str, both)))}: both in train and in {split}; name other files")
    return files


def find(location: str, key: str, pattern: str | None, s3: S3Config) -> list[Path | S3File]:
    """Files below `location` (beside it, if that is a file) that match; without a pattern the one that it is or has."""
    if is_s3(location):
        return list(find_in_s3(location, key, pattern, s3))
    root = local_path(location)
    check(root.exists(), f"data.path={location}: there is no such file or folder")
    if root.is_file():
        if pattern is None:
            return [root]
        root = root.parent
    with naming(f"data.path={location} cannot be read", (OSError,)):
        if pattern is None:
            names = [path.relative_to(root).as_posix() for path in walk(root) if is_named(path.name)]
            return [root / only_one(location, names)]
        pattern = str(local_path(pattern))
        named = root / pattern  # a name may hold what means something in a glob
        found = [named] if named.is_file() else matching(str(Path(glob.escape(str(root)), pattern)))
    check(bool(found), f"{key}={pattern}: there is no file {named}")
    return list(found)


def only_one(location: str, names: list[str]) -> str:
    """Which of several files is for training is not guessed: one may be the test set."""
    check(bool(names), f"data.path={location} holds no file that ends in {', '.join(SUFFIXES)} (or these and .gz)")
    some = ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
    many = f"data.path={location} holds {len(names)} files ({some})"
    check(len(names) == 1, f"{many}; say which is for training: data.train=NAME, or a glob")
    return names[0]


def s3_folder(location: str, s3: S3Config) -> S3Folder:
    from train.s3 import S3Folder  # boto3 is for those who need it

    return S3Folder(location, s3)


def find_in_s3(location: str, key: str, pattern: str | None, s3: S3Config) -> list[S3File]:
    if is_named(location):
        location, _, own = location.rpartition("/")
        pattern = pattern or own
    folder = s3_folder(location, s3)
    if pattern is not None and not glob.has_magic(pattern):  # needs no permission to list
        names: list[str] = [checked(RelativePath, pattern, key)]
    elif pattern is not None:
        deep = "**" in pattern
        names = [name for name in folder.names() if fnmatchcase(name, pattern)]  # here * takes slashes too
        names = [name for name in names if deep or name.count("/") == pattern.count("/")]
        check(bool(names), f"{key}={pattern}: there is no such file in {folder.location}")
    else:
        names = [only_one(folder.location, list(filter(is_named, folder.names())))]
    return [S3File(folder, folder.location, name) for name in names]


def download(files: list[S3File], scratch: Path) -> Path:
    """A folder with copies of files of one folder; what was fetched before and has not changed is not fetched again."""
    folder = files[0].folder
    heads = {file.name: file.head() for file in files}
    seen = [[name, head["ETag"], head["ContentLength"]] for name, head in heads.items()]
    root = scratch / "s3" / sha256_json([folder.location, folder.endpoint, seen])[:16]
    if root.is_dir():
        return root
    part = root.with_name(f".{root.name}.tmp-{uuid.uuid4().hex}")
    with naming(f"{part} cannot be written", (OSError,)):
        for name, _, size in seen:
            path = part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            folder.download(name, path)
            if path.stat().st_size != size:
                raise Unreachable(f"{folder.location}/{name}: {path.stat().st_size} bytes came instead of {size}")
        part.rename(root)
    return root


def saved_folder(cfg: RecordsConfig, s3: S3Config, scratch: Path) -> Path:
    """The folder of a data set that save_to_disk wrote, on this machine."""
    if is_s3(cfg.path):
        return download(saved_in_s3(cfg, s3), scratch)
    path = local_path(cfg.path)
    check(path.is_dir(), f"data.path={cfg.path} is no folder; data.format=saved reads what save_to_disk wrote")
    return path


def saved_in_s3(cfg: RecordsConfig, s3: S3Config) -> list[S3File]:
    folder = s3_folder(cfg.path, s3)
    names = folder.names()
    check(bool(names), f"data.path={cfg.path} holds nothing")
    return [S3File(folder, folder.location, name) for name in names]


def saved_places(cfg: RecordsConfig, s3: S3Config) -> list[Path | S3File]:
    """All files of such a folder, where they are."""
    if is_s3(cfg.path):
        return list(saved_in_s3(cfg, s3))
    root = saved_folder(cfg, s3, Path())
    return [path for path in sorted(root.rglob("*")) if path.is_file()]


@contextmanager
def text_lines(path: Path, encoding: str) -> Iterator[io.TextIOWrapper]:
    """A text file, packed or not, whose lines end in \\n and nothing else. Bytes that do not decode are surrogates."""
    hint = "; is data.encoding right?"
    with (
        naming(f"{path} cannot be read", (OSError, EOFError, zlib.error)),
        naming(f"{path} cannot be read", (UnicodeError,), hint),
        naming(f"data.encoding={encoding} is not known, try utf-8 or latin-1", (LookupError,)),
        path.open("rb") as raw,
        # utf-8-sig is utf-8 that drops a byte order mark.
        io.TextIOWrapper(
            unpacked(raw, path),
            encoding="utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding,
            errors="surrogateescape",
            newline="\n",
        ) as text,
    ):
        yield text


def unreadable(text: str, encoding: str) -> BadRow | None:
    """What is wrong with the characters of a text, if anything is."""
    if "\0" in text:
        return BadRow("a NUL character, which no text has; is data.encoding right?")
    found = None if text.isascii() else SURROGATE.search(text)
    if found is None:
        return None
    code = ord(found.group())
    if 0xDC80 <= code <= 0xDCFF:
        return BadRow(f"byte {code - 0xDC00:#04x} is not {encoding} (data.encoding)")
    return BadRow("half of a surrogate pair")
