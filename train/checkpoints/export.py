"""The export of a checkpoint as a Hugging Face folder, in the same form as the export at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from train.checkpoints.loader import fitting, read_weights
from train.checkpoints.manifest import Manifest
from train.config import InputError, TrainConfig, check
from train.models.encoder import without_weights
from train.models.heads import PaddedEncoder
from train.run_folder.identity import find_identity
from train.storage.folders import Folder, make_folder, scratch_folder
from train.tasks import spec_of
from train.tasks.state import NAME, TaskState


def export_step(
    source: Path,
    manifest: Manifest,
    cfg: TrainConfig,
    target: Path,
    *,
    run: Folder,
    chosen: dict[str, Any],
) -> None:
    """Export the weights in `source`, the folder of a verified step, to `target`.

    `chosen` has the settings that the evaluation of the step has chosen. The other files of the export come from the
    run folder `run`. Raises InputError if it does not describe the model, as the runs of some tasks of your own, or if
    it belongs to another run.
    """
    names = [name for name in run.names("model/") if name.count("/") == 1]
    check_described(run, names, manifest)
    state = TaskState.from_json(run.read(f"model/{NAME}"), f"{run.location}/model/{NAME}")
    with scratch_folder() as scratch, fitting(source):
        for name in names:
            (scratch / Path(name).name).write_bytes(run.read(name))
        with torch.device("meta"):
            model = PaddedEncoder(without_weights(spec_of(cfg.task).head, scratch))
        model.scale = state.scale
        model.load_state_dict(read_weights(source, manifest), assign=True)
        model.export(make_folder(target))
    for name in names:
        if name != "model/config.json":
            (target / Path(name).name).write_bytes(run.read(name))
    (target / NAME).write_bytes(state.choosing(chosen).to_json())


def check_described(run: Folder, names: list[str], manifest: Manifest) -> None:
    """Raise InputError unless the files `names` of the run's folder describe the model of a step."""
    for name in ("config.json", NAME):
        check(
            f"model/{name}" in names,
            f"{run.location}/model/{name} is missing: the run did not describe its model",
        )
    identity = find_identity(run)
    if identity is None:
        raise InputError(f"{run.location}/environment.json is damaged")
    check(
        identity.get("data") == manifest.identity.get("data"),
        f"step {manifest.step} and {run.location}/model are from runs on different data",
    )
