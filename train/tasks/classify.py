"""One label for a text or a pair of texts.

Shapes: B texts, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ClassifyConfig, TrainConfig, check
from train.data.masking import IGNORE_INDEX
from train.data.table_facts import column
from train.models.encoder import model_config
from train.models.heads import Classifier, build_classifier, check_labels
from train.tasks import scores
from train.tasks.featurize import ClassifyFeaturizer
from train.tasks.finetune import FineTuning, Sizes, Split, json_lines

METRICS = ("loss", *scores.NAMES)


def build(cfg: TrainConfig) -> ClassifyTask:
    return ClassifyTask(cfg)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """[rows, C] float64 of logits [rows, C]."""
    return torch.from_numpy(logits).double().softmax(-1).numpy()


def statistics(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, 1 + C] float32: loss and logits, of logits [B, C] and labels [B] int64."""
    logits = logits.float()
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return torch.cat([losses[:, None], logits], 1)


def class_weights(cfg: ClassifyConfig, labels: Sequence[str], counts: np.ndarray) -> np.ndarray | None:
    """[C] float32: what an error counts; None: all the same. `counts` [C]: training rows of each label.

    Balanced as scikit-learn's "balanced": rows / (labels * rows of the label).
    """
    given = cfg.class_weights
    if given is not None:
        check(
            len(given) == len(labels),
            f"task.class_weights has {len(given)} numbers for {len(labels)} labels ({', '.join(labels)})",
        )
        return np.array(given, np.float32)
    if not cfg.balanced:
        return None
    absent = [name for name, count in zip(labels, counts, strict=True) if not count]
    check(not absent, f"task.balanced=true: no training row has the label {', '.join(absent)}; set task.class_weights")
    return (counts.sum() / (len(labels) * counts)).astype(np.float32)


class ClassifyTask(FineTuning):
    """See `train.tasks.Task`."""

    def __init__(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.task, ClassifyConfig)
        sizes = Sizes.of(cfg)
        columns = {"labels": "label"}
        featurizer = ClassifyFeaturizer(sizes.tokenizer, seq_len=sizes.lengths[-1])
        super().__init__(cfg, sizes, featurizer, train_columns=columns, eval_columns=columns, metrics=METRICS)
        self.labels: list[str] = self.tables.facts["labels"]
        vocab_size, pad_id = len(self.tokenizer), self.tokenizer.pad_token_id
        check_labels(sizes.model, model_config(sizes.model, vocab_size=vocab_size, pad_id=pad_id), self.labels)
        self.label_smoothing = cfg.task.label_smoothing
        counts = np.bincount(self.train_table.values["labels"], minlength=len(self.labels))
        weights = class_weights(cfg.task, self.labels, counts)
        self.train_table.weights = weights
        self.weights = None if weights is None else torch.from_numpy(weights)

    def build_model(self) -> Classifier:
        return build_classifier(
            self.model_config,
            labels=self.labels,
            vocab_size=len(self.tokenizer),
            pad_id=self.tokenizer.pad_token_id,
            seq_len=self.lengths[-1],
        )

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Summed over the texts; over the sum of their weights ("count") it is torch's weighted mean."""
        logits = self._logits(model, inputs)
        if self.weights is not None:
            self.weights = self.weights.to(logits.device)  # once
        return F.cross_entropy(
            logits.float(),
            inputs["labels"],
            self.weights,
            ignore_index=IGNORE_INDEX,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """[B, 1 + C]: loss, without weights and smoothing, and logits."""
        return statistics(self._logits(model, inputs), inputs["labels"])

    def _logits(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"])
        return logits

    def evaluate(self, rows: np.ndarray) -> dict[str, dict[str, float]]:
        found = {}
        for split in self.splits:
            part = split.of(rows)
            loss = float(part[:, 0].mean(dtype=np.float64))
            found[split.name] = {"loss": loss, **scores.summary(column(split.features, "label"), predicted(part))}
        return found

    def results(
        self, split: Split, rows: np.ndarray, found: dict[str, dict[str, float]]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """A line for each text, and the tables of each class."""
        labels, answers = column(split.features, "label"), predicted(rows)
        ids = self.tables.examples(split.name).select(column(split.features, "row"))["id"]
        lines = (
            {
                "id": name,
                "label": self.labels[label],
                "prediction": self.labels[answer],
                "probabilities": dict(zip(self.labels, shares, strict=True)),
            }
            for name, label, answer, shares in zip(
                ids, labels, answers, probabilities(rows[:, 1:]).tolist(), strict=True
            )
        )
        return {f"{split.name}.jsonl": json_lines(lines)}, scores.tables(labels, answers, self.labels)


def predicted(rows: np.ndarray) -> np.ndarray:
    """[rows] int64: the labels with the highest logits, of statistics [rows, 1 + C]."""
    return rows[:, 1:].argmax(1)
