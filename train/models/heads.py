"""Encoders of `transformers` whose head predicts a label of the text or of each token, or the span of an answer.

Shapes: B sequences, S tokens, C labels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from train.config import ModelConfig, check, shortlist
from train.config.checks import SHOWN_NAMES
from train.models.encoder import fitting_config, make_network
from train.models.network import Network

logger = logging.getLogger("train")

SCALE = "target_scale"  # a key in transformers' configuration, while a model learns
# Configurations of transformers have these names for a head's dropout.
DROPOUTS = ("classifier_dropout_prob", "classifier_dropout", "cls_dropout", "seq_classif_dropout", "qa_dropout")


class PaddedEncoder(Network):
    """An encoder that reads padded sequences, with the head of transformers' AutoModelFor<head>."""

    def forward(self, input_ids: Tensor, real: Tensor | None, token_type_ids: Tensor) -> Tensor:
        """Return logits: [B, C] for a sequence's label, [B, S, C] for tokens' labels, [B, S, 2] for a span's ends.

        The inputs are [B, S] int64; `real` is 1 at tokens, 0 at padding; None: no padding.
        """
        mask = None if real is None else self.mask(real)
        inputs = {"input_ids": input_ids, "attention_mask": mask, **self.segments(token_type_ids)}
        output = self.network(**inputs)
        if "start_logits" in output:
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        logits: Tensor = output.logits
        return logits

    def finish(self, plain: PreTrainedModel) -> None:
        # The outputs for standardised targets are brought into their units.
        scale = vars(plain.config).pop(SCALE, None)
        if scale is not None:
            rescale(last_layer(plain)[1], scale["mean"], scale["deviation"])


def logits_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the output of a PaddedEncoder for a batch, which has no mask if it has no padding."""
    logits: Tensor = model(inputs["input_ids"], inputs.get("attention_mask"), inputs["token_type_ids"])
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
    """Return a model of AutoModelFor<head> for a tokenizer of `vocab_size` pieces and sequences of at most `seq_len`.

    `labels` names the outputs in their order. `problem_type` is the objective of a SequenceClassification head in
    transformers' terms. model.hidden_dropout is the head's dropout too. Raises InputError if they do not fit, or if the
    checkpoint has a head for other labels.
    """
    config = fitting_config(cfg, vocab_size=vocab_size, pad_id=pad_id, seq_len=seq_len)
    if cfg.hidden_dropout is not None:
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, cfg.hidden_dropout)
    if "Classification" in head:
        check_labels(cfg, config, labels)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    else:
        config.num_labels = 2  # start and end; a checkpoint may have different labels
    vars(config).pop(SCALE, None)  # a checkpoint's config.json may hold anything
    if head == "SequenceClassification":
        config.problem_type = problem_type
    auto = getattr(transformers, f"AutoModelFor{head}")
    model = PaddedEncoder(*make_network(auto, cfg, config, seq_len, what=f"AutoModelFor{head}", new_head=cfg.new_head))
    model.head_share = 0.0 if head == "SequenceClassification" else 1.0
    return model


@dataclass(frozen=True)
class Scale:
    """The scale of a head's C outputs: (number - mean) / deviation."""

    mean: list[float]  # [C]
    deviation: list[float]  # [C], above 0


def learn_scaled(model: PaddedEncoder, scale: Scale | None, *, is_trained: bool) -> None:
    """Have the model learn in `scale`, which its configuration keeps for the export.

    A head that `is_trained` already computes numbers in their units. Raises InputError if its last layer cannot be
    converted.
    """
    if scale is None:
        return
    name, layer = last_layer(model.network)
    setattr(model.network.config, SCALE, asdict(scale))
    if f"{name}.weight" not in model.new and is_trained:
        mean, deviation = np.array(scale.mean), np.array(scale.deviation)
        rescale(layer, (-mean / deviation).tolist(), (1 / deviation).tolist())


def last_layer(network: PreTrainedModel) -> tuple[str, nn.Linear]:
    """Return the layer that computes the outputs of a head, and its name. Raises InputError if it has no biases."""
    inside = set(network.base_model.modules())
    layers = [(name, module) for name, module in network.named_modules() if module not in inside]
    linear = [(name, layer) for name, layer in layers if isinstance(layer, nn.Linear)]
    check(
        bool(linear) and linear[-1][1].out_features == network.config.num_labels and linear[-1][1].bias is not None,
        f"the head of {type(network).__name__} does not end in a linear layer with biases: set task.standardize=false",
    )
    return linear[-1]


@torch.no_grad()
def rescale(layer: nn.Linear, mean: Sequence[float], deviation: Sequence[float]) -> None:
    """Have a layer compute output * deviation + mean, by new weights: another model may have the old ones."""
    first, factor = (
        torch.tensor(values, dtype=torch.float64, device=layer.weight.device) for values in (mean, deviation)
    )
    layer.weight = nn.Parameter((layer.weight.double() * factor[:, None]).float())
    layer.bias = nn.Parameter((layer.bias.double() * factor + first).float())


def names_of_head(config: PreTrainedConfig) -> list[str]:
    """Return the labels that a head was trained on. Raises InputError if they are not texts that all differ."""
    names = [config.id2label.get(number) for number in range(config.num_labels)]
    is_usable = all(isinstance(name, str) for name in names) and len(set(names)) == len(names)
    shown = shortlist(map(repr, names))
    check(
        is_usable,
        f"{config.name_or_path}/config.json: id2label must have a different name for each label, not {shown}",
    )
    return names


def default_names(number: int) -> list[str]:
    """Return what transformers calls so many outputs that were given no names."""
    return [f"LABEL_{each}" for each in range(number)]


def check_labels(cfg: ModelConfig, config: PreTrainedConfig, labels: Sequence[str]) -> None:
    """Raise InputError if a checkpoint's head is for other labels, or another order."""
    # LABEL_0, ... stand for no names: the log says which labels they are taken for.
    has_head = any("Classification" in name for name in config.architectures or ())
    if cfg.pretrained is None or cfg.new_head or not has_head:
        return
    theirs, ours = [config.id2label[number] for number in range(config.num_labels)], list(labels)
    has_names = theirs != default_names(len(theirs))
    remedy = "model.new_head=true begins with a new head"
    if sorted(theirs) == sorted(ours):
        order = f"[{','.join(theirs)}]" if len(theirs) <= SHOWN_NAMES else "the order of its config.json"
        remedy = f"set data.labels={order}, or {remedy}"
    check(
        len(theirs) == len(ours) and not (has_names and theirs != ours),
        f"{cfg.pretrained} has a head for the labels {shortlist(theirs)}, the data has {shortlist(ours)}; {remedy}",
    )
    if not has_names and ours != theirs and ours != [str(number) for number in range(len(ours))]:
        report_taken(cfg.pretrained, tuple(zip(theirs, ours, strict=True)))


@cache  # a run checks more than once
def report_taken(source: str, pairs: tuple[tuple[str, str], ...]) -> None:
    logger.warning(
        "%s has a head without names: %s; if that is wrong, set data.labels in its order, or model.new_head=true",
        source,
        shortlist(f"{theirs} is taken for {ours}" for theirs, ours in pairs),
    )
