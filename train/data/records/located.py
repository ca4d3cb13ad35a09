"""Files of labelled data, on disk or in S3."""

from __future__ import annotations

import glob
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import EvaluatedConfig, InputError, RecordsConfig, S3Config, check, shortlist
from train.config.data import SUFFIXES, is_named
from train.data.files.errors import naming
from train.data.files.find import check_links, is_match, matching, walk
from train.storage.folders import is_s3, local_path, sha256_json
from train.storage.schema import Head, RelativePath, checked

if TYPE_CHECKING:
    from train.storage.s3 import S3Folder

SPLITS_FILE = "dataset_dict.json"
STATE_FILE = "state.json"
# names of files that save_to_disk of `datasets` writes
MARKS = {SPLITS_FILE, STATE_FILE, "dataset_info.json"}
MAX_LISTED = 5  # maximum files named in an error


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

    def copy(self, scratch: Path) -> Path:
        """Copy the file, once, into the folder of its location's copies, and return its path."""
        path = scratch / "s3" / sha256_json(self.location)[:16] / self.name
        if path.exists():
            return path
        self.head()  # raises InputError if it does not exist
        with naming(f"{path} cannot be written", (OSError,)):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.folder.download(self.name, path)
        return path


File = Path | S3File


def local_copy(file: File, scratch: Path) -> Path:
    """Return the path of a local file, or of a copy inside `scratch` if the file is in S3."""
    if isinstance(file, S3File):
        return file.copy(scratch)
    return file


def stamp(file: File) -> list[Any]:
    """Return facts of a file that change when its content does."""
    if isinstance(file, S3File):
        return [str(file), file.folder.endpoint, *file.head()]
    with naming(f"{file} cannot be read", (OSError,)):
        status = file.stat()
    # ctime covers all changes: a copy that keeps the mtime of its original has a new ctime.
    return [str(file.absolute()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def all_files(location: str) -> list[Path]:
    """Return the files of a folder on disk. Raises InputError if there is no such folder."""
    root = local_path(location)
    check(root.is_dir() and not is_s3(location), f"data.path={location} is not a folder on disk")
    return [path for path in sorted(root.rglob("*")) if path.is_file()]


def find(location: str, key: str, pattern: str | None, s3: S3Config) -> list[File]:
    """Return the files in `location` (or next to it, if it is a file) that match `pattern`; None: the only file.

    `key`: the setting of the pattern, named in errors. Raises InputError if there is none.
    """
    if is_s3(location):
        return find_in_s3(location, key, pattern, s3)
    root = local_path(location)
    check(root.exists(), f"data.path={location}: there is no such file or folder")
    is_readable = root.is_file() or root.is_dir()
    check(is_readable, f"data.path={location} is neither a file nor a folder")
    with naming(f"data.path={location} cannot be read", (OSError,)):
        if pattern is not None:
            return find_beside(root, key, str(local_path(pattern)))
        if root.is_file():
            return [root]
        names = [path.relative_to(root).as_posix() for path in walk(root) if is_named(path.name)]
        return [root / only_one(location, key, names)]


def find_beside(root: Path, key: str, pattern: str) -> list[File]:
    """Return the files that match `pattern` in the folder `root`, or beside the file `root`."""
    # A file in a folder that the user named may lead nowhere else; a path that the user typed may.
    inside: Path | None = root
    if root.is_file():
        root = root.parent
        inside = None
    if Path(pattern).is_absolute() or ".." in Path(pattern).parts:
        inside = None
    exact = root / pattern  # a file's name may contain characters that are special in globs
    if exact.is_file():
        check_links([exact], inside)
        return [exact]
    found = matching(str(Path(glob.escape(str(root)), pattern)), inside)
    check(bool(found), f"{key}={pattern}: there is no file {exact}")
    return [*found]


def find_in_s3(location: str, key: str, pattern: str | None, s3: S3Config) -> list[File]:
    from train.storage.s3 import S3Folder  # imported here because boto3 is slow to import

    if is_named(location):
        location, _, own = location.rpartition("/")
        pattern = pattern or own
    folder = S3Folder(location, s3)
    if pattern is None:
        names = [only_one(folder.location, key, list(filter(is_named, folder.names())))]
    elif glob.has_magic(pattern):
        names = [name for name in folder.names() if name == pattern or is_match(name, pattern)]
        check(bool(names), f"{key}={pattern}: there is no such file in {folder.location}")
    else:
        names = [checked(RelativePath, pattern, key)]  # needs no permission to list
    return [S3File(folder, folder.location, name) for name in names]


def only_one(location: str, key: str, names: Collection[str]) -> str:
    """Return the only name. Raises InputError if there is none, or several: a guess could choose the test set."""
    ends = f"no file that ends in {', '.join(SUFFIXES)} (or these and .gz)"
    check(bool(names), f"data.path={location} contains {ends}")
    use = {"data.train": "training"}.get(key, "evaluation")
    many = f"contains {len(names)} files ({shortlist(sorted(names), MAX_LISTED)})"
    say = f"say which is for {use}: {key}=NAME, or a glob"
    check(len(names) == 1, f"data.path={location} {many}; {say}")
    return next(iter(names))


def split_names(cfg: RecordsConfig) -> dict[str, str | None]:
    """Return each split's file, glob or name in the settings; None: the only file, or the split of the same name."""
    names: dict[str, str | None] = {}
    reads_train = not isinstance(cfg, EvaluatedConfig) or cfg.holds_out
    if reads_train:
        names["train"] = cfg.train
    if cfg.validation is not None or not reads_train:
        names["validation"] = cfg.validation
    return {**names, **cfg.more_validation}
