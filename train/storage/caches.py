"""Folders of compiled graphs and kernels. They are private to this user, because later runs execute their files."""

from __future__ import annotations

import getpass
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from train.config import InputError, check
from train.machine import host, neuron

KERNELS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
# the owner that containers with mapped users show for root's files (user_namespaces(7))
NOBODY = 65534


def private_folder(path: Path, name: str) -> Path:
    """Make a folder with mode 0700, or give an existing one this mode. Returns its path with links resolved.

    Raises InputError if this fails, or if another user could write to the folder. The message names `name`, the
    variable that sets the folder.
    """
    real = Path(os.path.realpath(path.expanduser()))
    try:
        for folder in (*reversed(real.parents), real):
            if not folder.is_dir():
                folder.mkdir(0o700, exist_ok=True)  # other ranks may make it at the same time
            fault = foreign_fault(folder.lstat(), is_parent=folder != real)
            check(
                fault is None,
                f"{folder} {fault}: code that others put into it would run as you; check its files, then chown and "
                f"chmod it (as its owner: chmod +t is enough for a parent), or set {name} to another folder",
            )
        real.chmod(0o700)
    except OSError as error:
        raise InputError(
            f"cannot write to {real}: {error.strerror}; set {name} to another folder"
        ) from error
    return real


def foreign_fault(status: os.stat_result, *, is_parent: bool) -> str | None:
    """Return why other users could change files in a folder, or replace it if `is_parent`; None if they cannot."""
    if not stat.S_ISDIR(status.st_mode):
        return "is a link or a file"
    own = os.geteuid()
    owners = [own]
    writers = stat.S_IWOTH | stat.S_IWGRP
    is_sticky = False
    if is_parent:
        owners += [0, NOBODY]
        writers = stat.S_IWOTH
        is_sticky = bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}, and you are {own}"
    if status.st_mode & writers and not is_sticky:
        return f"can be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def place_kernels() -> None:
    """Set TorchInductor's and Triton's folders, unless the user has set them. Call this before Inductor is imported.

    Raises InputError if others could write to one of the folders, or if code in it cannot run.
    """
    root = host.compile_root()
    for variable, folder in KERNELS.items():
        given = os.environ.get(variable)
        made = private_folder(Path(given) if given else root / folder, variable)
        is_noexec = os.statvfs(made).f_flag & os.ST_NOEXEC
        check(
            not is_noexec,
            f"{made} is on a disk mounted noexec, which runs no kernels; set {variable} to another folder",
        )
        os.environ[variable] = str(made)
    headers = headers_folder()
    check(
        not headers.is_symlink(),
        f"{headers} is a link, which its owner can change; remove it, or set TMPDIR",
    )
    private_folder(headers, "TMPDIR")


def headers_folder() -> Path:
    """Return where TorchInductor keeps compiled C++ headers: in its default folder, even if another is set."""
    user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
    return Path(tempfile.gettempdir(), f"torchinductor_{user}")


def place_graphs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that sets the folder of Neuron's cache; {} if the cache is in a bucket.

    Raises InputError if others could write to the folder.
    """
    name = "NEURON_COMPILE_CACHE_URL"
    location = neuron.cache_location(environ)
    if "://" in location:
        return {}
    return {name: str(private_folder(Path(location), name))}
