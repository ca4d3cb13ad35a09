"""Masked language models, and the code that builds any task's model from any encoder in `transformers`.

Shapes: B sequences, S tokens, P positions to predict, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    PreTrainedConfig,
    PreTrainedModel,
)

from train.config import InputError, ModelConfig, check
from train.data.files.errors import naming
from train.machine.memory import total_memory_bytes
from train.models.network import Network, freeze
from train.models.pretrained import read_model_config, read_weights
from train.storage.model_folder import ENCODERS

# Our name of each size, and its possible names in transformers. The first one that a configuration has is used.
SIZES = {
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "embedding_size": ("embedding_size",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size", "hidden_dim"),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "hidden_dropout": ("hidden_dropout_prob", "dropout"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout"),
}
# For each attention other than eager, the class attribute that is True if a transformers model supports it.
SUPPORTS = {
    "sdpa": "_supports_sdpa",
    "flash_attention_2": "_supports_flash_attn",
    "flex_attention": "_supports_flex_attn",
}
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
logger = logging.getLogger("train")
# output names, by architecture
ORDER_LOGITS = {
    "albert": "sop_logits",
    "bert": "seq_relationship_logits",
}


class MaskedLM(Network):
    """A masked language model that computes logits [B, P, V] at P given positions instead of at all S.

    A hook selects these positions of the encoder's output before the head reads it. This works for every architecture
    whose head reads the encoder's last hidden state.
    """

    def __init__(
        self, network: PreTrainedModel, new: frozenset[str] = frozenset(), attention: str = "auto"
    ) -> None:
        super().__init__(network, new, attention)
        self._positions: Tensor | None = None
        network.base_model.register_forward_hook(self._pick)

    def _pick(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        assert self._positions is not None
        output["last_hidden_state"] = states_at(output.last_hidden_state, self._positions)
        return output

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor) -> Tensor:
        """Return logits [B, P, V] at `positions` [B, P] of sequences `input_ids` [B, S] without padding (all int64)."""
        logits: Tensor = self._run(input_ids, token_type_ids, positions).logits
        return logits

    def _run(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor) -> Any:
        self._positions = positions
        output = self.network(input_ids=input_ids, **self.segments(token_type_ids))
        self._positions = None
        return output

    def head_parameters(self) -> list[nn.Parameter]:
        # The head's largest weight is the encoder's embedding, so the head has no learning rate of its own.
        return []


class OrderedMaskedLM(MaskedLM):
    """A masked language model that also predicts whether the two segments of a sequence are in their original order."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Returns MaskedLM's logits [B, P, V], and logits [B, 2] of the segments' order: original, swapped.
        output = self._run(input_ids, token_type_ids, positions)
        order = output[ORDER_LOGITS[self.network.config.model_type]]
        return output.prediction_logits, order


def states_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """Return [B, P, H]: the rows of `hidden` [B, S, H] at `positions` [B, P] int64, by a product with one-hot rows.

    The product costs 2 * S * H FLOPs per position. It suits Trainium, where a gather and its gradient process
    elements one by one. It is exact, except that TF32 rounds the states, as in the head's product.
    """
    tokens = torch.arange(hidden.size(1), device=positions.device)
    return (positions[..., None] == tokens).to(hidden.dtype) @ hidden


def build_masked_lm(
    cfg: ModelConfig,
    *,
    vocab_size: int,
    pad_id: int,
    seq_len: int,
    predicts_order: bool = False,
) -> MaskedLM:
    """Return a model for a tokenizer of `vocab_size` tokens and for sequences of `seq_len`.

    Raises InputError if cfg does not fit these sizes.
    """
    config = fitting_config(cfg, vocab_size=vocab_size, pad_id=pad_id, seq_len=seq_len)
    if predicts_order:
        known = " or ".join(ORDER_LOGITS)
        check(
            config.model_type in ORDER_LOGITS,
            f"task.sop=true needs a model of type {known}, not {config.model_type}",
        )
        made = make_network(AutoModelForPreTraining, cfg, config, what="model to pretrain")
        if config.model_type == "albert":
            # Google's pretraining has no dropout before this layer.
            made[0].sop_classifier.dropout.p = 0.0
    else:
        made = make_network(AutoModelForMaskedLM, cfg, config, what="masked language model")
    if predicts_order:
        return OrderedMaskedLM(*made)
    return MaskedLM(*made)


