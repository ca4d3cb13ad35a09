"""The location and version of labelled data: files on disk or in S3, a folder that save_to_disk wrote, or the Hub."""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
from datasets.exceptions import DatasetsError

from train.config import InputError, RecordsConfig, S3Config, check, shortlist
from train.config.data import SUFFIXES, is_named
from train.data.files.data_sets import open_builder
from train.data.files.errors import LIBRARY_ERRORS, naming
from train.data.files.find import check_links, is_match, matching, walk
from train.storage.folders import LocalFolder, at_once, is_s3, local_path, sha256_json
from train.storage.hub_access import asking_hub, is_at_hub, why_missing
from train.storage.schema import Head, RelativePath, checked

if TYPE_CHECKING:
    from train.storage.s3 import S3Folder

FILE_FORMATS = ("csv", "jsonl", "parquet", "squad", "conll")
# names of files that save_to_disk writes
SAVED_MARKS = {
    "dataset_dict.json",
    "dataset_info.json",
    "state.json",
}
NO_FILE = "neither a regular file nor a folder (a pipe can be read only once, and may not end): save it as a file"
MAX_LISTED = 5  # maximum files named in an error
NO_ROWS = ""  # the value of data.train in a run without training, which reads no training rows
# These settings do not change which rows are read.
NOT_READING = ("path", "num_workers", "verify", "cache_dir", "lengths", "max_bad_rows")


def split_names(cfg: RecordsConfig) -> dict[str, str | None]:
    """Return each split's file, glob or name in the settings; None: the only file, or the split of the same name."""
    if cfg.train == NO_ROWS:
        return {"validation": cfg.validation, **cfg.more_validation}
    validation = {} if cfg.validation is None else {"validation": cfg.validation}
    return {"train": cfg.train, **validation, **cfg.more_validation}


def version(cfg: RecordsConfig, s3: S3Config) -> str:
    """Return a sha256 that changes when the data or the settings for reading it change. No data is read.

    It covers the names, sizes and times of files, the ETags in S3, or the commit on the Hub. Raises InputError in the
    same cases as `open_splits`.
    """
    source = layout(cfg, s3)
    if source == "files":
        seen: Any = {
            split: list(at_once(stamp, files)) for split, files in split_files(cfg, s3).items()
        }
    elif source == "saved" or (not is_s3(cfg.path) and local_path(cfg.path).is_dir()):
        seen = list(at_once(stamp, saved_files(cfg, s3)))
    else:
        seen = hub_version(cfg)
    return sha256_json([settings_of(cfg), source, seen])


def settings_of(cfg: RecordsConfig) -> dict[str, Any]:
    """Return the settings that decide which rows are read, and from where."""
    where = cfg.path if is_s3(cfg.path) else str(local_path(cfg.path).absolute())
    return {
        "path": where,
        **{key: value for key, value in asdict(cfg).items() if key not in NOT_READING},
    }


def layout(cfg: RecordsConfig, s3: S3Config) -> str:
    """Return how `data.path` stores its splits: "files", "saved" (by save_to_disk of `datasets`) or "hub"."""
    if cfg.format != "auto":
        return "files" if cfg.format in FILE_FORMATS else cfg.format
    if is_s3(cfg.path):
        is_saved = not is_named(cfg.path) and SAVED_MARKS & s3_folder(cfg.path, s3).names_here()
        return "saved" if is_saved else "files"
    path = local_path(cfg.path)
    if path.is_dir():
        return "saved" if SAVED_MARKS & LocalFolder(path).names_here() else "files"
    return "hub" if is_at_hub(cfg.path) and not is_named(cfg.path) else "files"


@dataclass(frozen=True)
class S3File:
    folder: S3Folder = field(compare=False)
    location: str  # the folder's location
    name: str

    def __str__(self) -> str:
        return f"{self.location}/{self.name}"

    def head(self) -> Head:
        """Return the length and version of the file. Raises InputError if it does not exist."""
        head = self.folder.head(self.name)
        if head is None:
            raise InputError(f"{self}: there is no such file")
        return head

    def download(self, root: Path) -> Path:
        """Copy the file to a path inside `root`, and return that path."""
        path = root / self.name
        self.head()  # raises InputError if it does not exist
        with naming(f"{path} cannot be written", (OSError,)):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.folder.download(self.name, path)
        return path


File = Path | S3File


