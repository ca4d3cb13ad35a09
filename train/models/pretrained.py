"""The files of a model of transformers: configuration, index, weights. Nothing in them is executed."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from train.config import InputError, check
from train.data.text.tokenizer import quiet
from train.storage.hub_access import asking_hub, why_missing
from train.storage.schema import BadContent, FileName, of_type, read_object

logger = logging.getLogger("train")
BAD_FILES = (OSError, ValueError, LookupError, TypeError, AttributeError)  # transformers raises these for bad files


def read_weights(
    auto: Any, source: str, config: PreTrainedConfig, *, attention: str, new_head: bool
) -> tuple[PreTrainedModel, frozenset[str]]:
    """A model by `auto` (AutoModelFor...) in float32, and the names of the parameters that begin with random values:
    those that the checkpoint does not have or, if `new_head`, all outside the encoder.

    Raises InputError unless the checkpoint holds the whole encoder (it may lack the pooler). If it has a head, that
    must fit.
    """
    try:
        with quiet(), asking_hub(source):
            network, info = auto.from_pretrained(
                source,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below
                local_files_only=Path(source).is_dir(),
                trust_remote_code=False,
                weights_only=True,
            )
    except (*BAD_FILES, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(unavailable(source, error)) from error
    missing, inside = set(info["missing_keys"]), set(network.base_model.parameters())
    encoder = {name for name, p in network.named_parameters() if p in inside and ".pooler." not in name}
    check(not encoder <= missing, f"{source} claims to be a {config.model_type}, but holds no weights of its encoder")
    lacking = sorted(encoder & missing)
    check(not lacking, f"{source} lacks {len(lacking)} weights of the encoder: {', '.join(lacking[:3])}")
    other = {name: f"{list(theirs)} instead of {list(ours)}" for name, theirs, ours in info["mismatched_keys"]}
    wrong = [name for name in sorted(other) if name in encoder or not new_head]
    hint = (
        "its config.json is of another model" if encoder & set(wrong) else "model.new_head=true begins with a new one"
    )
    check(not wrong, f"{source}: {', '.join(f'{name} is {other[name]}' for name in wrong[:3])}; {hint}")
    if new_head:
        missing |= begin_head(network)
    said = {"new, with random weights": missing, "left out, as this model has none": info["unexpected_keys"]}
    parts = [f"{what}: {', '.join(modules_of(names))}" for what, names in said.items() if names]
    if parts:
        logger.info("%s: read; %s", source, "; ".join(parts))
    return network, frozenset(missing)


def modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules that hold these parameters, without those inside another one of them."""
    modules = {name.rpartition(".")[0] for name in names}
    return sorted(each for each in modules if not any(each.startswith(f"{other}.") for other in modules))


def begin_head(network: PreTrainedModel) -> set[str]:
    """Draw all weights outside the encoder anew, as transformers does for a new model. Returns their names."""
    encoder = set(network.base_model.modules())
    begun = set()
    for module_name, module in network.named_modules():
        if module is network or module in encoder:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            parameter._is_hf_initialized = False  # transformers leaves parameters with this mark alone
            begun.add(f"{module_name}.{name}")
        network._init_weights(module)
    return begun


def without_weights(head: str, folder: Path) -> PreTrainedModel:
    """The model of AutoModelFor<head> of a folder's config.json, with random weights. InputError for none."""
    config = read_model_config(str(folder))
    auto: Any = getattr(transformers, f"AutoModelFor{head}")
    check(type(config) in auto._model_mapping, f"{folder}: transformers has no {head} of type {config.model_type}")
    network: PreTrainedModel = auto.from_config(
        config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    return network


def read_model_config(source: str) -> PreTrainedConfig:
    """The configuration of a folder or Hub id. InputError if there is none, or it needs code that comes with it."""
    try:
        with asking_hub(source):
            config = AutoConfig.from_pretrained(source, local_files_only=Path(source).is_dir(), trust_remote_code=False)
    except (*BAD_FILES, RecursionError) as error:
        raise InputError(unavailable(source, error)) from error
    check_index(Path(source))
    return config


def check_index(folder: Path) -> None:
    """Raise InputError for an index of sharded weights that names files which are missing or outside its folder."""
    for path in folder.glob("*.index.json") if folder.is_dir() else ():
        try:
            files = of_type(dict[str, FileName], read_object(path.read_bytes()).get("weight_map"), "weight_map")
        except BadContent as error:
            raise InputError(f"{path}: {error}") from error
        missing = sorted({file for file in files.values() if not (folder / file).is_file()})
        check(not missing, f"{path} names {', '.join(missing[:3])}, which does not exist")


def unavailable(source: str, error: Exception) -> str:
    hint = "" if "trust_remote_code" in str(error) else "; give a folder or the id of a model on the Hub"
    return f"model.pretrained={source} cannot be loaded: {why_missing(source, error)}{hint}"
