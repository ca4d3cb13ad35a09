"""The lease files of a run folder, one per owner. ownership.py has their rules. Importing this does not import torch.

lease/00000007.json   see KINDS; the current owner's file has the highest number
"""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from train.machine.launched import launched
from train.machine.processes import read_process
from train.storage.folders import Folder
from train.storage.schema import BadContent, read_object

LEASES = "lease/"
LEASE_FILE = re.compile(rf"{LEASES}(\d{{8,}})\.json")
KINDS: dict[str, Any] = {
    "number": int,
    "owner": str,  # a unique id
    "host": str,
    "pid": int,
    "process_start": int | None,  # clock ticks since boot; None: not Linux
    "boot_id": str | None,
    "pid_namespace": str | None,
    "job": str | None,  # the id of the Slurm job, or of torchrun's run
    "started": str,  # only shown to people, never parsed
    "ttl_s": float | int,
    "beats": int,
    "step": int,
    "released": bool,
}
MAX_PID, MAX_TTL_S = 2**31, 1e6  # a lease beyond these limits was not written by this program


def name_of(number: int) -> str:
    return f"{LEASES}{number:08d}.json"


def numbers(folder: Folder) -> list[int]:
    """Return the numbers of the leases in the folder."""
    return [
        int(match[1]) for name in folder.names(LEASES) if (match := LEASE_FILE.fullmatch(name))
    ]


def newest(folder: Folder) -> tuple[int, bytes]:
    """Return the highest number (0: no lease) and the content of its file; b"" if the file was just removed."""
    number = max(numbers(folder), default=0)
    try:
        return number, folder.read(name_of(number)) if number else b""
    except FileNotFoundError:
        return number, b""


def parse(content: bytes) -> dict[str, Any] | None:
    """Return the fields of a lease file (see KINDS); None if it is damaged or from another program."""
    with suppress(BadContent):
        lease = read_object(content)
        fits = all(name in lease and isinstance(lease[name], kind) for name, kind in KINDS.items())
        if fits and 0 < lease["ttl_s"] < MAX_TTL_S and 0 < lease["pid"] < MAX_PID:
            return lease
    return None


def describe(content: bytes) -> str:
    """Return a description of the owner for messages."""
    lease = parse(content)
    if lease is None:
        return "an owner whose lease file cannot be read"
    job = f"job {lease['job']}, " if lease["job"] else ""
    return f"{job}process {lease['pid']} on {lease['host']}, since {lease['started']}"


def identity() -> dict[str, Any]:
    """Return the lease fields that identify this process and its job; None for fields that the system lacks."""
    process, run_id = read_process(os.getpid()), launched().run_id
    boot_id: str | None = None
    pid_namespace: str | None = None
    with suppress(OSError):  # without these facts, a new job must watch the owner's heartbeats
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pid_namespace = str(Path("/proc/self/ns/pid").readlink())
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "process_start": process.started if process else None,
        "boot_id": boot_id,
        "pid_namespace": pid_namespace,
        "job": os.environ.get("SLURM_JOB_ID")
        or (None if run_id == "none" else run_id),  # "none": torchrun's default
    }


def same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether process ids mean the same in both leases. Cloned machines share a boot id, but not a host name."""
    keys = ("host", "boot_id", "pid_namespace")
    return all(one[key] is not None and one[key] == other[key] for key in keys)
