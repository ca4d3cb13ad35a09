"""A step of a run as a Hugging Face folder, as the run's own end would write it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train import cli
from train.backend.ddp import DDP
from train.checkpoints.loader import fitting, read
from train.checkpoints.manifest import Manifest
from train.config import (
    BackendConfig,
    ClassifyConfig,
    HubConfig,
    InputError,
    MLMConfig,
    QAConfig,
    RecordsConfig,
    S3Config,
    ShardsConfig,
    TrainConfig,
    XLAConfig,
    check,
    flat,
)
from train.models.encoder import Network
from train.models.pretrained import without_weights
from train.run_folder import differences
from train.storage import Folder, make_folder, scratch_folder
from train.tasks import build_task
from train.untrusted import BadContent, read_yaml, shown

TASKS = {"mlm": MLMConfig, "classify": ClassifyConfig, "qa": QAConfig}


def read_config(folder: Folder) -> TrainConfig:
    """The configuration that a run was last started with. InputError if there is none that this version reads.

    Others may have written it, so nothing in it is looked up (`${oc.env:...}`), and it does not decide which server is
    asked with this machine's credentials, nor where anything is written: `s3`, `data.cache_dir` and `hub` are the
    defaults, `run_dir` is the folder that was read. It may name what is read: data, and weights by a path or Hub id.
    """
    place = f"{folder.location}/config.yaml"
    try:
        plain = read_yaml(folder.read("config.yaml"))
        for text in texts(plain):
            check("${" not in text, f"{place}: {shown(text)} is refused: nothing in a run's file is looked up")
        found = OmegaConf.create(plain)
        schema = OmegaConf.structured(TrainConfig)
        schema.task = TASKS[found.task.kind]
        schema.data = ShardsConfig if found.task.kind == "mlm" else RecordsConfig
        schema.backend = XLAConfig if "layers" in found.backend else BackendConfig
        config = OmegaConf.to_object(OmegaConf.merge(schema, found))
    except FileNotFoundError as error:
        raise InputError(f"{place} is missing: the model's sizes are in there") from error
    except BadContent as error:
        raise InputError(f"{place} is damaged: {error}") from error
    except InputError:
        raise
    except (OmegaConfBaseException, LookupError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{place} is damaged or another version's: {cli.explain(error, TrainConfig)}") from error
    assert isinstance(config, TrainConfig)
    config.s3, config.hub, config.run_dir, config.data.cache_dir = S3Config(), HubConfig(), folder.location, None
    return config


def texts(value: Any) -> Iterator[str]:
    """All that is text in plain containers, keys too."""
    if isinstance(value, str):
        yield value
    items = chain(value, value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in items:
        yield from texts(item)


def export_step(source: Path, manifest: Manifest, cfg: TrainConfig, target: Path, *, run: Folder) -> None:
    """Write the weights in `source`, a step that was verified, to `target`. InputError if data or configuration are not
    those of the checkpoint.

    A fine-tuning has all else that it takes in its folder, `run`. Of a pretraining, and of runs of older versions, it
    is with the data: InputError if that is no longer to be had.
    """
    known = {key: value for key, value in manifest.identity.items() if key.startswith(("model.", "task."))}
    now = flat(cfg)
    changed = differences(known, {key: now.get(key) for key in known})
    check(not changed, f"config.yaml is not of the run that wrote step {manifest.step}: {', '.join(changed)}")
    data = str(manifest.identity.get("data"))
    if all(run.size(name) is not None for name in ("environment.json", "model/config.json")):
        check(learnt_from(run) == data, f"step {manifest.step} learnt from other data than {run.location}/model is for")
        export_described(source, cfg.task.kind, run, target)
        return
    task = build_task(cfg)
    check(
        task.data_id == data,
        f"{cfg.data.path} has the id {task.data_id[:12]}, the run's data {data[:12]}: its tokenizer may be another; "
        "--data names the right place",
    )
    model = task.build_model()
    put_weights(model, source)
    task.export(model, make_folder(target))


def learnt_from(run: Folder) -> str:
    """The id of a run's data. InputError if its environment.json does not say it."""
    try:
        return str(json.loads(run.read("environment.json"))["identity"]["data"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(f"{run.location}/environment.json is damaged: it does not say the run's data") from error


def put_weights(model: Network, source: Path) -> None:
    with fitting(source):
        model.load_state_dict(read(source / "model.pt", DDP(BackendConfig(device="cpu"))))


def export_described(source: Path, kind: str, run: Folder, target: Path) -> None:
    """The same by what the run has left in model/: its transformers' config.json and tokenizer."""
    names = [name for name in run.names("model/") if name.count("/") == 1]
    with scratch_folder() as scratch:
        for name in names:
            (scratch / Path(name).name).write_bytes(run.read(name))
        model = Network(without_weights(kind, scratch))
        put_weights(model, source)
        model.export(make_folder(target))
    for name in names:
        if name != "model/config.json":
            (target / Path(name).name).write_bytes(run.read(name))
