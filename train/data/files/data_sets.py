"""Data sets that `datasets` reads, of a folder or the Hub, restricted to their files.

Their description (the head of README.md) says which files they consist of. It comes from outside, so only files of the
data set are looked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from train.config import check

HUB_FILES = "hf://datasets/"
SHOWN_CHARS = 200  # of a name in an error


def open_builder(path: str, *, data_files: str | None = None, **options: Any) -> Any:
    """Return the builder of `datasets` for a local folder, a Hub id or a format. Its files are found, but not read.

    `data_files` is named by the user instead of the files of the data set; it may be anywhere. `options` are those of
    `datasets.load_dataset_builder`.

    Raises InputError if the description of the data set names a file that is outside its folder, or is not below the
    Hub id at its revision.
    """
    import datasets  # it takes a second or more, and not every source of text needs it
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

    # The library asks for a file, also at http://, as soon as it has read its name: a check of the result is too late.
    library.resolve_pattern = resolve
    try:
        builder = datasets.load_dataset_builder(path, data_files=data_files, **options)
    finally:
        library.resolve_pattern = find
        name = "".join(outside[:1])[:SHOWN_CHARS]
        hint = "which is not a file of this data set and is not read; name it yourself if you trust it"
        check(not outside, f"data set {path}: its description (README.md) names {name!r}, {hint}")
    files = {str(file) for part in (builder.config.data_files or {}).values() for file in part}
    unchecked = f"datasets {datasets.__version__} finds files in a way that is not known here; install another version"
    check(files <= found, f"data set {path}: {unchecked}")
    return builder


def is_within(path: str, base_path: str, name: str) -> bool:
    """Return whether a file or pattern, relative to `base_path` or whole, belongs to the data set `path`.

    A link in a folder must lead to its files, or to those that the Hub's cache keeps with it.
    """
    if "::" in name or ".." in name.split("/"):
        return False
    name = name if "://" in name else os.path.join(base_path, name)  # noqa: PTH118 (of the Hub, too)
    if Path(path).is_dir():
        root = Path(path).resolve()
        blobs = [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []
        target = Path(name).resolve()
        return "://" not in name and any(target.is_relative_to(folder) for folder in (root, *blobs))
    commit, _, folder = base_path.removeprefix(f"{HUB_FILES}{path}@").partition("/")
    return ".." not in folder.split("/") and name.startswith(f"{HUB_FILES}{path}@{commit}/")
