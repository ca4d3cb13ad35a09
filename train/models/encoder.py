"""Encoders of `transformers` with a head, any of them: what all tasks share, and masked language models.

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
from train.hub_access import asking_hub
from train.models.layers import Checkpoint, Run, freeze, recompute_layers, run_shared_layer_by, shared_layer
from train.models.source import is_folder, read_weights, unavailable

# Our names and those of transformers' configurations (with their aliases), the usual one first, DistilBERT's second.
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
logger = logging.getLogger("train")
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")  # count positions from pad_token_id + 1
HIDDEN = -1e4  # added to the scores of padding: exp() of it is 0 in every precision, and no sum with it overflows
# How architectures take a mask [B, 1, 1, S] that is to be used as it is: those that add it to the scores, and those
# that read 0 and 1 from it. Others get the plain [B, S].
ADDING = ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
CHOOSING = ("deberta", "deberta-v2")


class Network(nn.Module):
    """A model of transformers: what the backends and tasks do with it, whatever its head."""

    def __init__(self, network: PreTrainedModel, new: frozenset[str] = frozenset()) -> None:
        """`new`: names of the parameters that a checkpoint did not have."""
        super().__init__()
        self.network, self.new = network, new
        self.has_segments = getattr(network.config, "type_vocab_size", 0) >= 2

    def segments(self, token_type_ids: Tensor) -> dict[str, Tensor]:
        """What an architecture that tells segments apart wants to know."""
        return {"token_type_ids": token_type_ids} if self.has_segments else {}

    def mask(self, real: Tensor) -> Tensor:
        """What the architecture takes to keep padding from being looked at; `real` [B, S] is 1 at tokens, 0 at padding.

        A [B, S] mask transformers looks into at every forward pass, to do without it where nothing is hidden: that
        stops an XLA device, and gives two graphs. One of four dimensions it uses as it is.
        """
        kind, dtype = self.network.config.model_type, self.network.get_input_embeddings().weight.dtype
        if kind in ADDING:
            return (1 - real[:, None, None].to(dtype)) * HIDDEN
        return real[:, None, None].to(dtype) if kind in CHOOSING else real

    def head_parameters(self) -> list[nn.Parameter]:
        """Those outside the encoder, and of the encoder those that a checkpoint did not have (its pooler)."""
        encoder = set(self.network.base_model.parameters())
        named = self.network.named_parameters()
        return [p for name, p in named if p.requires_grad and (p not in encoder or name in self.new)]

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


class MaskedLM(Network):
    """A masked language model that gives logits [B, P, V] for the places asked for, instead of all S.

    The encoder's output is gathered at `positions` before the model's own head sees it, by a hook on the encoder, so
    this works for every architecture whose head takes the encoder's last hidden state.
    """

    def __init__(self, network: PreTrainedModel, new: frozenset[str] = frozenset()) -> None:
        super().__init__(network, new)
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
        logits: Tensor = self.network(input_ids=input_ids, **self.segments(token_type_ids)).logits
        self._positions = None
        if logits.shape[:2] != positions.shape:
            raise RuntimeError(
                f"{type(self.network).__name__} gave logits {tuple(logits.shape)} for {tuple(positions.shape)} "
                "positions: its head does not read the encoder's last hidden state"
            )
        return logits

    def head_parameters(self) -> list[nn.Parameter]:
        """None: the head's largest weight is the encoder's embedding, and all of it is learnt alike."""
        return []


def build_masked_lm(cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int) -> MaskedLM:
    """Model for a tokenizer of `vocab_size` pieces and sequences of `seq_len`. InputError if they do not fit."""
    config = model_config(cfg, vocab_size=vocab_size, pad_id=pad_id)
    check_fits(config, vocab_size=vocab_size, seq_len=seq_len)
    return MaskedLM(*make_network(AutoModelForMaskedLM, cfg, config, what="masked language model"))


def make_network(
    auto: Any, cfg: ModelConfig, config: PreTrainedConfig, *, what: str, new_head: bool = False
) -> tuple[PreTrainedModel, frozenset[str]]:
    """A model of a class of transformers' (AutoModelFor...), in float32, with random weights or a checkpoint's, and
    frozen as cfg says; and the names of the parameters that the checkpoint did not have. InputError if there is none.
    """
    check(
        type(config) in auto._model_mapping,
        f"transformers has no {what} of type {config.model_type}; choose albert, bert, ...",
    )
    fast = auto._model_mapping[type(config)]._supports_sdpa
    if not fast:
        logger.warning("%s has no SDPA attention in transformers: slower and larger steps", config.model_type)
    attention = "sdpa" if fast else "eager"
    new: frozenset[str] = frozenset()
    if cfg.pretrained is None:
        network = auto.from_config(config, attn_implementation=attention, dtype=torch.float32)
    else:
        network, new = read_weights(auto, cfg.pretrained, config, attention=attention, new_head=new_head)
    freeze(network, embeddings=cfg.freeze_embeddings, layers=cfg.freeze_layers)
    return network, new


def model_config(cfg: ModelConfig, *, vocab_size: int, pad_id: int) -> PreTrainedConfig:
    """The configuration for transformers: a checkpoint's, or the architecture's with the sizes given."""
    given = {ours: getattr(cfg, ours) for ours in SIZES if getattr(cfg, ours) is not None}
    if cfg.pretrained is not None:
        try:
            with asking_hub(cfg.pretrained):
                config = AutoConfig.from_pretrained(cfg.pretrained, local_files_only=is_folder(cfg.pretrained))
        except (OSError, ValueError) as error:
            raise InputError(unavailable(cfg.pretrained, error)) from error
        for ours, wanted in given.items():
            theirs = their_name(config, ours, wanted)
            if "dropout" in ours:
                setattr(config, theirs, wanted)
                continue
            found = getattr(config, theirs)
            check(wanted == found, f"model.{ours}={wanted}, but {cfg.pretrained} has {found}; leave it out")
    else:
        try:
            defaults = AutoConfig.for_model(cfg.architecture)
        except ValueError as error:
            raise InputError(
                f"model.architecture={cfg.architecture} is not a model_type of transformers (albert, bert, ...)"
            ) from error
        sizes = {their_name(defaults, ours, wanted): wanted for ours, wanted in given.items()}
        sizes = {"vocab_size": vocab_size, "pad_token_id": pad_id, **sizes}
        config = AutoConfig.for_model(cfg.architecture, **sizes)  # other fields may follow from these
    heads = getattr(config, "num_attention_heads", 1)
    check(
        config.hidden_size % heads == 0,
        f"model.hidden_size={config.hidden_size} must be a multiple of model.num_heads={heads}",
    )
    if getattr(config, "hidden_act", None) == "gelu_new":
        # The same function as one kernel instead of eight, with 33-40 % less saved for the backward pass.
        config.hidden_act = "gelu_pytorch_tanh"
    return config


def their_name(config: PreTrainedConfig, ours: str, wanted: object) -> str:
    """What a configuration of transformers calls one of SIZES. InputError if it has none."""
    theirs = next((name for name in SIZES[ours] if hasattr(config, name)), None)
    if theirs is None:
        raise InputError(f"model.{ours}={wanted}: {config.model_type} has no such size; leave it out")
    return theirs


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
