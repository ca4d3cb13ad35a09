"""Encoders of `transformers`, of any architecture, with a head: what all tasks share, and masked language models.

Shapes: B sequences, S tokens, P positions to predict, H hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from train.config import HeadSize, InputError, ModelConfig, check
from train.host.memory import total_memory_bytes
from train.models.layers import (
    Checkpoint,
    Run,
    freeze,
    frozen_layers,
    recompute_layers,
    repeated_layers,
    run_shared_layer_by,
    separate_layers,
    shared_layer,
)
from train.models.model_sizes import Shape, train_flops_per_sequence
from train.models.pretrained import read_model_config, read_weights

# The names of sizes here and in transformers' configurations (with aliases): the usual one, then DistilBERT's.
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
OFFSET_POSITIONS = ("roberta", "xlm-roberta", "camembert")  # these count positions from pad_token_id + 1
HIDDEN = -1e4  # added to the scores of padding: exp() of it is 0 in every precision, and no sum with it overflows
# Architectures that use a mask [B, 1, 1, S] as it is: some add it to the scores, others read 0 and 1 from it. All
# other architectures get the plain [B, S].
ADDING = ("albert", "bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
CHOOSING = ("deberta", "deberta-v2")
ORDER_LOGITS = {"albert": "sop_logits", "bert": "seq_relationship_logits"}  # by architecture, in transformers' outputs


class Network(nn.Module):
    """A model of transformers, with what backends and tasks do to it whatever its head."""

    head_share = 0.0  # of the positions of a sequence that the head reads: about none, if it reads one token

    def __init__(self, network: PreTrainedModel, new: frozenset[str] = frozenset()) -> None:
        """`new`: names of the parameters that a checkpoint did not have."""
        super().__init__()
        self.network, self.new = network, new
        self.has_segments = getattr(network.config, "type_vocab_size", 0) >= 2

    def segments(self, token_type_ids: Tensor) -> dict[str, Tensor]:
        """The segments as an argument, for architectures that distinguish them."""
        return {"token_type_ids": token_type_ids} if self.has_segments else {}

    def mask(self, real: Tensor) -> Tensor:
        """The attention mask, in the form that the architecture takes; `real` [B, S] is 1 at tokens and 0 at padding.

        transformers reads a [B, S] mask at every forward pass, to drop it if it hides nothing. That stops an XLA device
        and makes two graphs. A mask of four dimensions is used as it is.
        """
        kind, dtype = self.network.config.model_type, self.network.get_input_embeddings().weight.dtype
        if kind in ADDING:
            return (1 - real[:, None, None].to(dtype)) * HIDDEN
        return real[:, None, None].to(dtype) if kind in CHOOSING else real

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters outside the encoder, and those of the encoder (its pooler) that a checkpoint did not have."""
        encoder = set(self.network.base_model.parameters())
        named = self.network.named_parameters()
        return [p for name, p in named if p.requires_grad and (p not in encoder or name in self.new)]

    def train_flops(self, head: HeadSize, seq_len: int) -> float | None:
        """FLOPs to train on one sequence of `seq_len` tokens; None for an architecture without a known formula."""
        frozen = frozen_layers(self.network)
        return train_flops_per_sequence(self.network.config, head, seq_len=seq_len, frozen=frozen)

    def recompute_layers(self, checkpoint: Checkpoint) -> None:
        """Keep only the input of each layer for the backward pass. RuntimeError if no layer was recognised."""
        if not recompute_layers(self.network, checkpoint):
            raise RuntimeError(f"{type(self.network).__name__} has no layers that are known to be recomputable")

    def compile_layers(self, optimised: Callable[[Any], Any]) -> int:
        """Run each layer by `optimised(forward)`. Returns how many graphs that is, for inputs of one shape: one in
        training and one in evaluation for each kind of layer. RuntimeError if no layer was recognised.
        """
        layers = repeated_layers(self.network)
        first = next((weight for weight in self.network.parameters() if weight.requires_grad), None)
        training, evaluation = set(), set()
        for layer in layers:
            weights = list(layer.parameters())
            kind = (type(layer), *((weight.shape, weight.requires_grad) for weight in weights))
            evaluation.add(kind)
            # Behind frozen layers, the input of the first trained one needs no gradient.
            training.add((kind, any(weight is first for weight in weights)))
            layer.forward = optimised(layer.forward)
        if not layers:
            raise RuntimeError(f"{type(self.network).__name__} has no layers that are known to be compilable")
        return len(training) + len(evaluation)

    def separate_layers(self) -> list[nn.Module]:
        """The layers, in their order, that have weights of their own."""
        return separate_layers(self.network)

    def loop_layers(self, make_loop: Callable[[nn.Module, int], Run]) -> bool:
        """Run a shared layer by `make_loop(layer, depth)`. Returns False and does nothing if no layer is shared."""
        shared = shared_layer(self.network)
        if shared is None:
            return False
        encoder, layer, depth = shared
        run_shared_layer_by(encoder, make_loop(layer, depth))
        return True

    def pick_by_products(self) -> None:
        """Pick the states of tokens by products of matrices, for devices that are slow at gathering. A head that reads
        all of them picks none.
        """

    def export(self, folder: Path) -> None:
        """Write a copy on the host, in float32, for from_pretrained of `transformers`."""
        copy = type(self.network)(self.network.config)
        copy.load_state_dict({name: value.cpu() for name, value in self.network.state_dict().items()})
        disable_progress_bar()  # it would last a fraction of a second
        copy.save_pretrained(folder)
        for path in folder.glob("*.safetensors"):  # the library makes them private, whatever the umask
            shutil.copymode(folder / "config.json", path)


