"""The verification of files against a manifest, and of a manifest against its checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from train.config import InputError, check
from train.storage.folders import Folder, at_once, sha256_bytes, sha256_file, sha256_json
from train.storage.foreign import is_inside
from train.storage.schema import BadContent, FileEntry, shown

Item = TypeVar("Item")
SHOWN_DIGITS = 12  # digits of a sha256 in a message


def fault_of(
    entry: FileEntry, size: int | None, sha256: Callable[[], str] | None = None
) -> str | None:
    """Return how a file differs from its manifest entry, such as "is missing"; None if it does not differ.

    `size` is the length in bytes, or None if the file is missing. `sha256` computes the checksum; if it is None, only
    the length is compared.
    """
    if size is None:
        return "is missing"
    if size != entry["bytes"]:
        return f"has {size} bytes, the manifest says {entry['bytes']}"
    if sha256 is None:
        return None
    seen = sha256()
    if seen != entry["sha256"]:
        return (
            f"has sha256 {seen[:SHOWN_DIGITS]}, the manifest says {entry['sha256'][:SHOWN_DIGITS]}"
        )
    return None


def fault_of_file(path: Path, entry: FileEntry, *, checksum: bool) -> str | None:
    """Return the result of `fault_of` for a file on this machine."""
    if path.is_symlink() and not is_inside(path, path.parent):
        return "is a link that leads out of its folder"
    if path.is_file():
        size = path.stat().st_size
    else:
        size = None
    return fault_of(entry, size, (lambda: sha256_file(path)) if checksum else None)


def first_fault(examine: Callable[[Item], str | None], items: Iterable[Item]) -> str | None:
    """Return the fault that `examine` finds in the first faulty item, or None. Items are examined in parallel."""
    with closing(at_once(examine, items)) as faults:
        return next(filter(None, faults), None)


def check_entries(folder: Path, entries: Mapping[Any, FileEntry], *, checksums: bool) -> None:
    """Raise InputError if a file is missing or differs from its entry in length or, with `checksums`, in checksum."""

    def examine(name: str) -> str | None:
        fault = fault_of_file(folder / name, entries[name], checksum=checksums)
        return fault and f"{folder / name} {fault}"

    fault = first_fault(examine, entries)
    check(fault is None, f"{fault}; prepare the data again")


def read_verified(
    source: Folder,
    name: str,
    sha256: str | None,
    *,
    advice: str,
    fault: str = "is damaged: its sha256 differs",
) -> bytes:
    """Read a file that a manifest names, and compare its checksum with `sha256`, which is None if unknown.

    Raises InputError if the file is missing or its checksum differs. `fault` is the text for a wrong checksum.
    Both messages end with `advice`.
    """
    try:
        content = source.read(name)
    except FileNotFoundError:
        raise InputError(f"{source.location}/{name} is missing; {advice}") from None
    if sha256 not in (None, sha256_bytes(content)):
        raise InputError(f"{source.location}/{name} {fault}; {advice}")
    return content


def sealed(body: dict[str, Any], key: str = "sha256") -> dict[str, Any]:
    """Return the content of a manifest, with its checksum added under `key`."""
    return {**body, key: sha256_json(body)}


def unsealed(content: dict[str, Any], key: str = "sha256") -> dict[str, Any]:
    """Return the content of a manifest without its checksum. Raises BadContent if the checksum is wrong."""
    body = {name: value for name, value in content.items() if name != key}
    try:
        seen = sha256_json(body)
    except (ValueError, RecursionError):
        raise BadContent("it contains values that JSON cannot express") from None
    if content.get(key) != seen:
        was = shown(content.get(key))[: SHOWN_DIGITS + 1]
        raise BadContent(
            f"it was changed after it was written (checksum {seen[:SHOWN_DIGITS]}, recorded {was})"
        )
    return body
