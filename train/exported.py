"""RUN/export/: a run's model for transformers. It is whole, and says how far the run had come: a run may go on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from train.run_folder import RunFolder
from train.storage import Folder, canonical_json, sync_file, sync_folder

if TYPE_CHECKING:
    from train.s3 import S3Folder

MARK = "baretrain.json"  # in export/: {"step": what the run had come to}
NO_STEP = -1  # in S3, while files are on their way


@contextmanager
def renewed(folder: RunFolder, step: int) -> Iterator[Path]:
    """An empty folder for the model of a run that has come to `step`. In the end it takes the place of export/ on this
    machine; an error leaves the old one. Only the owner of the run folder calls it.
    """
    folder.check_owner()
    scratch, old = folder.path / ".export.tmp", folder.path / ".export.old"
    for left in (scratch, old):
        shutil.rmtree(left, ignore_errors=True)  # by a process that was killed
    scratch.mkdir()
    try:
        yield scratch
        (scratch / MARK).write_bytes(canonical_json({"step": step}))
        for path in scratch.rglob("*"):
            if path.is_file():
                sync_file(path)
        folder.check_owner()
        if folder.export.is_dir():
            folder.export.rename(old)
        scratch.rename(folder.export)
        sync_folder(folder.path)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # of what failed; else it has gone


def mirror(folder: RunFolder) -> None:
    """Bring export/ to S3, where the run folder is there."""
    if not folder.is_remote:
        return
    remote = cast("S3Folder", folder.folder)
    remote.write(f"export/{MARK}", canonical_json({"step": NO_STEP}))
    files = [path for path in sorted(folder.export.rglob("*")) if path.is_file()]
    for path in sorted(files, key=lambda path: path.name == MARK):  # which goes last
        remote.upload(path.relative_to(folder.path).as_posix(), path)


def is_outdated(run: Folder) -> bool:
    """Whether a run has gone on since it wrote its export, or is writing it. Those of older versions do not say."""
    if run.size(f"export/{MARK}") is None:
        return False
    try:
        step = int(json.loads(run.read(f"export/{MARK}"))["step"])
    except (ValueError, LookupError, TypeError, RecursionError):  # not what we wrote: a checkpoint says what it is of
        return True
    return step < max(saved_steps(run), default=0)


def saved_steps(run: Folder) -> dict[int, str]:
    """The checkpoints of a run: their steps, and the names of their manifests."""
    found = (re.fullmatch(r"checkpoints/step_([0-9]{1,18})/manifest\.json", name) for name in run.names("checkpoints/"))
    return {int(match[1]): match[0] for match in found if match}
