"""Files that are either whole or not there: every write goes to a temporary name, is synced, and renamed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from train.config import InputError

CHUNK_BYTES = 8 * 2**20


def local_path(location: str) -> Path:
    """The path of a folder given by the user; only local ones are supported so far."""
    if "://" in location and not location.startswith("file://"):
        raise InputError(f"{location}: only local folders are supported so far; copy it to this machine first")
    return Path(location.removeprefix("file://"))


def make_folder(path: Path) -> Path:
    """Create `path` with its parents and show that it can be written to; InputError if not."""
    probe = path / f".write-test-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}; choose a folder of your own") from error
    return path


def sync_folder(path: Path) -> None:
    """Make renames inside `path` durable (POSIX: a rename lives in the folder, not in the file)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def write_atomic(path: Path, content: bytes) -> None:
    """Write a whole file; after a crash either the old content is there or the new one."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(content)
    sync_file(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The same bytes for the same value, readable."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def sha256_json(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()
