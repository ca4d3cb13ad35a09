"""Where the runs of a report are: folders of this machine, and S3, from which a copy is made. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from train.config import InputError, S3Config, check
from train.report_run import Run, read_run
from train.storage import is_s3, local_path, open_folder, scratch_folder

FILES = ("metrics.jsonl", "config.yaml", "environment.json", "data.json", "evaluation.json")  # that a report is from


def plain(place: str) -> str:
    """One spelling for each place."""
    return place.rstrip("/") if is_s3(place) else str(local_path(place).resolve())


@contextmanager
def copies() -> Iterator[Path]:
    """A temporary folder for copies of bucket/folder; errors name what they are copies of."""
    with scratch_folder() as folder:
        scratch = folder.resolve()
        try:
            yield scratch
        except InputError as error:
            raise InputError(str(error).replace(f"{scratch}/", "s3://")) from error


def open_run(place: str, s3: S3Config, scratch: Path) -> Run:
    """A run, read from a copy in `scratch` if it is in S3."""
    if not is_s3(place):
        return read_run(Path(place))
    folder, parts = open_folder(place, s3), place.removeprefix("s3://").split("/")
    check(not {"", ".", ".."} & set(parts), f"{place} is not a folder in S3; write s3://bucket/folder")
    copy = scratch.joinpath(*parts)
    copy.mkdir(parents=True)
    for name in FILES:
        with suppress(FileNotFoundError):
            (copy / name).write_bytes(folder.read(name))
    return replace(read_run(copy), location=place)


def default_output(runs: list[Run]) -> Path:
    """The folder of a report that was not told one: beside what it is about, for runs in S3 the current folder."""
    first = runs[0]
    if first.location:
        return Path(f"{first.path.name}-report" if len(runs) == 1 else "report")
    return (first.path if len(runs) == 1 else first.path.parent) / "report"
