"""Encoders of `transformers` with a head for a label, or for the span of an answer.

Shapes: B sequences, S tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, PreTrainedConfig

from train.config import ModelConfig, check
from train.models.encoder import Network, check_fits, make_network, model_config
from train.models.flops import train_flops_per_sequence
from train.models.layers import frozen_layers

# What architectures call the dropout of a head.
DROPOUTS = ("classifier_dropout_prob", "classifier_dropout", "cls_dropout", "seq_classif_dropout", "qa_dropout")


class Classifier(Network):
    """One label for a sequence: logits [B, C]."""

    def forward(self, input_ids: Tensor, real: Tensor, token_type_ids: Tensor) -> Tensor:
        """All [B, S] int64; `real` is 1 at tokens and 0 at padding."""
        inputs = {"input_ids": input_ids, "attention_mask": self.mask(real), **self.segments(token_type_ids)}
        logits: Tensor = self.network(**inputs).logits
        return logits

    def train_flops(self, seq_len: int) -> float | None:
        """Of one sequence; None for an architecture whose formula is not known."""
        config = self.network.config
        return train_flops_per_sequence(
            config, seq_len=seq_len, labels=config.num_labels, frozen=frozen_layers(self.network)
        )


class SpanReader(Network):
    """Where an answer begins and ends: logits [B, S, 2], of the start and of the end."""

    def forward(self, input_ids: Tensor, real: Tensor, token_type_ids: Tensor) -> Tensor:
        """All [B, S] int64; `real` is 1 at tokens and 0 at padding."""
        inputs = {"input_ids": input_ids, "attention_mask": self.mask(real), **self.segments(token_type_ids)}
        found = self.network(**inputs)
        return torch.stack([found.start_logits, found.end_logits], dim=-1)

    def train_flops(self, seq_len: int) -> float | None:
        """Of one sequence; None for an architecture whose formula is not known."""
        return train_flops_per_sequence(
            self.network.config, seq_len=seq_len, has_spans=True, frozen=frozen_layers(self.network)
        )


def build_classifier(
    cfg: ModelConfig, *, labels: Sequence[str], vocab_size: int, pad_id: int, seq_len: int
) -> Classifier:
    """Model for `labels` in the order of their numbers, a tokenizer of `vocab_size` pieces and sequences of `seq_len`
    at most. InputError if they do not fit, or if the checkpoint has a head for other labels.
    """
    config = head_config(cfg, vocab_size=vocab_size, pad_id=pad_id, seq_len=seq_len)
    check_labels(cfg, config, labels)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    auto, what = AutoModelForSequenceClassification, "model to classify sequences"
    return Classifier(*make_network(auto, cfg, config, what=what, new_head=cfg.new_head))


def build_span_reader(cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int) -> SpanReader:
    """Model for a tokenizer of `vocab_size` pieces and sequences of `seq_len`. InputError if they do not fit."""
    config = head_config(cfg, vocab_size=vocab_size, pad_id=pad_id, seq_len=seq_len)
    config.num_labels = 2  # start and end; a checkpoint may have labels of its own
    auto, what = AutoModelForQuestionAnswering, "model to answer questions"
    return SpanReader(*make_network(auto, cfg, config, what=what, new_head=cfg.new_head))


def head_config(cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int) -> PreTrainedConfig:
    """The encoder's configuration; model.hidden_dropout is the head's dropout as well."""
    config = model_config(cfg, vocab_size=vocab_size, pad_id=pad_id)
    check_fits(config, vocab_size=vocab_size, seq_len=seq_len)
    if cfg.hidden_dropout is not None:
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, cfg.hidden_dropout)
    return config


def check_labels(cfg: ModelConfig, config: PreTrainedConfig, labels: Sequence[str]) -> None:
    """Raises InputError if a checkpoint has a head whose labels are not these in this order. LABEL_0, LABEL_1, ...
    are what transformers calls labels without a name.
    """
    has_head = any("Classification" in name for name in config.architectures or ())
    if cfg.pretrained is None or cfg.new_head or not has_head:
        return
    theirs, ours = [config.id2label[number] for number in range(config.num_labels)], list(labels)
    has_names = theirs != [f"LABEL_{number}" for number in range(len(theirs))]
    remedy = "model.new_head=true begins with a new head"
    if sorted(theirs) == sorted(ours):
        remedy = f"say data.labels=[{','.join(theirs)}], or {remedy}"
    check(
        len(theirs) == len(ours) and not (has_names and theirs != ours),
        f"{cfg.pretrained} has a head for the labels {', '.join(theirs)}, the data has {', '.join(ours)}; {remedy}",
    )
