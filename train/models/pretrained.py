"""The reader of a transformers model's files: configuration, index, weights. It executes no code from them."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN

from train.config import InputError, check, shortlist
from train.data.files.errors import naming
from train.data.text.tokenizer import quiet
from train.storage.foreign import check_folder, read_whole
from train.storage.hub_access import asking_hub, fetched, why_missing
from train.storage.model_folder import read_model_json
from train.storage.schema import FileName, of_type, read_object

logger = logging.getLogger("train")
# transformers raises these for bad files
BAD_FILES = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
)
INDEX = "model.safetensors.index.json"
FILES = ("config.json", "adapter_config.json")  # files that read_model_config fetches from the Hub
WEIGHTS = (*FILES, "model*.safetensors", INDEX)
# prefixes of quantised dtypes in safetensors
QUANTISED = (
    "I8",
    "U8",
    "I4",
    "U4",
    "F4",
    "F6",
    "F8",
)
# A checkpoint of an encoder alone may also have these heads.
HEADS = """
    classifier cls decoder dense discriminator_predictions entity_predictions generator_lm_head generator_predictions
    head lm_head lm_predictions mask_predictions pred_layer pre_classifier predictions qa_classifier qa_outputs
    sequence_summary sop_classifier vocab_layer_norm vocab_projector vocab_transform