def make_network(
    auto: Any,
    cfg: ModelConfig,
    config: PreTrainedConfig,
    *,
    what: str,
    new_head: bool = False,
) -> tuple[PreTrainedModel, frozenset[str], str]:
    """Return a float32 model of `auto` (AutoModelFor...), the names of its new parameters, and cfg.attention.

    Weights are the checkpoint's; those that it lacks are new and random. cfg says which weights are frozen. On the meta
    device, the model has no weights and no file is read. `what` names the kind of model in messages. Raises InputError
    if transformers has no such model.
    """
    check(
        type(config) in auto._model_mapping,
        f"transformers has no {what} of type {config.model_type}; choose albert, bert, ...",
    )
    attention = attention_of(cfg, config)
    if cfg.attention == "auto" and attention == "eager":
        logger.warning(
            "%s has no SDPA attention in transformers: steps take more time and memory",
            config.model_type,
        )
    new: frozenset[str] = frozenset()
    if cfg.pretrained is None or torch.get_default_device().type == "meta":
        network = auto.from_config(
            config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False
        )
    else:
        network, new = read_weights(
            auto, cfg.pretrained, config, attention=attention, new_head=new_head
        )
    if cfg.freeze_layers:
        freeze(network, cfg.freeze_layers)
    return network, new, cfg.attention


def attention_of(cfg: ModelConfig, config: PreTrainedConfig) -> str:
    """Return transformers' name of the attention that a model uses. Raises InputError if the architecture lacks it."""
    kind: Any = AutoModel._model_mapping[type(config)]
    has = ["eager", *(name for name, flag in SUPPORTS.items() if getattr(kind, flag, False))]
    check(
        cfg.attention in ("auto", *has),
        f"model.attention={cfg.attention}: transformers has {', '.join(has)} for {config.model_type}; choose auto or "
        "one of these",
    )
    if cfg.attention != "auto":
        return cfg.attention
    return "sdpa" if "sdpa" in has else "eager"


def model_config(cfg: ModelConfig, *, vocab_size: int, pad_id: int) -> PreTrainedConfig:
    """Return transformers' configuration: the checkpoint's, or the architecture's default with the given sizes."""
    given = {ours: getattr(cfg, ours) for ours in SIZES if getattr(cfg, ours) is not None}
    if cfg.pretrained is not None:
        config = pretrained_config(cfg.pretrained, given)
    else:
        config = new_config(cfg, {"vocab_size": vocab_size, **given}, pad_id)
    heads = getattr(config, "num_attention_heads", 1)
    check(
        config.hidden_size % heads == 0,
        f"model.hidden_size={config.hidden_size} must be a multiple of model.num_heads={heads}",
    )
    config.architectures = config.architectures or []  # transformers iterates over them.
    if getattr(config, "hidden_act", None) == "gelu_new":
        # This is the same function in one kernel instead of eight, and keeps 33-40 % less memory for the backward pass.
        config.hidden_act = "gelu_pytorch_tanh"
    return config


def pretrained_config(source: str, given: Mapping[str, Any]) -> PreTrainedConfig:
    """Return the configuration of a checkpoint with the given dropout. Raises InputError if another size differs."""
    config = read_model_config(source)
    for ours, wanted in given.items():
        theirs = their_name(config, ours, wanted)
        if "dropout" in ours:
            setattr(config, theirs, wanted)
            continue
        value = getattr(config, theirs)
        check(wanted == value, f"model.{ours}={wanted}, but {source} has {value}; leave it out")
    return config


def new_config(cfg: ModelConfig, given: Mapping[str, Any], pad_id: int) -> PreTrainedConfig:
    """Return the configuration of a new model: the architecture's default, with the given sizes."""
    check(
        cfg.architecture in ENCODERS.split(),
        f"model.architecture={cfg.architecture} is not a known text encoder; choose albert, bert, modernbert, "
        "roberta, ...",
    )
    defaults = AutoConfig.for_model(cfg.architecture)
    sizes = {their_name(defaults, ours, wanted): wanted for ours, wanted in given.items()}
    sizes["pad_token_id"] = pad_id
    # The default ids are those of the usual tokenizer, and may lie outside of this one's.
    for name in SPECIAL_IDS:
        token = getattr(defaults, name, None)
        if isinstance(token, int) and token >= sizes["vocab_size"]:
            sizes[name] = None
    unfit = f"transformers cannot make a {cfg.architecture} of these sizes"
    with naming(unfit, (Exception,)):  # The architecture's code may raise anything.
        # Other fields may be derived from these sizes.
        config = AutoConfig.for_model(cfg.architecture, **sizes)
    if cfg.initializer_range is not None:
        check(
            hasattr(config, "initializer_range"),
            f"model.initializer_range={cfg.initializer_range}: {config.model_type} has none; leave it out",
        )
        config.initializer_range = cfg.initializer_range
    return config


