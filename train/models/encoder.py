"""Masked language models of `transformers`, any of them, with the head applied only where something is predicted.

Shapes: B sequences, S tokens, P places to predict, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from train.config import InputError, ModelConfig, check
from train.models.layers import Checkpoint, Run, recompute_layers, run_shared_layer_by, shared_layer

# Our names and those of transformers' configurations (with their aliases for the older models).
SIZES = {
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "embedding_size": "embedding_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
}
logger = logging.getLogger("train")
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")  # count positions from pad_token_id + 1


class MaskedLM(nn.Module):
    """A masked language model that gives logits [B, P, V] for the places asked for, instead of all S.

    The encoder's output is gathered at `positions` before the model's own head sees it, by a hook on the encoder, so
    this works for every architecture whose head takes the encoder's last hidden state.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network
        self.has_segments = getattr(network.config, "type_vocab_size", 0) >= 2
        self._positions: Tensor | None = None
        network.base_model.register_forward_hook(self._gather)

    def _gather(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        assert self._positions is not None
        hidden = output.last_hidden_state
        index = self._positions.unsqueeze(-1).expand(-1, -1, hidden.size(-1))
        output["last_hidden_state"] = hidden.gather(1, index)
        return output

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, P, V] at `positions` [B, P] of sequences `input_ids` [B, S] without padding (all int64)."""
        self._positions = positions
        segments = {"token_type_ids": token_type_ids} if self.has_segments else {}
        logits: Tensor = self.network(input_ids=input_ids, **segments).logits
        self._positions = None
        if logits.shape[:2] != positions.shape:
            raise RuntimeError(
                f"{type(self.network).__name__} gave logits {tuple(logits.shape)} for {tuple(positions.shape)} "
                "positions: its head does not read the encoder's last hidden state"
            )
        return logits

    def recompute_layers(self, checkpoint: Checkpoint) -> None:
        """Keep only the input of each layer for the backward pass. RuntimeError if no layer was recognised."""
        if not recompute_layers(self.network, checkpoint):
            raise RuntimeError(f"{type(self.network).__name__} has no layers that are known to be recomputable")

    def loop_layers(self, make_loop: Callable[[nn.Module, int], Run]) -> bool:
        """Run a shared layer by `make_loop(layer, depth)`; False, and nothing is done, if no one layer is shared."""
        found = shared_layer(self.network)
        if found is None:
            return False
        encoder, layer, depth = found
        run_shared_layer_by(encoder, make_loop(layer, depth))
        return True

    def export(self, folder: Path) -> None:
        """Write what `transformers` loads with from_pretrained: a copy on the host, in float32."""
        copy = type(self.network)(self.network.config)
        copy.load_state_dict({name: value.cpu() for name, value in self.network.state_dict().items()})
        disable_progress_bar()  # of a fraction of a second
        copy.save_pretrained(folder)


def build_masked_lm(cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int) -> MaskedLM:
    """Model for a tokenizer of `vocab_size` pieces and sequences of `seq_len`. InputError if they do not fit."""
    config = model_config(cfg, vocab_size=vocab_size, pad_id=pad_id)
    check_fits(config, vocab_size=vocab_size, seq_len=seq_len)
    known = type(config) in AutoModelForMaskedLM._model_mapping
    check(known, f"transformers has no masked language model of type {config.model_type}; choose albert, bert, ...")
    fast = AutoModelForMaskedLM._model_mapping[type(config)]._supports_sdpa
    if not fast:
        logger.warning("%s has no SDPA attention in transformers: slower and larger steps", config.model_type)
    attention = "sdpa" if fast else "eager"
    if cfg.pretrained is None:
        return MaskedLM(AutoModelForMaskedLM.from_config(config, attn_implementation=attention))
    try:
        network = AutoModelForMaskedLM.from_pretrained(
            cfg.pretrained, config=config, attn_implementation=attention, dtype=torch.float32
        )
    except OSError as error:
        raise InputError(unavailable(cfg.pretrained, error)) from error
    return MaskedLM(network)


def model_config(cfg: ModelConfig, *, vocab_size: int, pad_id: int) -> PreTrainedConfig:
    """The configuration for transformers: a checkpoint's, or the architecture's with the sizes given."""
    given = {theirs: getattr(cfg, ours) for ours, theirs in SIZES.items() if getattr(cfg, ours) is not None}
    if cfg.pretrained is not None:
        try:
            config = AutoConfig.from_pretrained(cfg.pretrained)
        except (OSError, ValueError) as error:
            raise InputError(unavailable(cfg.pretrained, error)) from error
        for ours, theirs in SIZES.items():
            wanted, found = getattr(cfg, ours), getattr(config, theirs, None)
            if "dropout" in ours and wanted is not None:
                setattr(config, theirs, wanted)
                continue
            check(
                wanted is None or wanted == found,
                f"model.{ours}={wanted}, but {cfg.pretrained} has {found}; leave it out",
            )
    else:
        try:
            defaults = AutoConfig.for_model(cfg.architecture)
        except ValueError as error:
            raise InputError(
                f"model.architecture={cfg.architecture} is not a model_type of transformers (albert, bert, ...)"
            ) from error
        for ours, theirs in SIZES.items():
            known = theirs not in given or hasattr(defaults, theirs)
            check(known, f"model.{ours}={given.get(theirs)}: {cfg.architecture} has no such size; leave it out")
        given = {"vocab_size": vocab_size, "pad_token_id": pad_id, **given}
        config = AutoConfig.for_model(cfg.architecture, **given)  # other fields may follow from these
    heads = getattr(config, "num_attention_heads", 1)
    check(
        config.hidden_size % heads == 0,
        f"model.hidden_size={config.hidden_size} must be a multiple of model.num_heads={heads}",
    )
    if getattr(config, "hidden_act", None) == "gelu_new":
        # The same function as one kernel instead of eight, with 33-40 % less saved for the backward pass.
        config.hidden_act = "gelu_pytorch_tanh"
    return config


def check_fits(config: PreTrainedConfig, *, vocab_size: int, seq_len: int) -> None:
    check(
        config.vocab_size >= vocab_size,
        f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {vocab_size}",
    )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None:
        positions -= config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
        check(
            seq_len <= positions,
            f"seq_len={seq_len} is longer than the model's {positions} positions; raise model.max_positions or "
            "prepare shorter sequences",
        )


def unavailable(source: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    return f"model.pretrained={source} is not to be had ({reason}); is it a folder or a Hub id, and the machine online?"
