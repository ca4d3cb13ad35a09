"""Checks of the JSON files in somebody else's model or tokenizer folder, before transformers reads the folder.

These files can name classes, further files and code, which transformers would load.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from train.storage.foreign import read_whole
from train.storage.schema import BadContent, of_type, read_object, shown

logger = logging.getLogger("train")
# For these text encoders, transformers loads no further code or models: no kernels from the Hub, no inner model.
ENCODERS = """
    albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie eurobert flaubert
    fnet ibert jina_embeddings_v3 longformer luke megatron-bert mobilebert modernbert mpnet nomic_bert
    nystromformer rembert roberta roberta-prelayernorm roc_bert roformer squeezebert xlm xlm-roberta xlm-roberta-xl
"""
# These keys name code to load, or files of weights or settings that this module does not check.
LOADS = re.compile(
    "auto_map|trust_remote_code|_?(attn|experts)_implementation.*|quantization_config|use_kernels|kernel_config|"
    "transformers_weights|configuration_files|fast_tokenizer_files|gguf_file|_auto_class"
)
WAS_SET = "_attn_implementation_autoset"  # a boolean that transformers 4.46 to 4.50 wrote into every config.json
# arguments that no saved tokenizer contains
FOR_THE_CLASS = ("init_inputs", "vocab", "merges", "tokenizer_object")
# paths on another machine, which transformers replaces
IGNORED_PATHS = ("tokenizer_file", "special_tokens_map_file")
LARGEST = 10**9  # the largest size
DEEPEST = 1000  # the largest number of layers: building more could hang a machine
MOST_LABELS = 10**6  # limited because transformers creates a name for each label
WIDTHS = ("vocab_size", "hidden_size", "dim", "embedding_size", "intermediate_size", "hidden_dim")
COUNTS = ("num_attention_heads", "n_heads", "max_position_embeddings")
DEPTHS = ("num_hidden_layers", "n_layers", "num_hidden_groups", "inner_group_num")
# Keys that changed the arithmetic of earlier versions of transformers, and the values with which nothing changes.
IGNORED = {"position_embedding_type": (None, "absolute"), "pruned_heads": (None, {})}
# a file that names another model, which transformers would load instead
ADAPTER = "adapter_config.json"


def read_model_json(folder: Path) -> dict[str, Any] | None:
    """Return the content of config.json; None without the file.

    Raises BadContent if the folder contains an adapter, if the model is not one of ENCODERS, if a key makes
    transformers load something else, or if a size is out of range.
    """
    if (folder / ADAPTER).exists():
        raise BadContent(
            f"{folder} contains an adapter ({ADAPTER}) for another model; merge it into that model first"
        )
    path = folder / "config.json"
    values = read_checked(path)
    if values is None:
        return None
    check_encoder(path, values.get("model_type"))
    for name in ("is_decoder", "is_encoder_decoder", "add_cross_attention"):
        if values.get(name):
            raise BadContent(
                f"{path}: {name} is {shown(values[name])}; only encoders can be loaded"
            )
    of_type(list[str] | None, values.get("architectures"), f"{path}: architectures")
    check_sizes(path, values)
    for name, plain in IGNORED.items():
        if values.get(name) not in plain:
            raise BadContent(
                f"{path}: {name} is {shown(values[name])}, which transformers no longer computes"
            )
    return values


def check_sizes(path: Path, values: Mapping[str, Any]) -> None:
    """Raise BadContent if a number of config.json is out of range."""
    for name in (*WIDTHS, *COUNTS, *DEPTHS):
        most = DEEPEST if name in DEPTHS else LARGEST
        check_number(path, name, values.get(name), least=1, most=most)
    check_number(path, "num_labels", values.get("num_labels"), least=1, most=MOST_LABELS)
    check_number(
        path, "chunk_size_feed_forward", values.get("chunk_size_feed_forward"), least=0, most=0
    )
    check_number(path, "type_vocab_size", values.get("type_vocab_size"), least=0, most=LARGEST)
    vocabulary = values.get("vocab_size")
    if vocabulary is not None:
        check_number(
            path, "pad_token_id", values.get("pad_token_id"), least=0, most=vocabulary - 1
        )
    for name in values:
        if re.search("dropout(_prob)?$", name):
            check_number(path, name, values[name], least=0, most=1, kind=int | float)


def read_tokenizer_json(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; {} without the file.

    Raises BadContent if a key in it, or in special_tokens_map.json, makes transformers read files outside the folder.
    """
    path = folder / "tokenizer_config.json"
    values = read_checked(path) or {}
    for name, value in values.items():
        is_path = (
            name.endswith(("_file", "_spm"))
            and isinstance(value, str)
            and re.search(r"[/\\]", value)
        )
        if (name in FOR_THE_CLASS and value) or (is_path and name not in IGNORED_PATHS):
            raise BadContent(f"{path}: {name} makes transformers read {shown(value)}; remove it")
    path = folder / "special_tokens_map.json"
    for name in read_checked(path) or {}:  # transformers passes every key to the tokenizer
        if not name.endswith(("_token", "_tokens")):
            raise BadContent(f"{path}: {shown(name)} is not a special token; remove it")
    return values


def read_checked(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None without the file. Raises BadContent if a key loads code or files.

    The `auto_map` of one of ENCODERS is dropped: many published models name the code that they had before transformers.
    """
    if not path.exists():
        return None
    try:
        values = read_object(read_whole(path, path.parent))
    except BadContent as error:
        raise BadContent(f"{path}: {error}") from error
    if values.get("model_type") in ENCODERS.split() and values.pop("auto_map", None) is not None:
        report_ignored(path, values["model_type"])
    inner: list[Any] = [values]
    for value in inner:  # `inner` grows in this loop
        if isinstance(value, dict):
            for key, item in value.items():
                if key == "model_type":
                    check_encoder(path, item)
                if (
                    LOADS.fullmatch(key)
                    and item is not None
                    and not (key == WAS_SET and isinstance(item, bool))
                ):
                    raise BadContent(
                        f"{path}: {key} asks transformers to load code or files, which is never executed here"
                    )
            inner += value.values()
        elif isinstance(value, list):
            inner += value
    return values


@cache  # A run reads the file more than once.
def report_ignored(path: Path, kind: str) -> None:
    logger.info("%s: auto_map is ignored: transformers has its own code for %s", path, kind)


def check_encoder(path: Path, kind: object) -> None:
    """Raise BadContent if `kind`, a model_type at any depth of the file, is not one of ENCODERS."""
    if not isinstance(kind, str) or kind not in ENCODERS.split():
        what = f"model_type {shown(kind)} is not a supported text encoder"
        raise BadContent(f"{path}: {what}; choose albert, bert, modernbert, roberta, ...")


def check_number(
    path: Path, name: str, value: object, *, least: int, most: int, kind: Any = int
) -> None:
    """Raise BadContent if a value of config.json is present but is not a number from `least` to `most`."""
    if value is None or (
        isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most
    ):
        return
    raise BadContent(
        f"{path}: {name} is {shown(value)}; it must be a number from {least} to {most:,}"
    )
