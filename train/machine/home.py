"""The user of this process: a name for one that the machine does not know, and whether a folder is this user's."""

from __future__ import annotations

import getpass
import os
from collections.abc import MutableMapping
from pathlib import Path


def settle(environ: MutableMapping[str, str]) -> None:
    """Set LOGNAME if this user has no name, as with `docker run --user 955`: TorchInductor asks for it."""
    try:
        getpass.getuser()
    except (KeyError, OSError):  # the latter since Python 3.13
        environ["LOGNAME"] = f"user{os.getuid()}"


def is_own(folder: Path) -> bool:
    """Return whether a folder, and the link to it if it is one, belongs to this user or to the owner of its parent.

    The owner of the parent could replace it anyway, as of a home that is mounted into a container. A folder that does
    not exist, or that cannot be looked at, is nobody else's.
    """
    try:
        owners = {os.geteuid(), folder.parent.stat().st_uid}
        return {folder.lstat().st_uid, folder.stat().st_uid} <= owners
    except OSError:
        return True
