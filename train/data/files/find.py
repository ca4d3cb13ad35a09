"""Lists of files, from a folder tree or a glob. Each file is listed once, even if links lead to it.

A link may lead to a file or folder inside the folder that the user named. A link that leads out of it is an error:
following it could read a private file of this machine, and leaving it out would read less than the user sees there.
"""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NoReturn

from train.config import InputError
from train.storage.foreign import check_inside

logger = logging.getLogger("train")
HIDDEN = (".", "__pycache__")  # prefixes of the folders that are left out


def walk(folder: Path, skipped: tuple[str, ...] = (), *, may_lead_out: bool = False) -> list[Path]:
    """List the files in a folder tree, sorted. Hidden files and folders, and folders in `skipped`, are left out.

    Raises InputError if a link leads out of the folder, unless `may_lead_out` is set.
    """
    inside = None if may_lead_out else folder
    return each_once(
        sorted(top / name for top, names in folders(folder, skipped, inside) for name in names),
        inside,
    )


def folders(
    root: Path, skipped: tuple[str, ...] = (), inside: Path | None = None
) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder of a tree once, with the names of the files in it. Hidden names are left out.

    Links to folders are followed last. A link is left out if its target was yielded before or contains the link.
    Raises InputError if a link leads out of `inside`.
    """

    def stop(error: OSError) -> NoReturn:  # otherwise os.walk skips folders that it cannot read
        raise InputError(f"{error.filename} cannot be read: {error.strerror}") from error

    seen: set[tuple[int, int]] = set()
    waiting = [root]
    for top in waiting:  # the list grows in this loop
        if top != root and top.parent.resolve().is_relative_to(top.resolve()):
            report_left_out(top)
            continue
        for parent, names, files in os.walk(top, onerror=stop):
            path = Path(parent)
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:
                report_left_out(path)
                names.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            names[:] = [
                name for name in names if not name.startswith(HIDDEN) and name not in skipped
            ]
            links = [path / name for name in sorted(names) if (path / name).is_symlink()]
            check_links(links, inside)
            waiting += links
            yield path, [name for name in files if not name.startswith(".")]


def check_links(links: Iterable[Path], inside: Path | None) -> None:
    if inside is not None:
        for link in links:
            check_inside(link, inside)


def each_once(paths: list[Path], inside: Path | None) -> list[Path]:
    """Return the paths, leaving out those that are links to other paths in the list.

    Raises InputError if a link leads out of `inside`.
    """
    links = {path for path in paths if path.is_symlink()}
    check_links(sorted(links), inside)
    listed = {os.path.realpath(path) for path in paths if path not in links} if links else set()
    twice = {path for path in links if os.path.realpath(path) in listed}
    for path in sorted(twice):
        report_left_out(path)
    return [path for path in paths if path not in twice]


@cache  # one warning per link: a corpus is listed more than once
def report_left_out(link: Path) -> None:
    logger.warning(
        "%s is left out: it leads to files that are already read, or to a folder that contains it",
        link,
    )


def is_match(name: str, pattern: str) -> bool:
    """Return whether the name of an object in S3 matches a glob, by the rules of `matching` for files."""
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


def matching(pattern: str, inside: Path | None = None) -> list[Path]:
    """List the files that a glob matches, sorted; ** matches the folders that `folders` yields.

    Raises InputError if a match leads out of `inside`, by default the last folder before the first wildcard.
    """
    parts = Path(pattern).parts
    inside = inside or Path(*takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    if "**" not in parts:
        found = [path for path in map(Path, sorted(glob.glob(pattern))) if path.is_file()]  # noqa: PTH207
        check_links(found, inside)  # a folder on the way may be the link
        return each_once(found, inside)
    stars = parts.index("**")
    below = parts[stars + 1 :] or ("*",)
    matched: set[Path] = set()
    for top in filter(Path.is_dir, map(Path, glob.glob(str(Path(*parts[:stars]))))):  # noqa: PTH207 (absolute patterns)
        for folder, _ in folders(top, inside=inside):
            matched.update(matching(str(Path(glob.escape(str(folder)), *below)), inside))
    return each_once(sorted(matched), inside)
