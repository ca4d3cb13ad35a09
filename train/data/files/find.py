"""Lists of files, from a folder tree or a glob. Each file is listed once, even if links lead to it.

A link may lead to a file or folder inside the folder that the user named. A link that leads out of it is an error:
following it could read a private file of this machine, and leaving it out would read less than the user sees there.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NoReturn

from train.config import InputError
from train.storage.foreign import check_inside

HIDDEN = (".", "__pycache__")  # prefixes of the folders that are left out


def walk(folder: Path) -> list[Path]:
    """List the files in a folder tree, sorted. Hidden files and folders are left out.

    Raises InputError if a link leads out of the folder.
    """
    return each_once(files_below(folder, folder), folder)


def files_below(root: Path, inside: Path) -> list[Path]:
    """Return the files of a tree. A folder to which several paths lead is read once, and links are followed last."""

    def stop(error: OSError) -> NoReturn:  # otherwise os.walk skips folders that it cannot read
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    found: list[Path] = []
    seen: set[str] = set()
    waiting = [root]
    for top in waiting:  # the list grows in this loop
        for parent, folders, files in os.walk(top, onerror=stop):
            path = Path(parent)
            place = os.path.realpath(path)
            if place in seen:
                folders.clear()
                continue
            seen.add(place)
            folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
            links = [path / name for name in sorted(folders) if (path / name).is_symlink()]
            check_links(links, inside)
            waiting += links
            found += [path / name for name in files if not name.startswith(".")]
    return found


def check_links(links: Iterable[Path], inside: Path | None) -> None:
    if inside is not None:
        for link in links:
            check_inside(link, inside)


def each_once(paths: Iterable[Path], inside: Path | None) -> list[Path]:
    """Return the paths, sorted, without links to other files in the list.

    Raises InputError if a link leads out of `inside`.
    """
    links_last = sorted(paths, key=lambda path: (path.is_symlink(), path))
    links = [path for path in links_last if path.is_symlink()]
    check_links(links, inside)
    if not links:
        return links_last
    by_place: dict[str, Path] = {}
    for path in links_last:
        by_place.setdefault(os.path.realpath(path), path)
    return sorted(by_place.values())


def matching(pattern: str, inside: Path | None = None) -> list[Path]:
    """List the files that a glob matches, sorted; ** matches the folders that `walk` reads.

    Raises InputError if a match leads out of `inside`, by default the last folder before the first wildcard.
    """
    parts = Path(pattern).parts
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    inside = inside or fixed
    if "**" not in parts:
        found = [path for path in map(Path, glob.glob(pattern)) if path.is_file()]  # noqa: PTH207
        check_links(found, inside)  # a folder on the way may be the link
    elif fixed.is_dir():
        below = Path(*parts[len(fixed.parts) :]).as_posix()
        found = [
            path
            for path in files_below(fixed, inside)
            if is_match(path.relative_to(fixed).as_posix(), below)
        ]
    else:
        found = []
    return each_once(found, inside)


def is_match(name: str, pattern: str) -> bool:
    """Return whether a relative path matches a glob, in which ** stands for any number of folders that are shown."""
    return parts_match(PurePosixPath(name).parts, PurePosixPath(pattern).parts)


def parts_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not names or not patterns:
        return not names and not patterns
    first, *below = patterns
    if first != "**":
        is_shown = not names[0].startswith(".") or first.startswith(".")
        return is_shown and fnmatchcase(names[0], first) and parts_match(names[1:], below)
    if parts_match(names, below or ["*"]):
        return True
    return not names[0].startswith(HIDDEN) and parts_match(names[1:], patterns)
