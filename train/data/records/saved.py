"""Data sets that save_to_disk of `datasets` wrote. They may come from elsewhere, so what is read is examined first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets

from train.config import check, shortlist
from train.data.files.data_sets import PLAIN, kinds_of
from train.data.files.errors import LIBRARY_ERRORS, naming
from train.data.records.located import SPLITS_FILE, STATE_FILE
from train.storage.foreign import check_folder, read_whole
from train.storage.schema import BadContent, FileName, of_type, read_object


def saved_splits(
    folder: Path, location: str, names: dict[str, str | None]
) -> dict[str, datasets.Dataset]:
    """Return the splits in `names`. A data set without splits stands for each. Raises InputError if one is missing."""
    saved = load_saved(folder, location)
    found = {}
    for split, name in names.items():
        if isinstance(saved, datasets.Dataset):
            alone = "is one data set without splits"
            check(name is None, f"data.path={location} {alone}; leave out {name}")
            found[split] = saved
        else:
            name = name or split
            known = f"there are {shortlist(saved)}"
            check(name in saved, f"data.path={location} has no split {name}; {known}")
            found[split] = saved[name]
    return found


def load_saved(folder: Path, name: str | None = None) -> Any:
    """Return the Dataset or DatasetDict that `save_to_disk` wrote, memory-mapped. Errors name `name` or `folder`.

    Only columns of types in PLAIN are kept: the library would open the file or URL that a row of an image column names.
    Raises InputError if the data set cannot be read, or if a file is not a regular file inside the folder.
    """
    with naming(f"{name or folder} cannot be read as a saved data set", LIBRARY_ERRORS):
        index = folder / SPLITS_FILE
        if not index.exists():
            return load_split(folder, folder)
        splits = entry_of(index, folder, "splits", list[FileName])
        return datasets.DatasetDict(
            {split: load_split(folder / split, folder) for split in splits}
        )


def load_split(folder: Path, root: Path) -> datasets.Dataset:
    """Return one table that `save_to_disk` wrote. The files that its index lists are examined before they are read."""
    index = folder / STATE_FILE
    files = entry_of(index, root, "_data_files", list[dict[str, FileName]])
    check_folder(folder, root)
    names = [name for file in files for name in file.values()]
    missing = shortlist([name for name in names if not (folder / name).exists()], 1)
    check(not missing, f"{index} names {missing}, which does not exist")
    try:
        dataset = datasets.Dataset.load_from_disk(str(folder))
    except IndexError:
        raise BadContent("a split has no rows") from None
    plain = [
        name for name, feature in dataset.features.items() if set(kinds_of(feature)) <= set(PLAIN)
    ]
    if len(plain) == len(dataset.features):
        return dataset
    return dataset.select_columns(plain)


def entry_of(path: Path, root: Path, key: str, hint: Any) -> Any:
    """Return an entry of a JSON object in a file inside `root`. Raises BadContent unless it is of the type `hint`."""
    try:
        return of_type(hint, read_object(read_whole(path, root)).get(key), key)
    except BadContent as error:
        raise BadContent(f"{path}: {error}") from None
