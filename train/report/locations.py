"""Locations of the runs of a report: folders of this machine, and S3, from which files are copied. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from train.config import InputError, S3Config, check
from train.report.run import Run, read_run
from train.storage.folders import is_s3, local_path, open_folder, scratch_folder

FILES = (  # all that a report reads
    "metrics.jsonl",
    "config.yaml",
    "environment.json",
    "outcome.json",
    "data.json",
    "evaluation.json",
    "samples.json",
)


def plain(location: str) -> str:
    """The one spelling of a location."""
    return location.rstrip("/") if is_s3(location) else str(local_path(location).resolve())


@contextmanager
def copies() -> Iterator[Path]:
    """Make a temporary folder for copies of bucket/folder; errors name the original."""
    with scratch_folder() as folder:
        scratch = folder.resolve()
        try:
            yield scratch
        except InputError as error:
            raise InputError(str(error).replace(f"{scratch}/", "s3://")) from error


def open_run(location: str, s3: S3Config, scratch: Path) -> Run:
    """Read a run; one in S3 is copied to `scratch` first."""
    if not is_s3(location):
        return read_run(Path(location))
    folder, parts = open_folder(location, s3), location.removeprefix("s3://").split("/")
    check(not {"", ".", ".."} & set(parts), f"{location} is not a folder in S3; write s3://bucket/folder")
    copy = scratch.joinpath(*parts)
    copy.mkdir(parents=True)
    for name in FILES:
        with suppress(FileNotFoundError):
            (copy / name).write_bytes(folder.read(name))
    return replace(read_run(copy), location=location)


def default_output(runs: list[Run]) -> Path:
    """The folder of a report without --output: beside its runs, or in the current folder for runs in S3."""
    first = runs[0]
    if first.location:
        return Path(f"{first.path.name}-report" if len(runs) == 1 else "report")
    return (first.path if len(runs) == 1 else first.path.parent) / "report"
