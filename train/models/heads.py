"""Encoders of `transformers` with a head that predicts a label for a text or for each token, or the span of an answer.

Shapes: B sequences, S tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from train.config import ModelConfig, check, shortlist
from train.config.checks import SHOWN_NAMES
from train.models.encoder import fitting_config, make_network
from train.models.network import Network, with_unread_masks
from train.models.unpadded import Padding, can_leave_out_padding, leave_out_padding
from train.storage.atomic_io import warn_once

# The possible names of a head's dropout in transformers' configurations.
DROPOUTS = (
    "classifier_dropout_prob",
    "classifier_dropout",
    "cls_dropout",
    "seq_classif_dropout",
    "qa_dropout",
)


@dataclass(frozen=True)
class Head:
    """The properties of an AutoModelFor<head> that transformers does not declare."""

    share: float  # the share of positions that it reads; about 0 if it reads one token
    has_labels: bool = True  # False: it has two outputs, which have no names


HEADS = {
    "SequenceClassification": Head(share=0.0),
    "TokenClassification": Head(share=1.0),
    "QuestionAnswering": Head(share=1.0, has_labels=False),
}


@dataclass(frozen=True)
class Scale:
    """The scale of a head's output, which is (target - mean) / deviation."""

    mean: float
    deviation: float

    def __post_init__(self) -> None:
        is_finite = isfinite(self.mean) and isfinite(self.deviation)
        check(
            is_finite and self.deviation > 0,
            f"a scale needs a finite deviation above 0: {self}",
        )


class PaddedEncoder(Network):
    """An encoder that reads padded sequences, with the head of transformers' AutoModelFor<head>."""

    # the scale of the targets that the head learns; its export has none
    scale: Scale | None = None
    leaves_out_padding = False  # the layers read no padding in training

    def leave_out_padding(self) -> None:
        # a class of the user's may read hidden states inside, or not hand on `padding`
        is_known = type(self.network).__module__.startswith("transformers.")
        can = is_known and can_leave_out_padding(self.network.config)
        if not can or self.leaves_out_padding:
            return
        assert self.encoder is not None
        leave_out_padding(self.network, self.encoder)
        self.leaves_out_padding = True

    def forward(self, input_ids: Tensor, real: Tensor | None, token_type_ids: Tensor) -> Tensor:
        """Return logits: [B, C] for a label per sequence, [B, S, C] for one per token, [B, S, 2] for a span's two ends.

        The inputs are [B, S] int64. `real` is 1 at tokens and 0 at padding; None if there is no padding.
        """
        options: dict[str, Any] = self.segments(token_type_ids)
        if real is not None:
            mask = self.mask(real)
            options["attention_mask"] = mask
            if self.leaves_out_padding and self.training:
                padding = Padding(real, mask.dtype)
                if padding.is_worth_it:
                    options["padding"] = padding
        output = self.network(input_ids=input_ids, **options)
        if "start_logits" in output:
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        logits: Tensor = output.logits
        return logits

    def finish(self, plain: PreTrainedModel) -> None:
        # A head that was trained on standardised targets is changed to return numbers in the targets' units.
        if self.scale is not None:
            rescale(last_layer(plain)[1], self.scale.mean, self.scale.deviation)


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return a PaddedEncoder's logits for a batch. A batch without padding has no attention mask."""
    mask = inputs.get("attention_mask")
    unread = nullcontext() if mask is None else with_unread_masks(given=True)
    with unread:
        logits: Tensor = model(inputs["input_ids"], mask, inputs["token_type_ids"])
    return logits


