"""Any number of labels for texts or pairs: features, loss, metrics and predictions. Shapes: B texts, C labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, List, Value
from torch import Tensor

from train.config import check
from train.data.records.featurizer import TOKENS
from train.data.records.kinds import STRING, RowKind
from train.data.records.table_facts import column
from train.data.records.token_rows import TokenRows
from train.models.heads import names_of_head
from train.tasks.classify import (
    Classification,
    ClassifyFeaturizer,
    check_each,
    given_weights,
    read_texts,
)
from train.tasks.finetune import Entry, known, mean_loss, table_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

USUAL = 0.5  # the threshold of evaluations, while the best one is not chosen yet

MULTILABEL_ROWS = RowKind(
    "multilabel",
    columns={
        "text": STRING,
        "text_pair": STRING,
        "label": List(STRING),
    },
    read=read_texts,
    target="label",
    split_by="text",
    tokens={"label": List(Value("float32"))},
    takes_columns=True,
)


class MultiLabelFeaturizer(ClassifyFeaturizer):
    """A featurizer that tokenizes texts as a classifier's does; a label is 1 if the text has it, otherwise 0."""

    kind = MULTILABEL_ROWS

    @property
    def types(self) -> dict[str, Any]:
        return TOKENS | {"label": List(Value("float32"), length=len(self.labels))}

    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        num_rows = len(indices)
        has_label = np.zeros((num_rows, len(self.labels)), np.float32)
        for row, numbers in enumerate(rows.get("label", [[]] * num_rows)):
            has_label[row, numbers] = 1
        return super().features({**rows, "label": list(has_label)}, indices, split=split)


class MultiLabel(Classification):
    """Any number of labels for a text. A prediction has "id", "label" (if known), "prediction", "probabilities"."""

    makes_features = MultiLabelFeaturizer
    metric_names = ("loss", "f1_micro", "f1_macro", "average_precision", "subset_accuracy")

    def begin(self, train_table: TokenRows) -> None:
        self.limits()
        has_label = train_table.values["labels"]
        weights = positive_weights(self.cfg.positive_weights, self.labels, has_label)
        if weights is not None:
            self.weights = torch.from_numpy(weights)

    def limits(self) -> list[float]:
        """Return the minimum probability at which each label is predicted, [C]. Raises InputError if one is missing."""
        threshold = self.cfg.threshold
        if threshold == "best":
            # A threshold that is chosen on the same rows would make an evaluation's scores too good.
            threshold = USUAL
        if not isinstance(threshold, list):
            return [threshold] * len(self.labels)
        check_each("task.threshold", threshold, self.labels)
        return threshold

    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # The engine divides this sum by texts * labels ("count"). The result is torch's mean.
        if self.weights is not None:
            self.weights = self.weights.to(logits.device)  # moved once
        return losses_of(logits, inputs["labels"], self.weights).sum()

    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 1 + C]: the unweighted loss, averaged over the labels, and logits [B, C].
        losses = losses_of(logits, inputs["labels"], None).mean(1, keepdim=True)
        return torch.cat([losses, logits.float()], 1)

    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        shares = self.probabilities(statistics[:, 1:])
        metrics = self.scores(self.truth(features), shares)
        return {"loss": mean_loss(statistics), **metrics}

    def truth(self, features: Dataset) -> np.ndarray:
        """Return a mask of the labels that the texts have, [rows, C]."""
        return column(features, "label").reshape(-1, len(self.labels)).astype(bool)

    def scores(self, truth: np.ndarray, shares: np.ndarray) -> dict[str, float]:
        """Return metrics of a mask and of probabilities [rows, C]."""
        # Average precision is the mean over the labels that occur.
        from sklearn.metrics import accuracy_score, average_precision_score, f1_score

        answers = shares >= self.limits()
        precisions = []
        for label in np.flatnonzero(truth.any(0)):
            precision = average_precision_score(truth[:, label], shares[:, label])
            precisions.append(precision)
        return {
            "f1_micro": float(
                f1_score(
                    truth,
                    answers,
                    average="micro",
                    zero_division=0,
                )
            ),
            "f1_macro": float(
                f1_score(
                    truth,
                    answers,
                    average="macro",
                    zero_division=0,
                )
            ),
            "average_precision": float(np.mean(precisions or [0.0])),
            "subset_accuracy": float(accuracy_score(truth, answers)),
        }

    def scores_by_name(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, Any]:
        # For each label: its scores at the thresholds in use.
        from sklearn.metrics import precision_recall_fscore_support

        truth = self.truth(features)
        answers = self.probabilities(statistics[:, 1:]) >= self.limits()
        scores = precision_recall_fscore_support(
            truth,
            answers,
            average=None,
            zero_division=0,
        )
        return {"labels": self.labels, "per_class": table_of(self.labels, scores)}

    def choose(self, rows: np.ndarray, metrics: Mapping[str, float]) -> dict[str, Any]:
        validation = self.splits[0]
        truth = self.truth(validation.features)
        if self.cfg.threshold != "best" or not truth.any():
            return {}
        shares = self.probabilities(validation.of(rows)[:, 1:])
        return {"threshold": best_threshold(truth, shares)}

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        problem = getattr(config, "problem_type", None)
        check(
            problem == "multi_label_classification",
            f"{source} is not a multi-label model: problem_type is {problem}, not multi_label_classification",
        )
        return names_of_head(config)

    def predictions(
        self, rows: Iterable[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        rows = [known(row, "id", "label") for row in rows]
        yield from super().predictions(rows, features, statistics)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        return torch.from_numpy(logits).double().sigmoid().numpy()

    def answer(self, shares: np.ndarray) -> list[str]:
        return [self.labels[number] for number in np.flatnonzero(shares >= self.limits())]

    def in_words(self, row: Entry, answer: Any) -> str:
        return ", ".join(sorted(answer, key=self.labels.index)) or "(no label)"


def losses_of(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the losses [B, C] float32. Padding rows, whose targets are NaN, have a loss of 0."""
    losses = F.binary_cross_entropy_with_logits(
        logits.float(), targets.nan_to_num(), pos_weight=weights, reduction="none"
    )
    return torch.where(targets.isnan(), 0.0, losses)


def positive_weights(
    given: Any, labels: Sequence[str], has_label: np.ndarray
) -> np.ndarray | None:
    """Return pos_weight for the loss, one per label, [C] float32; None if all are 1. `has_label` is [rows, C]."""
    counts = has_label.sum(0, dtype=np.float64)
    without = len(has_label) - counts
    balanced = without / np.maximum(counts, 1)
    return given_weights("task.positive_weights", given, labels, balanced, counts * without == 0)


def best_threshold(truth: np.ndarray, shares: np.ndarray) -> float:
    """Return a threshold with the highest micro F1 for `truth` and probabilities `shares`, both [rows, C]."""
    from sklearn.metrics import precision_recall_curve

    precision, recall, limits = precision_recall_curve(truth.ravel(), shares.ravel())
    total = np.maximum(precision + recall, np.finfo(float).tiny)
    f1 = 2 * precision * recall / total
    best = int(f1[:-1].argmax())
    below = np.append(0.0, limits)[best]
    middle = float(limits[best] + below) / 2
    return max(middle, np.finfo(np.float32).tiny.item())
