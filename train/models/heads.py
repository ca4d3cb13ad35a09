"""Encoders of `transformers` with a head that predicts a label or the span of an answer.

Shapes: B sequences, S tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification, PreTrainedConfig

from train.config import ModelConfig, check
from train.models.encoder import Network, check_fits, make_network, model_config
from train.models.flops import train_flops_per_sequence
from train.models.layers import frozen_layers

# The names of a head's dropout in the configurations of transformers.
DROPOUTS = ("classifier_dropout_prob", "classifier_dropout", "cls_dropout", "seq_classif_dropout", "qa_dropout")


class PaddedEncoder(Network):
    """An encoder with a head that reads padded sequences."""

    has_spans = False  # whether the head scores each token, and not the sequence

    def forward(self, input_ids: Tensor, real: Tensor | None, token_type_ids: Tensor) -> Tensor:
        """Logits of sequences. The inputs are [B, S] int64; `real` is 1 at tokens, 0 at padding; None: no padding."""
        mask = None if real is None else self.mask(real)
        inputs = {"input_ids": input_ids, "attention_mask": mask, **self.segments(token_type_ids)}
        return self.logits(self.network(**inputs))

    def logits(self, output: Any) -> Tensor:
        """The logits of the head, from the output of the model of transformers."""
        raise NotImplementedError

    def train_flops(self, seq_len: int) -> float | None:
        """FLOPs to train on one sequence of `seq_len` tokens; None for an architecture without a known formula."""
        config = self.network.config
        labels = 0 if self.has_spans else config.num_labels
        frozen = frozen_layers(self.network)
        return train_flops_per_sequence(config, seq_len=seq_len, labels=labels, has_spans=self.has_spans, frozen=frozen)


class Classifier(PaddedEncoder):
    """One label for a sequence: logits [B, C]."""

    def logits(self, output: Any) -> Tensor:
        logits: Tensor = output.logits
        return logits


class SpanReader(PaddedEncoder):
    """The span of an answer: logits [B, S, 2] of its start and end."""

    has_spans = True
    head_share = 1.0

    def logits(self, output: Any) -> Tensor:
        return torch.stack([output.start_logits, output.end_logits], dim=-1)


def build_classifier(
    cfg: ModelConfig, *, labels: Sequence[str], vocab_size: int, pad_id: int, seq_len: int
) -> Classifier:
    """A model for `labels` in the order of their numbers, a tokenizer of `vocab_size` pieces and sequences of at most
    `seq_len`. InputError if they do not fit, or if the checkpoint has a head for other labels.
    """
    config = head_config(cfg, vocab_size=vocab_size, pad_id=pad_id, seq_len=seq_len)
    check_labels(cfg, config, labels)
    config.id2label = dict(enumerate(labels))
    config.label2id = {label: number for number, label in enumerate(labels)}
    config.problem_type = "single_label_classification"
    auto, what = AutoModelForSequenceClassification, "model to classify sequences"
    return Classifier(*make_network(auto, cfg, config, what=what, new_head=cfg.new_head))


def build_span_reader(cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int) -> SpanReader:
    """A model for a tokenizer of `vocab_size` pieces and sequences of `seq_len`. InputError if they do not fit."""
    config = head_config(cfg, vocab_size=vocab_size, pad_id=pad_id, seq_len=seq_len)
    config.num_labels = 2  # start and end; a checkpoint may have labels of its own
    auto, what = AutoModelForQuestionAnswering, "model to answer questions"
    return SpanReader(*make_network(auto, cfg, config, what=what, new_head=cfg.new_head))


def head_config(cfg: ModelConfig, *, vocab_size: int, pad_id: int, seq_len: int) -> PreTrainedConfig:
    """The encoder's configuration. model.hidden_dropout is the head's dropout as well."""
    config = model_config(cfg, vocab_size=vocab_size, pad_id=pad_id)
    check_fits(config, vocab_size=vocab_size, seq_len=seq_len)
    if cfg.hidden_dropout is not None:
        for name in DROPOUTS:
            if hasattr(config, name):
                setattr(config, name, cfg.hidden_dropout)
    return config


def check_labels(cfg: ModelConfig, config: PreTrainedConfig, labels: Sequence[str]) -> None:
    """Raise InputError if a checkpoint has a head for other labels, or for these in another order. transformers calls
    labels without a name LABEL_0, LABEL_1, ...
    """
    has_head = any("Classification" in name for name in config.architectures or ())
    if cfg.pretrained is None or cfg.new_head or not has_head:
        return
    theirs, ours = [config.id2label[number] for number in range(config.num_labels)], list(labels)
    has_names = theirs != [f"LABEL_{number}" for number in range(len(theirs))]
    remedy = "model.new_head=true begins with a new head"
    if sorted(theirs) == sorted(ours):
        remedy = f"set data.labels=[{','.join(theirs)}], or {remedy}"
    check(
        len(theirs) == len(ours) and not (has_names and theirs != ours),
        f"{cfg.pretrained} has a head for the labels {', '.join(theirs)}, the data has {', '.join(ours)}; {remedy}",
    )