class MaskedLM(Network):
    """A masked language model that computes logits [B, P, V] at the given positions only, instead of all S.

    A hook on the encoder picks its output at `positions` before the model's own head reads it. This works for every
    architecture whose head reads the encoder's last hidden state.
    """

    pick: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, network: PreTrainedModel, new: frozenset[str] = frozenset()) -> None:
        super().__init__(network, new)
        self._positions: Tensor | None = None
        self.pick = rows_at
        network.base_model.register_forward_hook(self._pick)

    def _pick(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        assert self._positions is not None
        output["last_hidden_state"] = self.pick(output.last_hidden_state, self._positions)
        return output

    def pick_by_products(self) -> None:
        self.pick = products_at

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor) -> Tensor:
        """Logits [B, P, V] at `positions` [B, P] of sequences `input_ids` [B, S] without padding (all int64)."""
        return self._checked(self._run(input_ids, token_type_ids, positions).logits, positions)

    def _run(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor) -> Any:
        self._positions = positions
        output = self.network(input_ids=input_ids, **self.segments(token_type_ids))
        self._positions = None
        return output

    def _checked(self, logits: Tensor, positions: Tensor) -> Tensor:
        if logits.shape[:2] != positions.shape:
            raise RuntimeError(
                f"{type(self.network).__name__} gave logits {tuple(logits.shape)} for {tuple(positions.shape)} "
                "positions: its head does not read the encoder's last hidden state"
            )
        return logits

    def head_parameters(self) -> list[nn.Parameter]:
        """No parameters: the head's largest weight is the encoder's embedding, and all are learnt at one rate."""
        return []


