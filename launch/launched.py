"""Files in the user's home about the launches from this computer: each job's checksum and its scheduler's answer.

Others, such as the run's machines, can change a record in S3. Before this computer starts a job from a record, it
therefore compares the job with the checksum in these files, which the machines cannot change.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from launch.plan import absolute
from launch.record import JOB, Job, Record
from launch.values import table, text
from train.config import InputError, check
from train.storage.folders import LocalFolder, canonical_json, local_path, sha256_bytes
from train.storage.schema import BadContent, read_object


def file_of(record: Record) -> tuple[LocalFolder, str]:
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
    folder = LocalFolder(state / "baretrain" / "launched")
    digest = sha256_bytes(record.location.encode())
    return folder, f"{digest[:32]}.json"


def read(record: Record) -> dict[str, Any]:
    """Return the content of the file about the run's last launch from this computer; {} if there was none."""
    folder, name = file_of(record)
    if folder.size(name) is None:
        return {}
    try:
        return read_object(folder.read(name))
    except BadContent as error:
        raise InputError(f"{folder.location}/{name} cannot be read: {error}; remove it") from error


def keep(record: Record, handle: dict[str, Any] | None = None) -> None:
    """Store the checksum of the job that is about to start and, once known, the scheduler's answer."""
    folder, name = file_of(record)
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    values = {
        "location": record.location,
        "job_sha256": record.job_sha256,
        "handle": last_handle(record) if handle is None else handle,
    }
    folder.write(name, canonical_json(values))


def last_handle(record: Record) -> dict[str, Any]:
    """Return the scheduler's answer to the last launch from this computer; {} if there was none."""
    return table(read(record), "handle")


def job_to_start(record: Record) -> Job:
    """Return the job of a record, and pin its checksum, so that all programs of the job accept only this job.json.

    Raises InputError if the record is in S3, this computer did not launch the job, and the user gave no checksum.
    """
    job = record.job()
    if record.job_sha256:
        return job
    if record.is_remote:
        record.job_sha256 = text(read(record), "job_sha256")
    else:
        record.job_sha256 = sha256_bytes(record.folder.read(JOB))
    check(
        bool(record.job_sha256),
        f"this computer has not launched {record.run_dir}, and anybody who can write to {record.location} may have "
        f"changed its {JOB}: resume the run on the computer that launched it, or give the checksum that the launch "
        "printed: --job-sha256=DIGEST",
    )
    return record.job()


def launched_as(record: Record) -> str:
    """Return the run's location as its launch named it. It may be another path of the same folder."""
    if record.is_remote:
        return record.run_dir
    try:
        named = Record(record.run_dir, record.s3).job().run_dir
    except InputError:
        return absolute(record.run_dir)
    is_this = os.path.realpath(named) == os.path.realpath(local_path(record.run_dir))
    if is_this:
        return named
    return absolute(record.run_dir)
