"""The export of a checkpoint as a Hugging Face folder, in the same form as the export at the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from train.checkpoints.loader import fitting, read_weights
from train.checkpoints.manifest import Manifest
from train.config import OF_A_MODEL, InputError, TrainConfig, check, flat
from train.models.encoder import without_weights
from train.models.heads import PaddedEncoder
from train.models.network import Network
from train.run_folder.identity import differences, find_identity
from train.storage.folders import Folder, make_folder, scratch_folder
from train.tasks import build_task, spec_of
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
    run folder `run`. If it does not describe the model, as the runs of some tasks of your own, they come from the data
    at cfg.data.path, which the user must have named. Raises InputError if the data or configuration belongs to another
    run, or if the data is not named or unreadable.
    """
    check_same_model(manifest, cfg)
    data = str(manifest.identity.get("data"))
    if all(run.size(name) is not None for name in ("environment.json", "model/config.json")):
        identity = find_identity(run)
        if identity is None:
            raise InputError(f"{run.location}/environment.json is damaged")
        check(
            identity.get("data") == data,
            f"step {manifest.step} and {run.location}/model are from runs on different data",
        )
        export_described(source, manifest, spec_of(cfg.task).head, run, target, chosen)
        return
    no_model = f"{run.location} has no model/config.json"
    named = "so its export needs the prepared data: name it with --data"
    check(cfg.data.path != "", f"{no_model}, {named}")
    elsewhere = "model.pretrained of another machine is not read; use its export/"
    check(manifest.identity.get("model.pretrained") is None, f"{no_model}, and {elsewhere}")
    task = build_task(cfg)
    check(
        task.data_id == data,
        f"{cfg.data.path} has the id {task.data_id[:12]}, but the run's data has {data[:12]}: the tokenizer may "
        "differ; give the location of the run's data with --data",
    )
    task.adopt(chosen)
    export_mapped(
        task.build_model, source, manifest, lambda model: task.export(model, make_folder(target))
    )


def check_same_model(manifest: Manifest, cfg: TrainConfig) -> None:
    """Raise InputError if the settings of the model or the task are not those of the step."""
    keys = [f"model.{name}" for name in OF_A_MODEL]
    keys += [key for key in manifest.identity if key.startswith("task.")]
    known = {key: manifest.identity[key] for key in keys if key in manifest.identity}
    settings = flat(cfg)
    changed = differences(known, {key: settings.get(key) for key in known})
    check(
        not changed,
        f"config.yaml does not belong to the run that wrote step {manifest.step}: {', '.join(changed)}",
    )


def export_mapped(
    build: Callable[[], Network],
    source: Path,
    manifest: Manifest,
    write: Callable[[Network], None],
) -> None:
    """Build a model, memory-map its weights from a checkpoint's files, and have `write` export it."""
    with torch.device("meta"):
        model = build()
    with fitting(source):
        model.load_state_dict(read_weights(source, manifest), assign=True)
        write(model)


def export_described(
    source: Path, manifest: Manifest, head: str, run: Folder, target: Path, chosen: dict[str, Any]
) -> None:
    """Export the model that config.json in the run's model/ describes, with the other files from the same folder."""
    names = [name for name in run.names("model/") if name.count("/") == 1]
    where = f"{run.location}/model/{NAME}"
    check(f"model/{NAME}" in names, f"{where} is missing: an earlier version wrote this run")
    state = TaskState.from_json(run.read(f"model/{NAME}"), where)

    def described() -> PaddedEncoder:
        model = PaddedEncoder(without_weights(head, scratch))
        model.scale = state.scale
        return model

    with scratch_folder() as scratch:
        for name in names:
            (scratch / Path(name).name).write_bytes(run.read(name))
        export_mapped(described, source, manifest, lambda model: model.export(make_folder(target)))
    for name in names:
        if name != "model/config.json":
            (target / Path(name).name).write_bytes(run.read(name))
    (target / NAME).write_bytes(state.choosing(chosen).to_json())
