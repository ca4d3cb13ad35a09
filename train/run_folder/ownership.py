"""The run that a folder belongs to and the job that owns it now, both by the files in it. No torch here.

environment.json      describes the run; a folder without it, and without a lease, is a run folder only if it is empty
lease/00000007.json   one file for each owner; the owner's has the highest number, see `train.run_folder.lease`
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from train.config import Failure, check
from train.storage.folders import Folder, local_path
from train.storage.schema import BadContent, read_object

LEASES = "lease/"
LEASE_FILE = re.compile(rf"{LEASES}(\d{{8,}})\.json")
ENVIRONMENT = "environment.json"
FILES = (ENVIRONMENT, "config.yaml", "data.json", "metrics.jsonl", "outcome.json", "samples.json")
FOLDERS = ("checkpoints", "export", "lease", "log", "model", "predictions", "tensorboard")
IDENTITY_KEYS = {"data", "seed", "global_batch_size"}
# Files that ranks other than 0 write before rank 0 has taken the folder, and the files of a new disk.
NEUTRAL = re.compile(
    rf"{LEASE_FILE.pattern}|log/(rank|exit_rank|stacks_rank)_\d{{4,}}\.(txt|json)|\.write-test-\w+|lost\+found"
)
KINDS: dict[str, Any] = {
    "number": int,
    "owner": str,  # a new one for every lease
    "host": str,
    "pid": int,
    "process_start": int | None,  # clock ticks after the boot; None: not Linux
    "boot_id": str | None,
    "pid_namespace": str | None,
    "job": str | None,  # the id of Slurm's job or of torchrun's run
    "started": str,  # for people only
    "ttl_s": float | int,
    "beats": int,
    "step": int,
    "released": bool,
}
MAX_PID, MAX_TTL_S = 2**31, 1e6  # of a lease that this program can have written


class LeaseLost(Failure):
    """Another job owns the run folder now: nothing more may be written there."""


class Owned:
    """A run folder for its job: `check` is called before every change, and raises if the job may not make it."""

    CHANGES = ("write", "create", "remove", "upload")

    def __init__(self, folder: Folder, check: Callable[[], None]) -> None:
        self.folder, self.check = folder, check

    def __getattr__(self, name: str) -> Any:
        if name in self.CHANGES:
            self.check()
        return getattr(self.folder, name)


# ---- is it a run folder? --------------------------------------------------------------------------------------------


def check_layout(location: str) -> None:
    """InputError for a folder with links instead of files to which a run appends lines, and for a file, folder or pipe
    that has the name of another kind.
    """
    path = local_path(location)
    for file in path.iterdir() if path.is_dir() else ():
        is_right = {**dict.fromkeys(FILES, file.is_file), **dict.fromkeys(FOLDERS, file.is_dir)}.get(file.name)
        kind = "folder" if file.name in FOLDERS else "file"
        check(
            is_right is None or is_right(),
            f"run_dir={location}: {file.name} is no {kind}, as a run has it; move it away, or choose another folder",
        )
    for file in (file for folder in (path, path / "log") if folder.is_dir() for file in folder.iterdir()):
        is_link = file.is_symlink() and not file.is_dir()
        check(not is_link, f"run_dir={location} holds a link, {file.name}: a run would write through it; remove it")


def find_identity(folder: Folder) -> dict[str, Any] | None:
    """The identity of the run that the folder belongs to; None without environment.json, or if that is not a run's."""
    with suppress(FileNotFoundError, BadContent):
        identity = read_object(folder.read(ENVIRONMENT)).get("identity")
        if isinstance(identity, dict) and identity.keys() >= IDENTITY_KEYS:
            return identity
    return None


def is_owned(folder: Folder) -> bool:
    """Return whether a job has left a lease that can be read."""
    return any(parse(folder.read(name_of(number))) for number in numbers(folder))


def check_is_run_folder(folder: Folder, names: set[str]) -> dict[str, Any]:
    """The identity of the run that the folder, which holds these names, belongs to; empty if no run has described
    itself there. InputError if the folder is neither a run's nor empty.
    """
    identity = find_identity(folder) if ENVIRONMENT in names else None
    if identity is not None:
        return identity
    if LEASES.rstrip("/") in names and is_owned(folder):
        check(
            ENVIRONMENT not in names,
            f"run_dir={folder.location}: {ENVIRONMENT} is damaged; remove that file alone, and the same command "
            "resumes from the checkpoints, which name their run as well",
        )
        return {}
    inner = [name for top in ("lease/", "log/") if top.rstrip("/") in names for name in folder.names(top)]
    strange = [name for name in sorted({*names, *inner} - {"lease", "log"}) if not NEUTRAL.fullmatch(name)]
    check(
        not strange,
        f"run_dir={folder.location} holds files that are not a run's ({', '.join(strange[:3])}); choose another folder",
    )
    return {}


# ---- which job owns it? ---------------------------------------------------------------------------------------------


def name_of(number: int) -> str:
    return f"{LEASES}{number:08d}.json"


def numbers(folder: Folder) -> list[int]:
    """The lease numbers that are there."""
    return [int(match[1]) for name in folder.names(LEASES) if (match := LEASE_FILE.fullmatch(name))]


def newest(folder: Folder) -> tuple[int, bytes]:
    """The highest number, 0 if there is none, and the content of its file, empty if it was removed meanwhile."""
    number = max(numbers(folder), default=0)
    try:
        return number, folder.read(name_of(number)) if number else b""
    except FileNotFoundError:
        return number, b""


def parse(content: bytes) -> dict[str, Any] | None:
    """The fields of a lease file, see KINDS; None if it is damaged or another program's."""
    with suppress(BadContent):
        lease = read_object(content)
        fits = all(name in lease and isinstance(lease[name], kind) for name, kind in KINDS.items())
        if fits and 0 < lease["ttl_s"] < MAX_TTL_S and 0 < lease["pid"] < MAX_PID:
            return lease
    return None


def describe(content: bytes) -> str:
    """The owner, for a message."""
    lease = parse(content)
    if lease is None:
        return "an owner whose lease file cannot be read"
    job = f"job {lease['job']}, " if lease["job"] else ""
    return f"{job}process {lease['pid']} on {lease['host']}, since {lease['started']}"


def check_owner(folder: Folder, owner: str) -> None:
    """Raise LeaseLost unless the newest lease is `owner`'s. This takes two requests to S3, and raises their errors."""
    number, content = newest(folder)
    lease = parse(content)
    if lease is None or lease["owner"] != owner:
        now = f"{describe(content)} owns it, with lease {number}" if number else "its file is gone"
        raise LeaseLost(f"the lease of {folder.location} is lost: {now}; this job may not write there")
