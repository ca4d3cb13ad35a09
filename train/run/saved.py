"""The configuration in a run folder, which anybody may have written. It does not import torch."""

from __future__ import annotations

import json

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from train.config import BackendConfig, HubConfig, InputError, NeuronConfig, S3Config, TrainConfig, XLAConfig, check
from train.parallel.optimizers import OPTIMIZERS
from train.run import compose as cli
from train.system import imported
from train.system.folders import Folder
from train.system.identity import find_identity
from train.system.schema import BadContent, read_yaml
from train.tasks import TASKS


def read_config(folder: Folder) -> TrainConfig:
    """Return the configuration that a run was last started with. Raises InputError if this version cannot read it.

    Others may have written the file, so references (`${oc.env:...}`) are rejected, and the file can choose neither the
    server that receives this machine's credentials nor a place to write to: `s3`, `data.cache_dir` and `hub` are reset
    to their defaults, and `run_dir` to the folder that was read. The file may name data and weights.
    """
    config_path = f"{folder.location}/config.yaml"
    try:
        plain = read_yaml(folder.read("config.yaml"))
        is_plain = "${" not in json.dumps(plain)
        check(is_plain, f"{config_path} has a reference ${{...}}: references in a run's file are not resolved")
        saved = OmegaConf.create(plain)
        schema = OmegaConf.structured(TrainConfig)
        task = TASKS[saved.task.kind].settings
        schema.task, schema.data = task, task.learns_from
        schema.optim = OPTIMIZERS[saved.optim.name].settings
        schema.parallel = {name: kind for group, name, kind in cli.SCHEMAS if group == "parallel"}[saved.parallel.name]
        kinds = {kind.name: kind for kind in (XLAConfig, NeuronConfig)}  # other backends share BackendConfig
        schema.backend = kinds.get(saved.backend.name, BackendConfig)
        config = OmegaConf.to_object(OmegaConf.merge(schema, saved))
    except FileNotFoundError as error:
        raise InputError(f"{config_path} is missing: it has the model's sizes") from error
    except BadContent as error:
        raise InputError(f"{config_path} is damaged: {error}") from error
    except (OmegaConfBaseException, LookupError, AttributeError, TypeError, ValueError) as error:
        imported.check_repeated(find_identity(folder) or {}, folder.location)  # files that may define the task
        raise InputError(
            f"{config_path} is damaged or of another version: {cli.explain(error, TrainConfig)}"
        ) from error
    assert isinstance(config, TrainConfig)
    config.s3, config.hub, config.run_dir, config.data.cache_dir = S3Config(), HubConfig(), folder.location, None
    return config