def build_with_head(
    head: str,
    cfg: ModelConfig,
    *,
    labels: Sequence[str],
    vocab_size: int,
    pad_id: int,
    seq_len: int,
    problem_type: str = "single_label_classification",
) -> PaddedEncoder:
    """Return an AutoModelFor<head> for a tokenizer of `vocab_size` tokens and sequences of at most `seq_len`.

    `labels` names the outputs in order. `problem_type` is transformers' name for the objective of a
    SequenceClassification head. model.hidden_dropout also sets the head's dropout. Raises InputError if HEADS has no
    such head, if cfg does not fit these sizes, or if the checkpoint has a head for other labels.
    """
    check(head in HEADS, f"the task's head {head} is unknown; choose one of: {', '.join(HEADS)}")
    config = fitting_config(cfg, vocab_size=vocab_size, pad_id=pad_id, seq_len=seq_len)
    if config.model_type == "big_bird":
        # transformers changes sparse attention to full attention, for good, when it reads the first short batch.
        config.attention_type = "original_full"
    if cfg.hidden_dropout is not None:
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, cfg.hidden_dropout)
    if HEADS[head].has_labels:
        check_labels(cfg, config, labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    else:
        # The labels are start and end; a checkpoint's configuration may have others.
        config.num_labels = 2
    if head == "SequenceClassification":
        config.problem_type = problem_type
    name = f"AutoModelFor{head}"
    auto = getattr(transformers, name)
    made = make_network(auto, cfg, config, what=name, new_head=cfg.new_head)
    model = PaddedEncoder(*made)
    model.head_share = HEADS[head].share
    return model


def learn_scaled(model: PaddedEncoder, scale: Scale | None, *, is_trained: bool) -> None:
    """Make the model predict targets in `scale`, which its export reverses.

    `is_trained`: a loaded head already returns numbers in the targets' units, so its last layer is converted to the
    scale. Raises InputError if the head does not end in a linear layer with biases.
    """
    if scale is None:
        return
    name, layer = last_layer(model.network)
    model.scale = scale
    if f"{name}.weight" not in model.new and is_trained:
        rescale(layer, -scale.mean / scale.deviation, 1 / scale.deviation)


def last_layer(network: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Return the name of the head's last layer, and the layer. Raises InputError unless it is linear with biases."""
    inside = set(network.base_model.modules())
    layers = [(name, module) for name, module in network.named_modules() if module not in inside]
    linear = [(name, layer) for name, layer in layers if isinstance(layer, nn.Linear)]
    check(
        bool(linear)
        and linear[-1][1].out_features == network.config.num_labels
        and linear[-1][1].bias is not None,
        f"the head of {type(network).__name__} does not end in a linear layer with biases; choose another model",
    )
    return linear[-1]


@torch.no_grad()
def rescale(layer: nn.Linear, mean: float, deviation: float) -> None:
    """Make a layer return output * deviation + mean. It gets new tensors: another model may use the old ones."""
    assert layer.bias is not None
    layer.weight = nn.Parameter((layer.weight.double() * deviation).float())
    layer.bias = nn.Parameter((layer.bias.double() * deviation + mean).float())


def names_of_head(config: PreTrainedConfig) -> list[str]:
    """Return the labels that a head was trained on. Raises InputError unless they are different strings."""
    names = [config.id2label.get(number) for number in range(config.num_labels)]
    is_usable = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    shown = shortlist(map(repr, names))
    check(
        is_usable,
        f"{config.name_or_path}/config.json: id2label must have a different name for each label, not {shown}",
    )
    return names


def default_names(number: int) -> list[str]:
    """Return transformers' default names of a head's outputs: LABEL_0, LABEL_1, ..."""
    return [f"LABEL_{each}" for each in range(number)]


def check_labels(cfg: ModelConfig, config: PreTrainedConfig, labels: Sequence[str]) -> None:
    """Raise InputError if a checkpoint's head has other labels, or has them in a different order.

    A head with transformers' default names is accepted, and a warning says which label each of its outputs becomes.
    """
    has_head = any("Classification" in name for name in config.architectures or ())
    if cfg.pretrained is None or cfg.new_head or not has_head:
        return
    theirs = [config.id2label[number] for number in range(config.num_labels)]
    ours = list(labels)
    has_names = theirs != default_names(len(theirs))
    remedy = "model.new_head=true starts with a new head"
    if sorted(theirs) == sorted(ours):
        order = "the order of its config.json"
        if len(theirs) <= SHOWN_NAMES:
            order = f"[{','.join(theirs)}]"
        remedy = f"set data.labels={order}, or {remedy}"
    check(
        len(theirs) == len(ours) and not (has_names and theirs != ours),
        f"{cfg.pretrained} has a head for the labels {shortlist(theirs)}, but the data has {shortlist(ours)}; {remedy}",
    )
    are_numbers = ours == [str(number) for number in range(len(ours))]
    if not has_names and ours != theirs and not are_numbers:
        pairs = zip(theirs, ours, strict=True)
        taken = shortlist(f"{their} is taken as {our}" for their, our in pairs)
        says = f"{cfg.pretrained} has a head without label names: {taken}; if that is wrong, set data.labels in the"
        # A run checks the labels more than once.
        warn_once(says, f"{says} head's order, or model.new_head=true")