class OrderedMaskedLM(MaskedLM):
    """A masked language model that also predicts whether the two segments of a sequence are in their order."""

    def __init__(self, network: PreTrainedModel, new: frozenset[str] = frozenset()) -> None:
        super().__init__(network, new)
        if hasattr(network, "sop_classifier"):
            network.sop_classifier.dropout.p = 0.0  # Google's objective has none; transformers' is for fine-tuning

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Logits [B, P, V] as of MaskedLM, and logits [B, 2] of the order: as it is, swapped."""
        output = self._run(input_ids, token_type_ids, positions)
        return self._checked(output.prediction_logits, positions), output[ORDER_LOGITS[self.network.config.model_type]]


def rows_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """[B, P, H]: the rows of `hidden` [B, S, H] at `positions` [B, P] int64.

    Whole rows are copied, and added up in the backward pass. XLA makes of torch.gather one copy for each number, and in
    the backward pass one addition in memory for each.
    """
    num_sequences, seq_len, _ = hidden.shape
    first = torch.arange(0, num_sequences * seq_len, seq_len, device=positions.device)
    return hidden.flatten(0, 1).index_select(0, (positions + first[:, None]).flatten()).unflatten(0, positions.shape)


def products_at(hidden: Tensor, positions: Tensor) -> Tensor:
    """The same numbers as rows_at returns, as products with rows of zeros and a one: 2 * S * H FLOPs a position."""
    tokens = torch.arange(hidden.size(1), device=positions.device)
    return (positions[..., None] == tokens).to(hidden.dtype) @ hidden


def build_masked_lm(
    cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int, predicts_order: bool = False
) -> MaskedLM:
    """A model for a tokenizer of `vocab_size` pieces and sequences of `seq_len`. InputError if they do not fit."""
    config = model_config(cfg, vocab_size=vocab_size, pad_id=pad_id)
    check_fits(config, vocab_size=vocab_size, seq_len=seq_len)
    if predicts_order:
        known = " or ".join(ORDER_LOGITS)
        check(
            config.model_type in ORDER_LOGITS, f"task.sop=true needs a model of type {known}, not {config.model_type}"
        )
        return OrderedMaskedLM(*make_network(AutoModelForPreTraining, cfg, config, what="model to pretrain"))
    return MaskedLM(*make_network(AutoModelForMaskedLM, cfg, config, what="masked language model"))


def make_network(
    auto: Any, cfg: ModelConfig, config: PreTrainedConfig, *, what: str, new_head: bool = False
) -> tuple[PreTrainedModel, frozenset[str]]:
    """A model by `auto` (AutoModelFor...), in float32, with random weights or a checkpoint's, and frozen as cfg says;
    and the names of the parameters that the checkpoint did not have. InputError if transformers has no such model.
    """
    check(
        type(config) in auto._model_mapping,
        f"transformers has no {what} of type {config.model_type}; choose albert, bert, ...",
    )
    fast = auto._model_mapping[type(config)]._supports_sdpa
    if not fast:
        logger.warning("%s has no SDPA attention in transformers: steps take more time and memory", config.model_type)
    attention = "sdpa" if fast else "eager"
    new: frozenset[str] = frozenset()
    if cfg.pretrained is None:
        network = auto.from_config(config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=False)
    else:
        network, new = read_weights(auto, cfg.pretrained, config, attention=attention, new_head=new_head)
    freeze(network, embeddings=cfg.freeze_embeddings, layers=cfg.freeze_layers)
    return network, new


def model_config(cfg: ModelConfig, *, vocab_size: int, pad_id: int) -> PreTrainedConfig:
    """The configuration for transformers: that of a checkpoint, or of the architecture with the given sizes."""
    given = {ours: getattr(cfg, ours) for ours in SIZES if getattr(cfg, ours) is not None}
    if cfg.pretrained is not None:
        config = read_model_config(cfg.pretrained)
        for ours, wanted in given.items():
            theirs = their_name(config, ours, wanted)
            if "dropout" in ours:
                setattr(config, theirs, wanted)
                continue
            value = getattr(config, theirs)
            check(wanted == value, f"model.{ours}={wanted}, but {cfg.pretrained} has {value}; leave it out")
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
    name = cfg.pretrained or f"model.architecture={cfg.architecture}"
    check(
        hasattr(config, "hidden_size"),
        f"{name} is not an encoder of text ({config.model_type}); choose albert, bert, ...",
    )
    heads = getattr(config, "num_attention_heads", 1)
    check(
        config.hidden_size % heads == 0,
        f"model.hidden_size={config.hidden_size} must be a multiple of model.num_heads={heads}",
    )
    if getattr(config, "hidden_act", None) == "gelu_new":
        # This is the same function as one kernel instead of eight, which saves 33-40 % less for the backward pass.
        config.hidden_act = "gelu_pytorch_tanh"
    return config


def their_name(config: PreTrainedConfig, ours: str, wanted: object) -> str:
    """The name of one of SIZES in a configuration of transformers. InputError if it has no such size."""
    theirs = next((name for name in SIZES[ours] if hasattr(config, name)), None)
    if theirs is None:
        raise InputError(f"model.{ours}={wanted}: {config.model_type} has no such size; leave it out")
    return theirs


def check_fits(config: PreTrainedConfig, *, vocab_size: int, seq_len: int) -> None:
    check(
        config.vocab_size >= vocab_size,
        f"model.vocab_size={config.vocab_size} is smaller than the tokenizer's {vocab_size}",
    )
    positions = most_positions(config)
    check(
        positions is None or seq_len <= positions,
        f"seq_len={seq_len} is longer than the model's {positions} positions; raise model.max_positions or "
        "prepare shorter sequences",
    )
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "max_positions", "embedding_size")
    vocab, hidden, ffn, layers, positions, embedding = (size_of(config, name) for name in names)
    groups = getattr(config, "num_hidden_groups", 1)  # of ALBERT
    shape = Shape(config.model_type, vocab, hidden, ffn, layers, positions, 2, embedding, groups)
    needed_bytes, memory_bytes = 4 * shape.trained_parameters(HeadSize()), total_memory_bytes()
    sizes = ", ".join(f"{ours} {value}" for ours in SIZES if "dropout" not in ours and (value := size_of(config, ours)))
    check(
        needed_bytes < memory_bytes,
        f"the model's weights alone take about {needed_bytes / 1e9:,.0f} GB, and this machine has "
        f"{memory_bytes / 1e9:,.0f} GB of memory; choose smaller sizes than model's {sizes}",
    )


def most_positions(config: PreTrainedConfig) -> int | None:
    """The number of tokens that a model can read; None if its configuration sets no limit."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in OFFSET_POSITIONS:
        return positions - config.pad_token_id - 1
    return positions


def size_of(config: PreTrainedConfig, ours: str) -> int:
    """One of SIZES in a configuration of transformers; 0 if it has no such size."""
    return next((getattr(config, theirs) or 0 for theirs in SIZES[ours] if hasattr(config, theirs)), 0)
