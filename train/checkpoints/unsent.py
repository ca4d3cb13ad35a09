"""Saves that are whole on this machine and never reached S3: the run's next attempt here uploads them.

    staging/saving/5f0c.../manifest.json     written after the files it names; a folder without one is not whole

The lease proves that no attempt has resumed from an older checkpoint meanwhile: the manifest has the number of the
lease under which it was saved, and an attempt on this machine that takes the next lease writes its own number there at
once.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from train.checkpoints.manifest import FILE, Damaged, Manifest, check_files
from train.run_folder.lease import Lease
from train.storage.whole import write_atomic

logger = logging.getLogger("train")
STAGING, SAVING = "staging", "saving"  # in the folder that this machine has for a run, and in STAGING


def keep(scratch: Path, manifest: Manifest) -> None:
    """Keep the files in `scratch` beyond this process, instead of those that were kept before."""
    write_atomic(scratch / FILE, manifest.to_json())
    for older in scratch.parent.iterdir():
        if older != scratch:
            shutil.rmtree(older)


def adopt(staging: Path, lease: Lease) -> None:
    """Take over what the last attempt kept here. It is called right after the run folder was taken."""
    before = lease.previous
    if before is None or before["number"] != lease.number - 1 or before["host"] != lease.claim["host"]:
        return
    for folder, manifest in kept(staging):
        if manifest.fence == before["number"]:
            write_atomic(folder / FILE, replace(manifest, fence=lease.number).to_json())


def to_send(staging: Path, fence: int) -> Iterator[tuple[Path, Manifest]]:
    """The saves that this attempt has adopted, verified. A warning says why another one is left out."""
    for folder, manifest in kept(staging):
        if manifest.fence != fence:
            logger.warning(
                "the save of step %d in %s is not uploaded: the run has been on another machine since; "
                "the next save here replaces it",
                manifest.step,
                folder,
            )
            continue
        try:
            check_files(folder, manifest)
        except Damaged as error:
            logger.warning("the save of step %d in %s is not uploaded: %s", manifest.step, folder, error)
            continue
        yield folder, manifest


def tidy(staging: Path, newest: int) -> None:
    """Remove what killed saves have left, and copies of steps up to `newest`, which S3 has. Others stay until the next
    save on this machine, or until it needs their room.
    """
    for folder in (staging / SAVING).glob("*"):
        if not (folder / FILE).is_file():
            shutil.rmtree(folder)
    for folder, manifest in list(kept(staging)):
        if manifest.step <= newest:
            shutil.rmtree(folder)
    with suppress(OSError):  # it is not empty, or absent
        (staging / SAVING).rmdir()


def kept(staging: Path) -> Iterator[tuple[Path, Manifest]]:
    for path in sorted((staging / SAVING).glob(f"*/{FILE}")):
        try:
            yield path.parent, Manifest.from_json(path.read_bytes())
        except Damaged as error:
            logger.warning("%s: %s", path, error)
