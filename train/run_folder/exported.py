"""RUN/export/: a run's model for transformers. The folder records its step, since a resumed run may be further on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from train.run_folder.run_folder import RunFolder
from train.storage.atomic_io import new_folder, remove_temporaries, sync_tree
from train.storage.folders import Folder, canonical_json
from train.storage.schema import BadContent, of_type, read_object

MARK = "baretrain.json"  # file in export/: {"step": step that the run had reached, "weights": step of the weights}
TASK_STATE = "baretrain_task.json"  # file in export/: what the task needs beside the weights (train/tasks/state.py)
NO_STEP = -1  # the "step" in S3 while files are being uploaded


@contextmanager
def renewed(folder: RunFolder, step: int, weights: int | None = None) -> Iterator[Path]:
    """Yield an empty folder for a run's model at `step`; `weights` is the step of the weights if that is earlier.

    When the block ends, the folder replaces export/ on this machine. If the block fails, the old export is kept. Only
    the owner of the run folder may call this.
    """
    folder.ownership.check()
    remove_temporaries(folder.path, folder.export.name)
    with new_folder(folder.export, replaces=True) as scratch:
        yield scratch
        marks = {"step": step, "weights": step}
        if weights is not None:
            marks["weights"] = weights
        (scratch / MARK).write_bytes(canonical_json(marks))
        sync_tree(scratch)  # may take long, so the ownership is checked again after it
        folder.ownership.check()


def mirror(folder: RunFolder) -> None:
    """Copy export/ to S3, if the run folder is in S3."""
    if not folder.is_remote:
        return
    mark = f"export/{MARK}"
    folder.folder.write(mark, canonical_json({"step": NO_STEP}))
    for path in sorted(folder.export.rglob("*")):
        name = path.relative_to(folder.path).as_posix()
        if path.is_file() and name != mark:
            folder.folder.upload(name, path)
    folder.folder.upload(mark, folder.path / mark)  # once the other files are there


def is_outdated(run: Folder) -> bool:
    """Return whether a run has saved a checkpoint after its export, or is writing the export now."""
    step = marked(run, "step")
    # without a valid mark, the export is not trusted
    return step is None or step < max(saved_steps(run), default=0)


def marked(run: Folder, key: str) -> int | None:
    """Return the step under `key` in an export's mark; None if the mark is missing or damaged, or lacks this key."""
    try:
        step: int = of_type(int, read_object(run.read(f"export/{MARK}")).get(key), key)
        return step
    except (FileNotFoundError, BadContent):
        return None


def saved_steps(run: Folder) -> dict[int, str]:
    """Return the name of each checkpoint's manifest, by step."""
    steps = {}
    for name in run.names("checkpoints/"):
        match = re.fullmatch(r"checkpoints/step_([0-9]{1,18})/manifest\.json", name)
        if match:
            steps[int(match[1])] = name
    return steps
