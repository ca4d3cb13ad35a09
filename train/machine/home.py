"""A name and a home for users that the machine does not know, such as those of `docker run --user 955`.

Libraries ask for both: TorchInductor for the user's name, transformers and datasets for a folder in which to keep
files. The module imports only the standard library, since it runs before the imports that read the variables.
"""

from __future__ import annotations

import os
import pwd
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

# variables that getpass.getuser() reads before the user database
NAMES = ("LOGNAME", "USER", "LNAME", "USERNAME")
# variables, and the folders without them
IN_HOME = {
    "XDG_CACHE_HOME": ".cache",
    "XDG_STATE_HOME": ".local/state",
}


def settle(environ: MutableMapping[str, str]) -> None:
    """Set LOGNAME, HOME and IN_HOME where the user has no name, no home, or no right to make these folders.

    A home that exists is kept, even if it is not writable, since it may have credentials.
    """
    known = True
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        known = False
    if not known and not any(environ.get(name) for name in NAMES):
        environ["LOGNAME"] = f"user{os.getuid()}"
    if not known and not environ.get("HOME"):
        environ["HOME"] = str(own_folder())
    home = environ.get("HOME") or Path("~").expanduser()
    for variable, folder in IN_HOME.items():
        if not environ.get(variable) and not can_make(Path(home, folder)):
            environ[variable] = str(own_folder() / folder)


def can_make(folder: Path) -> bool:
    """Return whether a folder exists, or whether this user may make it."""
    try:
        there = next(each for each in (folder, *folder.parents) if each.is_dir())
    except PermissionError:  # a home of somebody else
        return False
    return there == folder or os.access(there, os.W_OK | os.X_OK)


def own_folder() -> Path:
    """Return a private folder of this user in TMPDIR: always the same one, unless somebody else has taken its name."""
    folder = Path(tempfile.gettempdir(), f"baretrain-home-{os.getuid()}")
    with suppress(OSError):
        folder.mkdir(0o700, exist_ok=True)
        status = folder.lstat()
        if (
            folder.is_dir()
            and not folder.is_symlink()
            and status.st_uid == os.getuid()
            and not status.st_mode & 0o022
        ):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


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
