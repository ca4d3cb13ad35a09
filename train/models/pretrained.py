"""A model of transformers by its files: configuration, index, weights. Nothing in them is executed."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as their_logging

from train.config import InputError, check
from train.hub_access import asking_hub, why_missing
from train.untrusted import BadContent, FileName, of_type, read_object

logger = logging.getLogger("train")
BAD_FILES = (OSError, ValueError, LookupError, TypeError, AttributeError)  # what transformers raises for them


def read_weights(
    auto: Any, source: str, config: PreTrainedConfig, *, attention: str, new_head: bool
) -> tuple[PreTrainedModel, frozenset[str]]:
    """A model of a class of transformers' (AutoModelFor...) in float32, and the names of the parameters that the
    checkpoint does not have, or of all outside the encoder if `new_head`: these begin with random values.

    Raises InputError unless the checkpoint holds the whole encoder (it may lack the pooler), and a head that fits if it
    has one.
    """
    try:
        with quiet(), asking_hub(source):
            network, found = auto.from_pretrained(
                source,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # told below
                local_files_only=is_folder(source),
                trust_remote_code=False,
                weights_only=True,
            )
    except (*BAD_FILES, RuntimeError, SafetensorError, pickle.UnpicklingError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise InputError(unavailable(source, error)) from error
    missing, inside = set(found["missing_keys"]), set(network.base_model.parameters())
    encoder = {name for name, p in network.named_parameters() if p in inside and ".pooler." not in name}
    check(not encoder <= missing, f"{source} holds no weights of a {config.model_type} encoder, which it says it is")
    lacking = sorted(encoder & missing)
    check(not lacking, f"{source} lacks {len(lacking)} weights of the encoder: {', '.join(lacking[:3])}")
    other = {name: f"{list(theirs)} instead of {list(ours)}" for name, theirs, ours in found["mismatched_keys"]}
    wrong = [name for name in sorted(other) if name in encoder or not new_head]
    hint = (
        "its config.json is of another model" if encoder & set(wrong) else "model.new_head=true begins with a new one"
    )
    check(not wrong, f"{source}: {', '.join(f'{name} is {other[name]}' for name in wrong[:3])}; {hint}")
    if new_head:
        missing |= begin_head(network)
    if missing:
        logger.info("%s: read; new, with random weights: %s", source, ", ".join(parts(missing)))
    return network, frozenset(missing)


def begin_head(network: PreTrainedModel) -> set[str]:
    """Draw all weights outside the encoder anew, as transformers does for a new model; gives their names."""
    encoder = set(network.base_model.modules())
    begun = set()
    for place, module in network.named_modules():
        if module is network or module in encoder:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            parameter._is_hf_initialized = False  # transformers' mark, for what it leaves alone
            begun.add(f"{place}.{name}")
        network._init_weights(module)
    return begun


def parts(names: set[str]) -> list[str]:
    """The modules whose parameters these are."""
    return sorted({name.rpartition(".")[0] for name in names})


def without_weights(kind: str, folder: Path) -> PreTrainedModel:
    """A model for "classify" or "qa", of the config.json in a folder, in float32 with random weights."""
    auto = AutoModelForSequenceClassification if kind == "classify" else AutoModelForQuestionAnswering
    config = read_model_config(str(folder))
    network: PreTrainedModel = auto.from_config(
        config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    return network


def read_model_config(source: str) -> PreTrainedConfig:
    """transformers' configuration of a folder or Hub id. InputError if there is none, or its model is code that comes
    with it: nothing of a model is executed but what transformers itself has.
    """
    try:
        with asking_hub(source):
            config = AutoConfig.from_pretrained(source, local_files_only=is_folder(source), trust_remote_code=False)
    except (*BAD_FILES, RecursionError) as error:
        raise InputError(unavailable(source, error)) from error
    check_index(Path(source))
    return config


def check_index(folder: Path) -> None:
    """Raises InputError for an index of sharded weights that names files outside its folder."""
    for path in folder.glob("*.index.json") if folder.is_dir() else ():
        try:
            files = of_type(dict[str, FileName], read_object(path.read_bytes()).get("weight_map"), "weight_map")
        except BadContent as error:
            raise InputError(f"{path}: {error}") from error
        missing = sorted({file for file in files.values() if not (folder / file).is_file()})
        check(not missing, f"{path} names {', '.join(missing[:3])}, which is not there")


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' tables and progress bars: what matters of them is said by us, in a line."""
    level, had_bars = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(level)
        if had_bars:
            their_logging.enable_progress_bar()


def is_folder(source: str) -> bool:
    """Whether nothing is to be asked of the Hub."""
    return Path(source).is_dir()


def unavailable(source: str, error: Exception) -> str:
    hint = "" if "trust_remote_code" in str(error) else "; give a folder or the id of a model on the Hub"
    return f"model.pretrained={source} cannot be loaded: {reason_of(source, error)}{hint}"


def reason_of(source: str, error: Exception) -> str:
    """One line out of transformers' several."""
    if "trust_remote_code" in str(error):
        return "it is code of its own, which is never executed here"
    return why_missing(source, error)
