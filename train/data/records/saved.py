"""What `save_to_disk` of `datasets` wrote. Its index names files: they are checked before the library opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.data.files.errors import LIBRARY_ERRORS, naming
from train.storage.schema import BadContent, FileName, of_type, read_object

SPLITS_FILE, STATE_FILE = "dataset_dict.json", "state.json"


def load_saved(folder: Path, name: str | None = None) -> Any:
    """A Dataset or a DatasetDict, memory-mapped. InputError if it cannot be read or names files outside its folder.
    `name`: how errors name it, if not by its folder.
    """
    import datasets  # takes a second or more

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