def stamp(file: File) -> list[Any]:
    """Return facts of a file that change when its content does."""
    if isinstance(file, S3File):
        head = file.head()
        return [str(file), file.folder.endpoint, *head]
    with naming(f"{file} cannot be read", (OSError,)):
        status = file.stat()
    # ctime covers all changes: a copy that keeps the mtime of its original has a new ctime.
    return [str(file.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def split_files(cfg: RecordsConfig, s3: S3Config) -> dict[str, list[File]]:
    """Return each split's files. Raises InputError if a file is missing, or is both in train and in another split."""
    keys = {split: f"data.{split}" for split in ("train", "validation")}
    files = {
        split: find(cfg.path, keys.get(split, f"data.more_validation.{split}"), pattern, s3)
        for split, pattern in split_names(cfg).items()
    }
    for split in files.keys() - {"train"}:
        both = set(files[split]) & set(files.get("train", ()))
        some = shortlist(sorted(map(str, both)), MAX_LISTED)
        check(not both, f"{some}: both in train and in {split}; name other files")
    return files


def find(location: str, key: str, pattern: str | None, s3: S3Config) -> list[File]:
    """Return the files in `location` (or next to it, if it is a file) that match `pattern`; None: the only file."""
    if is_s3(location):
        return list(find_in_s3(location, key, pattern, s3))
    root = local_path(location)
    check(root.exists(), f"data.path={location}: there is no such file or folder")
    check(root.is_file() or root.is_dir(), f"data.path={location} is {NO_FILE}")
    if root.is_file():
        if pattern is None:
            return [root]
        root = root.parent
    with naming(f"data.path={location} cannot be read", (OSError,)):
        if pattern is None:
            names = [
                path.relative_to(root).as_posix() for path in walk(root) if is_named(path.name)
            ]
            return [root / only_one(location, key, names)]
        pattern = str(local_path(pattern))
        exact = root / pattern  # a file's name may contain characters that are special in globs
        # What is in a folder that the user named may lead nowhere else; a path that the user typed may.
        is_typed = (
            local_path(location).is_file()
            or Path(pattern).is_absolute()
            or ".." in Path(pattern).parts
        )
        if exact.is_file():
            check_links([exact], None if is_typed else root)
            return [exact]
        paths = matching(str(Path(glob.escape(str(root)), pattern)), None if is_typed else root)
    check(bool(paths), f"{key}={pattern}: there is no file {exact}")
    return list(paths)


def only_one(location: str, key: str, names: list[str]) -> str:
    """Return the only name. Raises InputError if there is none, or several: a guess could choose the test set."""
    check(
        bool(names),
        f"data.path={location} contains no file that ends in {', '.join(SUFFIXES)} (or these and .gz)",
    )
    many = f"data.path={location} contains {len(names)} files ({shortlist(names, MAX_LISTED)})"
    use = "training" if key == "data.train" else "evaluation"
    check(len(names) == 1, f"{many}; say which is for {use}: {key}=NAME, or a glob")
    return names[0]


def s3_folder(location: str, s3: S3Config) -> S3Folder:
    from train.storage.s3 import S3Folder  # imported here because boto3 is slow to import

    return S3Folder(location, s3)


def find_in_s3(location: str, key: str, pattern: str | None, s3: S3Config) -> list[S3File]:
    if is_named(location):
        location, _, own = location.rpartition("/")
        pattern = pattern or own
    folder = s3_folder(location, s3)
    # an exact name needs no permission to list
    if pattern is not None and not glob.has_magic(pattern):
        names: list[str] = [checked(RelativePath, pattern, key)]
    elif pattern is not None:
        listed = folder.names()
        names = (
            [pattern]
            if pattern in listed
            else [name for name in listed if is_match(name, pattern)]
        )
        check(bool(names), f"{key}={pattern}: there is no such file in {folder.location}")
    else:
        names = [only_one(folder.location, key, list(filter(is_named, folder.names())))]
    return [S3File(folder, folder.location, name) for name in names]


def saved_files(cfg: RecordsConfig, s3: S3Config) -> list[File]:
    """Return the files of a data set that save_to_disk wrote, on disk or in S3."""
    if is_s3(cfg.path):
        folder = s3_folder(cfg.path, s3)
        names = folder.names()
        check(bool(names), f"data.path={cfg.path} is empty")
        return [S3File(folder, folder.location, name) for name in names]
    root = local_path(cfg.path)
    check(
        root.is_dir(),
        f"data.path={cfg.path} is not a folder; data.format=saved reads what save_to_disk wrote",
    )
    return [path for path in sorted(root.rglob("*")) if path.is_file()]


def hub_version(cfg: RecordsConfig) -> str:
    """Return the commit that `datasets` reports for a Hub data set (offline: the commit in the library's cache)."""
    with naming_hub(cfg):
        commit = open_builder(cfg.path, name=cfg.name, revision=cfg.revision).hash
    if not isinstance(commit, str):
        raise InputError(
            f"data.path={cfg.path}: datasets reports no commit for it; set data.revision to a commit"
        )
    return commit


@contextmanager
def naming_hub(cfg: RecordsConfig) -> Iterator[None]:
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    hint = (
        ""
        if local_path(cfg.path).is_dir()
        else "; without the Hub, use a file or folder: data.path=FOLDER"
    )
    try:
        with asking_hub(cfg.path):
            yield
    except (*LIBRARY_ERRORS, DatasetsError) as error:
        raise InputError(
            f"data.path={cfg.path} cannot be read: {why_missing(cfg.path, error)}{hint}"
        ) from error
