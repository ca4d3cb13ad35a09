"""The configuration in a run folder, which anybody may have written. It does not import torch."""

from __future__ import annotations

import json
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.config import (
    OF_A_MODEL,
    BackendConfig,
    InputError,
    InstanceConfig,
    ModelConfig,
    RecordsConfig,
    TrainConfig,
    XLAConfig,
    check,
)
from train.parallel.optim import OPTIMIZERS
from train.run import compose as cli
from train.run_folder.identity import find_identity
from train.storage import imported
from train.storage.folders import Folder
from train.storage.schema import BadContent, read_yaml
from train.tasks import TASKS

# The settings of another run that apply to its model, besides those of its task. No other setting is taken over:
# none of these names a file, a server or code.
OF_RUN = (
    "seed",
    "seq_len",
    "global_batch_size",
    "micro_batch_size",
    "eval_batch_size",
    "eval_examples",
)
HOW_ROWS_ARE_READ = (
    *("label_map", "label_separator", "delimiter", "quotes", "header", "encoding"),
    "max_bad_rows",
)
OF_ROWS = ("format", "columns", "labels", "lengths", *HOW_ROWS_ARE_READ)
OF_BACKEND = ("name", "precision", "compile")
OF_INSTANCE = ("name", "device")
# The data that a run was trained on. Only an evaluation for which the user names no data opens it.
WHERE = ("path", "name", "revision")
DATA = (
    *WHERE,
    *("train", "validation", "more_validation", "validation_fraction"),
)


def read_config(folder: Folder) -> TrainConfig:
    """Return the settings of a run that apply to its model. Raises InputError if this version cannot read them.

    Others may have written config.yaml, so only listed settings are taken from it, and all others have their defaults.
    None of these names a file to read or to write, a server or code. References (`${oc.env:...}`) are rejected.
    """
    config = whole_config(folder)
    rows = OF_ROWS if isinstance(config.data, RecordsConfig) else ()
    return TrainConfig(
        run_dir=folder.location,
        max_steps=1,
        **values_of(config, OF_RUN),
        task=config.task,
        model=ModelConfig(**values_of(config.model, OF_A_MODEL)),
        data=type(config.data)(path="", **values_of(config.data, rows)),
        backend=type(config.backend)(**values_of(config.backend, OF_BACKEND)),
        instance=InstanceConfig(**values_of(config.instance, OF_INSTANCE)),
    )


def read_data(folder: Folder) -> dict[str, Any]:
    """Return the data settings of a run, by name: where its data is and which rows it evaluates. Nothing is opened."""
    data = whole_config(folder).data
    return values_of(data, DATA if isinstance(data, RecordsConfig) else WHERE[:1])


def values_of(section: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(section, name) for name in names}


def whole_config(folder: Folder) -> TrainConfig:
    """Return the configuration as it was written. Raises InputError if it is not one of this version."""
    config_path = f"{folder.location}/config.yaml"
    try:
        plain = read_yaml(folder.read("config.yaml"))
        is_plain = "${" not in json.dumps(plain)
        check(
            is_plain,
            f"{config_path} has a reference ${{...}}: references in a run's file are not resolved",
        )
        saved = OmegaConf.create(plain)
        schema = OmegaConf.structured(TrainConfig)
        task = TASKS[saved.task.kind].settings
        schema.task = task
        schema.data = task.learns_from
        schema.optim = OPTIMIZERS[saved.optim.name].settings
        schema.parallel = {name: kind for group, name, kind in cli.SCHEMAS if group == "parallel"}[
            saved.parallel.name
        ]
        schema.backend = XLAConfig if saved.backend.name == XLAConfig.name else BackendConfig
        config = OmegaConf.to_object(OmegaConf.merge(schema, saved))
    except FileNotFoundError as error:
        raise InputError(f"{config_path} is missing: it has the model's sizes") from error
    except BadContent as error:
        raise InputError(f"{config_path} is damaged: {error}") from error
    except (OmegaConfBaseException, LookupError, AttributeError, TypeError, ValueError) as error:
        # files that may define the task
        imported.check_repeated(find_identity(folder) or {}, folder.location)
        raise InputError(
            f"{config_path} is damaged or of another version: {cli.error_text(error, TrainConfig)}"
        ) from error
    assert isinstance(config, TrainConfig)
    return config
