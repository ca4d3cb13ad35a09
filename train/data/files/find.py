"""Lists of files, from a folder tree or a glob. Each file is listed once, even if links lead to it."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NoReturn

from train.config import InputError

logger = logging.getLogger("train")


def walk(folder: Path, skipped: tuple[str, ...] = ()) -> list[Path]:
    """List the files in a folder tree, sorted. Hidden files and folders, and folders in `skipped`, are left out."""
    return each_once(sorted(parent / name for parent, names in folders(folder, skipped) for name in names))


def folders(root: Path, skipped: tuple[str, ...] = ()) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder of a tree once, with the names of the files in it. Hidden names are left out.

    Links to folders are followed last. A link is left out if its target was yielded before or contains the link.
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
            names[:] = [name for name in names if not name.startswith((".", "__pycache__")) and name not in skipped]
            waiting += [path / name for name in sorted(names) if (path / name).is_symlink()]
            yield path, [name for name in files if not name.startswith(".")]


def each_once(paths: list[Path]) -> list[Path]:
    """Return the paths, leaving out those that are links to other paths in the list."""
    links = {path for path in paths if path.is_symlink()}
    listed = {os.path.realpath(path) for path in paths if path not in links} if links else set()
    twice = {path for path in links if os.path.realpath(path) in listed}
    for path in sorted(twice):
        report_left_out(path)
    return [path for path in paths if path not in twice]


@cache  # one warning per link: a corpus is listed more than once
def report_left_out(link: Path) -> None:
    logger.warning("%s is left out: it leads to files that are already read, or to a folder that contains it", link)


def matching(pattern: str) -> list[Path]:
    """List the files that a glob matches, sorted; ** matches the folders that `folders` yields."""
    parts = Path(pattern).parts
    if "**" not in parts:
        return each_once([path for path in map(Path, sorted(glob.glob(pattern))) if path.is_file()])  # noqa: PTH207
    stars = parts.index("**")
    below = parts[stars + 1 :] or ("*",)
    matched: set[Path] = set()
    for top in filter(Path.is_dir, map(Path, glob.glob(str(Path(*parts[:stars]))))):  # noqa: PTH207 (absolute patterns)
        for folder, _ in folders(top):
            matched.update(matching(str(Path(glob.escape(str(folder)), *below))))
    return each_once(sorted(matched))
