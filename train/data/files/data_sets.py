"""Data sets that the library `datasets` reads from a folder or the Hub, restricted to plain rows in their own files.

A data set's description (the header of its README.md) can name any file and any type of column, so it is not trusted:
the name of a file outside the data set is rejected before the library looks for that file. Only the library's readers
in BUILDERS are used, and only types that are stored as they are: for an image, the library would open the file or URL
that a row names, and from a WebDataset it would load pickled tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from train.config import check
from train.storage.foreign import check_inside, check_regular, is_inside

HUB_FILES = "hf://datasets/"
SHOWN_CHARS = 200  # maximum length of a name in an error
BUILDERS = ("arrow", "csv", "json", "parquet", "text")
OWN_CACHE = "cache"  # reads what one of BUILDERS wrote to this user's cache when the Hub answered
# files that the library reads in any folder
DESCRIPTIONS = ("README.md", "dataset_infos.json", ".huggingface.yaml")
INNER = ("List", "LargeList")  # types of columns that contain another type
# names, since older versions lack some of these types
PLAIN = (*INNER, "Value", "ClassLabel", "Json")


def open_builder(path: str, *, data_files: str | None = None, **options: Any) -> Any:
    """Return a `datasets` builder for a local folder or a Hub id. Its files have been found but not read.

    `data_files` replaces the files in the description; the user chose it, so it may match files anywhere. `options`:
    see `datasets.load_dataset_builder`.

    Raises InputError if the description names a file outside the folder or, on the Hub, outside this revision of the
    repository, or if the files are not of a format in BUILDERS. Once the files are read, the builder raises InputError
    if a column has a type that is not plain.
    """
    import datasets  # imported here: importing takes over a second, and some sources do not need it

    check_descriptions(Path(path))
    with only_own_files(path, data_files) as found:
        builder = datasets.load_dataset_builder(path, data_files=data_files, **options)
    files = {str(file) for part in (builder.config.data_files or {}).values() for file in part}
    ok = files <= found or builder.name == OWN_CACHE
    check(
        ok,
        f"data set {path}: datasets {datasets.__version__} found files that could not be checked; install another "
        "version",
    )
    check_builder(builder, path)
    return builder


@contextmanager
def only_own_files(path: str, data_files: str | None) -> Iterator[set[str]]:
    """Let the library find only files of the data set, or `data_files`, in this block. Yields the files found.

    The library requests a file, even over http://, as soon as it resolves the name, so names are checked before that.
    Raises InputError if another file is named.
    """
    from datasets import data_files as library

    resolve_pattern = library.resolve_pattern
    outside: list[str] = []
    found: set[str] = set()

    def resolve(pattern: str, base_path: str, *args: Any, **kwargs: Any) -> list[str]:
        is_users = data_files is not None and pattern == data_files
        if not is_users and not is_within(path, base_path, pattern):
            outside.append(pattern)
            raise FileNotFoundError(pattern)
        files: list[str] = resolve_pattern(pattern, base_path, *args, **kwargs)
        found.update(files)
        if not is_users:
            outside.extend(file for file in files if not is_within(path, base_path, file))
        return files

    library.resolve_pattern = resolve
    try:
        yield found
    finally:
        library.resolve_pattern = resolve_pattern
        name = "".join(outside[:1])[:SHOWN_CHARS]
        check(
            not outside,
            f"data set {path}: its description (README.md) names {name!r}, which is not a file of this data set and "
            "is not read; download the files you trust and use those",
        )


def check_descriptions(folder: Path) -> None:
    """Raise InputError if a description in a local folder is not a regular file of it. A pipe could block for ever."""
    for path in (folder / name for name in DESCRIPTIONS):
        if path.exists():
            check_regular(path, path.stat())
            check_inside(path, folder)


def check_builder(builder: Any, path: str) -> None:
    """Raise InputError unless a builder is listed. Make it raise InputError if it finds columns that are not plain."""
    known = [f"datasets.packaged_modules.{name}.{name}" for name in (*BUILDERS, OWN_CACHE)]
    check(
        type(builder).__module__ in known,
        f"data set {path} is of the kind {builder.name}, which is not read here; only {', '.join(BUILDERS)} are",
    )
    find_splits = builder._split_generators

    def splits_of_plain_columns(*args: Any, **kwargs: Any) -> Any:
        # some builders know the types of the columns only now
        splits = find_splits(*args, **kwargs)
        check_plain(builder, path)
        return splits

    builder._split_generators = splits_of_plain_columns
    check_plain(builder, path)


def check_plain(builder: Any, path: str) -> None:
    for features in (builder.info.features, getattr(builder.config, "features", None)):
        for column, feature in (features or {}).items():
            other = next((kind for kind in kinds_of(feature) if kind not in PLAIN), None)
            check(
                other is None,
                f"data set {path}: column {str(column)[:SHOWN_CHARS]!r} has the type {other}; only text, numbers, "
                "lists of them and class labels are read; save the columns that you need as Parquet, CSV or JSON "
                "lines",
            )


def kinds_of(feature: Any) -> Iterator[str]:
    """Yield the name of a column's type, and of the types inside it."""
    if isinstance(feature, dict):
        yield from (kind for each in feature.values() for kind in kinds_of(each))
    elif isinstance(feature, list | tuple):
        yield from (kind for each in feature for kind in kinds_of(each))
    else:
        kind = type(feature).__name__
        yield kind
        if kind in INNER:
            yield from kinds_of(feature.feature)


def is_within(path: str, base_path: str, name: str) -> bool:
    """Return whether a file or pattern, relative to `base_path` or absolute, belongs to the data set `path`.

    A symbolic link may lead only to a file in the folder, or to a blob of the same repository in the Hub's cache.
    """
    if "::" in name or ".." in name.split("/"):
        return False
    if "://" not in name:
        name = os.path.join(base_path, name)  # noqa: PTH118 (it may be a URL)
    if Path(path).is_dir():
        return "://" not in name and is_inside(Path(name), Path(path))
    commit, _, folder = base_path.removeprefix(f"{HUB_FILES}{path}@").partition("/")
    return ".." not in folder.split("/") and name.startswith(f"{HUB_FILES}{path}@{commit}/")