def their_name(config: PreTrainedConfig, ours: str, wanted: object) -> str:
    """Return the attribute of `config` for the size `ours`, a key of SIZES. Raises InputError if it has none."""
    theirs = next((name for name in SIZES[ours] if hasattr(config, name)), None)
    if theirs is None:
        raise InputError(
            f"model.{ours}={wanted}: {config.model_type} has no such size; leave it out"
        )
    return theirs


def fitting_config(
    cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int
) -> PreTrainedConfig:
    """Return `model_config(...)`. Raises InputError unless it fits the tokenizer, `seq_len` and the host's memory."""
    config = model_config(cfg, vocab_size=vocab_size, pad_id=pad_id)
    attention_of(cfg, config)
    prepare, longer = "", "raise model.max_positions, or "
    if cfg.pretrained is not None:
        prepare, longer = f"; prepare text with tokenizer.pretrained={cfg.pretrained}", ""
    check(
        config.vocab_size >= vocab_size,
        f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {vocab_size}{prepare}",
    )
    positions = most_positions(config)
    check(
        positions is None or seq_len <= positions,
        f"seq_len={seq_len} is longer than the model's {positions} positions; {longer}set seq_len={positions} or less "
        "(if the data is prepared, prepare it again with this seq_len)",
    )
    return config


def check_memory(config: PreTrainedConfig) -> None:
    """Raise InputError if a model's weights alone exceed this machine's memory."""
    sizes = {}
    for ours, names in SIZES.items():
        theirs = next((name for name in names if hasattr(config, name)), "")
        sizes[ours] = getattr(config, theirs, None) or 0
    hidden = sizes["hidden_size"]
    # ALBERT's layers share their weights in groups.
    depth = getattr(config, "num_hidden_groups", sizes["num_layers"])
    layer = hidden * (4 * hidden + 2 * sizes["intermediate_size"])
    embeddings = sizes["vocab_size"] + sizes["max_positions"]
    weights = depth * layer + embeddings * (sizes["embedding_size"] or hidden)
    needed_bytes, memory_bytes = 4 * weights, total_memory_bytes()
    listed = ", ".join(
        f"{ours} {value}" for ours, value in sizes.items() if value and "dropout" not in ours
    )
    check(
        needed_bytes < memory_bytes,
        f"the model's weights alone take about {needed_bytes / 1e9:,.0f} GB, and this machine has "
        f"{memory_bytes / 1e9:,.0f} GB of memory; choose a smaller model than this: {listed}",
    )


def without_weights(head: str, folder: Path) -> PreTrainedModel:
    """Return the AutoModelFor<head> of a folder's config.json with random weights, or with none on the meta device.

    Raises InputError if transformers has no such model, or if it exceeds this machine's memory.
    """
    config = read_model_config(str(folder))
    check_memory(config)
    if head == "MaskedLM" and any(
        name.endswith("ForPreTraining") for name in config.architectures or ()
    ):
        head = "PreTraining"  # it also predicts the order of sentences
    auto: Any = getattr(transformers, f"AutoModelFor{head}")
    check(
        type(config) in auto._model_mapping,
        f"{folder}: transformers has no {head} of type {config.model_type}",
    )
    network: PreTrainedModel = auto.from_config(
        config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
    )
    return network


def most_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model can read; None if it has no limit.

    If a position table has a padding row, positions begin after it (in RoBERTa, at row 2). Raises InputError if
    transformers cannot build the model, or if it exceeds this machine's memory.
    """
    check_memory(config)
    cannot = f"transformers cannot build a {config.model_type} from this configuration"
    config = copy.deepcopy(config)
    # The architecture's code may raise anything.
    with (
        naming(cannot, (Exception,)),
        torch.device("meta"),
    ):
        model = AutoModel.from_config(config, trust_remote_code=False)
    limits = []
    for name, module in model.named_modules():
        if name.split(".")[-1] == "position_embeddings":
            padding = getattr(module, "padding_idx", None)
            if padding is None:
                first = 0
            else:
                first = padding + 1
            limits.append(len(module.weight) - first)
    stated = getattr(config, "max_position_embeddings", None)
    if stated:
        limits.append(stated)
    return min(limits, default=None)


def mask_filler(export: Path) -> Any:
    """Return transformers' pipeline that fills masks with the model in a folder, on the CPU."""
    return transformers.pipeline("fill-mask", model=str(export), device="cpu")