"""
# Weights inside an encoder that may remain unread: buffers that transformers computes, and the pooler.
UNREAD = re.compile(r"(.*\.)?(position_ids|token_type_ids|(original_)?inv_freq)|pooler\..+")
# attributes of transformers' configurations
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation")
# Pickled weights are not read: before PyTorch 2.10 they could write to any memory (CVE-2026-24747).
CONVERT = (
    'python -c "import glob, torch; from safetensors.torch import save_file; save_file({k: v.contiguous().clone() '
    "for f in glob.glob('pytorch_model*.bin') for k, v in torch.load(f, weights_only=True).items()}, "
    "'model.safetensors', {'format': 'pt'})\""
)


def read_weights(
    auto: Any, source: str, config: PreTrainedConfig, *, attention: str, new_head: bool
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Return a float32 model of `auto` (AutoModelFor...), and the names of its parameters with random values.

    A parameter is random if the checkpoint lacks it; with `new_head`, all parameters outside the encoder are random.
    Raises InputError if the checkpoint lacks part of the encoder, except the pooler. Unless `new_head` is set, also
    raises InputError if the checkpoint's head has different shapes.
    """
    try:
        with quiet(), asking_hub(source):
            folder = fetched(source, WEIGHTS)
            check_folder(folder)
            names = check_weights(folder)
            network, info = auto.from_pretrained(
                folder,
                config=config,
                attn_implementation=attention,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # The checks below report them.
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except (*BAD_FILES, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError | InputError):
            raise
        raise InputError(unavailable(source, error)) from error
    encoder = weights_of_encoder(network)
    missing = set(info["missing_keys"])
    check_loaded(source, network, info, encoder=encoder, new_head=new_head)
    check_read(source, f"{network.base_model_prefix}.", names, info["unexpected_keys"])
    if new_head:
        missing |= begin_head(network)
    said = {"randomly initialised": missing, "not used by this model": info["unexpected_keys"]}
    parts = [f"{what}: {', '.join(modules_of(names))}" for what, names in said.items() if names]
    if parts:
        logger.info("loaded %s (%s)", source, "; ".join(parts))
    return network, frozenset(missing)


def weights_of_encoder(network: PreTrainedModel) -> set[str]:
    """Return the names of the encoder's weights, except the pooler's, which a checkpoint may lack."""
    inside = set(network.base_model.parameters())
    named = network.named_parameters()
    return {name for name, weight in named if weight in inside and ".pooler." not in name}


def check_loaded(
    source: str,
    network: PreTrainedModel,
    info: dict[str, Any],
    *,
    encoder: set[str],
    new_head: bool,
) -> None:
    """Raise InputError if a checkpoint lacks part of the encoder, has other shapes, or is not finite."""
    lacking = sorted(encoder & set(info["missing_keys"]))
    check(
        not lacking,
        f"{source} lacks {len(lacking)} weights of the encoder: {', '.join(lacking[:3])}",
    )
    wrong, hint = [], "model.new_head=true starts with a new head"
    for name, theirs, ours in sorted(info["mismatched_keys"]):
        if name in encoder or not new_head:
            wrong.append(f"{name} is {list(theirs)} instead of {list(ours)}")
        if name in encoder:
            hint = "its config.json is another model's"
    check(not wrong, f"{source}: {', '.join(wrong[:3])}; {hint}")
    broken = [
        name
        for name, weight in network.named_parameters()
        if (name in encoder or not new_head) and not weight.isfinite().all()
    ]
    check(
        not broken,
        f"{source}: {', '.join(broken[:3])} contains NaN or infinity; the weights are damaged",
    )


def check_read(source: str, prefix: str, names: Sequence[str], unread: Iterable[str]) -> None:
    """Raise InputError if the model does not read a weight of the encoder, whose names may begin with `prefix`."""
    # The model would compute something else than it did in training, such as attention without relative positions.
    if any(name.startswith(prefix) for name in names):
        inside = [name for name in unread if name.startswith(prefix)]
    else:
        inside = [name for name in unread if name.split(".")[0] not in HEADS.split()]
    lost = sorted(name for name in inside if not UNREAD.fullmatch(name.removeprefix(prefix)))
    check(
        not lost,
        f"{source} has weights in its encoder that transformers does not read: {shortlist(lost, 3)}",
    )


def modules_of(names: Iterable[str]) -> list[str]:
    """Return the sorted names of the modules that have these parameters, except modules inside another of them."""
    modules = {name.rpartition(".")[0] for name in names}
    return sorted(
        each for each in modules if not any(each.startswith(f"{other}.") for other in modules)
    )


def begin_head(network: PreTrainedModel) -> set[str]:
    """Draw new random weights outside the encoder, as transformers does for a new model. Returns their names."""
    encoder = set(network.base_model.modules())
    begun = set()
    for module_name, module in network.named_modules():
        if module is network or module in encoder:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            # If True, _init_weights would leave the parameter unchanged.
            parameter._is_hf_initialized = False
            begun.add(f"{module_name}.{name}")
        network._init_weights(module)
    return begun


def read_model_config(source: str) -> PreTrainedConfig:
    """Return the configuration of a folder or Hub id. Its config.json is read here, not by transformers.

    Raises InputError if that file is missing or cannot be used, or if weights in the same folder cannot be read.
    """
    try:
        with asking_hub(source):
            folder = fetched(source, FILES)
            check_folder(folder)
            values = read_model_json(folder)
    except InputError:
        raise
    except BAD_FILES as error:
        raise InputError(unavailable(source, error)) from error
    if values is None:
        raise InputError(unavailable(source, FileNotFoundError("it has no config.json")))
    try:
        config = AutoConfig.for_model(
            values.pop("model_type"), **{**values, "name_or_path": source}
        )
    except Exception as error:  # The architecture's code may raise anything.
        why = " ".join(str(error).split())
        raise InputError(f"{source}/config.json cannot be used by transformers: {why}") from error
    config.return_dict = True
    unknown = [
        f"{name}={act}"
        for name in ACTIVATIONS
        if (act := getattr(config, name, None)) and act not in ACT2FN
    ]
    check(not unknown, f"{source}/config.json: transformers does not know {shortlist(unknown)}")
    check_weights(folder)
    return config


def check_weights(folder: Path) -> list[str]:
    """Return the names of a folder's weights.

    Raises InputError if weights are not safetensors, are quantised or damaged, or an index names a missing file.
    """
    paths = {*folder.glob("model*.safetensors")}
    path = folder / INDEX
    if path.exists():
        with naming(str(path), ()):
            index = read_object(read_whole(path, folder))
            files = sorted(
                set(of_type(dict[str, FileName], index.get("weight_map"), "weight_map").values())
            )
        other = [file for file in files if not file.endswith(".safetensors")]
        check(
            not other,
            f"{path}: weight_map names {shortlist(other, 3)}; only .safetensors files are read",
        )
        missing = [file for file in files if not (folder / file).exists()]
        check(not missing, f"{path} names {', '.join(missing[:3])}, which does not exist")
        paths |= {folder / file for file in files}
    pickled = next(folder.glob("pytorch_model*.bin"), None)
    check(
        bool(paths) or pickled is None,
        f"{pickled} has pickled weights, which baretrain does not read; convert them with PyTorch 2.10 or newer: "
        f"cd {shlex.quote(str(folder))} && {CONVERT}",
    )
    names: list[str] = []
    for path in sorted(paths):
        damaged = f"{path} is damaged, or is a Git LFS pointer"
        with naming(damaged, (SafetensorError, OSError)), safe_open(path, "pt") as file:
            kinds = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
        for name, kind in kinds.items():
            check(
                not kind.startswith(QUANTISED),
                f"{path}: {name} has quantised weights ({kind}), which cannot be trained; use the original weights",
            )
        names += kinds
    return names


def unavailable(source: str, error: Exception) -> str:
    said = f"model.pretrained={source} cannot be loaded: {why_missing(source, error)}"
    if "trust_remote_code" in str(error):
        return said
    return f"{said}; give a folder or the id of a model on the Hub"
