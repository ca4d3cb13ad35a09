"""Data sets that the library `datasets` reads from a folder or the Hub, restricted to their own files.

A data set's description (the header of its README.md) can name any file, so it is not trusted: the name of a file
outside the data set is rejected before the library looks for that file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from train.config import check

HUB_FILES = "hf://datasets/"
SHOWN_CHARS = 200  # maximum length of a name in an error


def open_builder(path: str, *, data_files: str | None = None, **options: Any) -> Any:
    """Return a `datasets` builder for a local folder, a Hub id or a format. Its files have been found but not read.

    `data_files` replaces the files in the description; the user chose it, so it may match files anywhere. `options`:
    see `datasets.load_dataset_builder`.

    Raises InputError if the description names a file outside the folder or, on the Hub, outside this revision of the
    repository.
    """
    import datasets  # imported here: importing takes over a second, and some sources do not need it
    from datasets import data_files as library

    find, outside, found = library.resolve_pattern, list[str](), set[str]()

    def resolve(pattern: str, base_path: str, *args: Any, **kwargs: Any) -> list[str]:
        is_users = data_files is not None and pattern == data_files
        if not is_users and not is_within(path, base_path, pattern):
            outside.append(pattern)
            raise FileNotFoundError(pattern)
        files: list[str] = find(pattern, base_path, *args, **kwargs)
        outside.extend(file for file in files if not is_users and not is_within(path, base_path, file))
        found.update(files)
        return files

    # The library requests a file, even over http://, as soon as it resolves the name, so names are checked before that.
    library.resolve_pattern = resolve
    try:
        builder = datasets.load_dataset_builder(path, data_files=data_files, **options)
    finally:
        library.resolve_pattern = find
        name = "".join(outside[:1])[:SHOWN_CHARS]
        hint = "which is not a file of this data set and is not read; download the files you trust and use those"
        check(not outside, f"data set {path}: its description (README.md) names {name!r}, {hint}")
    files = {str(file) for part in (builder.config.data_files or {}).values() for file in part}
    unchecked = f"datasets {datasets.__version__} found files that could not be checked; install another version"
    check(files <= found, f"data set {path}: {unchecked}")
    return builder


def is_within(path: str, base_path: str, name: str) -> bool:
    """Return whether a file or pattern, relative to `base_path` or absolute, belongs to the data set `path`.

    A symbolic link may lead only to a file in the folder, or to a blob of the same repository in the Hub's cache.
    """
    if "::" in name or ".." in name.split("/"):
        return False
    name = name if "://" in name else os.path.join(base_path, name)  # noqa: PTH118 (it may be a URL)
    if Path(path).is_dir():
        root = Path(path).resolve()
        blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
        target = Path(name).resolve()
        return "://" not in name and any(target.is_relative_to(folder) for folder in (root, *blobs))
    commit, _, folder = base_path.removeprefix(f"{HUB_FILES}{path}@").partition("/")
    return ".." not in folder.split("/") and name.startswith(f"{HUB_FILES}{path}@{commit}/")
