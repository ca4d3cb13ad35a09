"""A step of a run as a Hugging Face folder, as the run's own end would write it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.checkpoints.loader import fitting, read
from train.checkpoints.manifest import Manifest
from train.cli import compose as cli
from train.config import (
    BackendConfig,
    HubConfig,
    InputError,
    S3Config,
    TrainConfig,
    XLAConfig,
    check,
    flat,
)
from train.models.encoder import Network
from train.models.pretrained import without_weights
from train.optim import OPTIMIZERS
from train.run_folder.folder import differences
from train.storage.folders import Folder, make_folder, scratch_folder
from train.storage.untrusted import BadContent, read_yaml, shown
from train.tasks import TASKS, build_task, spec_of


def read_config(folder: Folder) -> TrainConfig:
    """The configuration that a run was last started with. InputError if there is none that this version reads.

    Others may have written it, so nothing in it is looked up (`${oc.env:...}`), and it does not decide which server is
    asked with this machine's credentials, nor where anything is written: `s3`, `data.cache_dir` and `hub` are the
    defaults, `run_dir` is the folder that was read. It may name what is read: data, and weights by a path or Hub id.
    """
    config_path = f"{folder.location}/config.yaml"
    try:
        plain = read_yaml(folder.read("config.yaml"))
        for text in texts(plain):
            check("${" not in text, f"{config_path}: {shown(text)} is refused: nothing in a run's file is looked up")
        saved = OmegaConf.create(plain)
        schema = OmegaConf.structured(TrainConfig)
        task = TASKS[saved.task.kind].settings
        schema.task, schema.data = task, task.learns_from
        schema.optim = OPTIMIZERS[saved.optim.name].settings
        schema.backend = XLAConfig if "layers" in saved.backend else BackendConfig
        config = OmegaConf.to_object(OmegaConf.merge(schema, saved))
    except FileNotFoundError as error:
        raise InputError(f"{config_path} is missing: the model's sizes are in there") from error
    except BadContent as error:
        raise InputError(f"{config_path} is damaged: {error}") from error
    except InputError:
        raise
    except (OmegaConfBaseException, LookupError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{config_path} is damaged or another version's: {cli.explain(error, TrainConfig)}") from error
    assert isinstance(config, TrainConfig)
    config.s3, config.hub, config.run_dir, config.data.cache_dir = S3Config(), HubConfig(), folder.location, None
    return config


def texts(value: Any) -> Iterator[str]:
    """Yield every string in plain containers, keys too."""
    if isinstance(value, str):
        yield value
    items = chain(value, value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from texts(item)


def export_step(source: Path, manifest: Manifest, cfg: TrainConfig, target: Path, *, run: Folder) -> None:
    """Write the weights in `source`, a step that was verified, to `target`. InputError if data or configuration are not
    those of the checkpoint.

    The rest of an export is in the run folder, `run`, after a fine-tuning, and with the data after a pretraining:
    InputError if the data cannot be read any more.
    """
    known = {key: value for key, value in manifest.identity.items() if key.startswith(("model.", "task."))}
    now = flat(cfg)
    changed = differences(known, {key: now.get(key) for key in known})
    check(not changed, f"config.yaml is not of the run that wrote step {manifest.step}: {', '.join(changed)}")
    data = str(manifest.identity.get("data"))
    if all(run.size(name) is not None for name in ("environment.json", "model/config.json")):
        check(data_id_of(run) == data, f"step {manifest.step} learnt from other data than {run.location}/model is for")
        export_described(source, spec_of(cfg.task).head, run, target)
        return
    task = build_task(cfg)
    check(
        task.data_id == data,
        f"{cfg.data.path} has the id {task.data_id[:12]}, the run's data {data[:12]}: its tokenizer may be another; "
        "give the location of the run's data with --data",
    )
    model = task.build_model()
    put_weights(model, source)
    task.export(model, make_folder(target))


def data_id_of(run: Folder) -> str:
    """The id of a run's data. InputError if its environment.json does not say it."""
    try:
        return str(json.loads(run.read("environment.json"))["identity"]["data"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{run.location}/environment.json is damaged: it does not say the run's data") from error


def put_weights(model: Network, source: Path) -> None:
    with fitting(source):
        model.load_state_dict(read(source / "model.pt"))


def export_described(source: Path, head: str, run: Folder, target: Path) -> None:
    """Export with the config.json of transformers and the tokenizer that the run left in model/."""
    names = [name for name in run.names("model/") if name.count("/") == 1]
    with scratch_folder() as scratch:
        for name in names:
            (scratch / Path(name).name).write_bytes(run.read(name))
        model = Network(without_weights(head, scratch))
        put_weights(model, source)
        model.export(make_folder(target))
    for name in names:
        if name != "model/config.json":
            (target / Path(name).name).write_bytes(run.read(name))
