"""Checkpoints, called steps in this package. A step is either complete, with checksums, or absent.

`checkpoints/step_00001000/` contains `model.pt`, `optimizer.pt` and `ranks.pt`. They contain only tensors and plain
containers, and every backend can load them. `manifest.json`, written last, records the length and sha256 of each file,
and the run's identity, settings and progress. If an engine splits the state over the ranks, each rank writes separate
files, such as `model_00001.pt`.

Readers rely only on manifests. Checksums are verified before a file is loaded.

    manifest    describes a step              store, store_s3   keep steps on disk and in S3
    staging     copies the state to the host  retention         selects the steps to keep
    saver       saves during training         loader            loads the newest valid step
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from train.storage.folders import Folder, LocalFolder

if TYPE_CHECKING:
    from train.checkpoints.store import Store


def open_store(folder: Folder, scratch: Path) -> Store:
    """Return the checkpoints of a run folder. `scratch` is a local folder for transfers to and from S3."""
    if isinstance(folder, LocalFolder):
        from train.checkpoints.store import LocalStore

        return LocalStore(folder.path / "checkpoints")
    from train.checkpoints.store_s3 import S3Store  # imported late because boto3 is slow to import
    from train.storage.s3 import S3Folder

    assert isinstance(folder, S3Folder)
    return S3Store(folder, scratch)
