"""Any number of labels for texts or pairs: features, loss, metrics and predictions. Shapes: B texts, C labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, List, Value
from torch import Tensor

from train.config import check, shortlist
from train.data.records.featurizer import TOKENS
from train.data.records.kinds import STRING, RowKind
from train.data.records.table_facts import column
from train.data.records.token_rows import TokenRows
from train.models.heads import names_of_head
from train.tasks.classify import Classification, ClassifyFeaturizer, check_each, read_texts
from train.tasks.finetune import Entry, mean_loss, table_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

USUAL = 0.5  # the threshold of evaluations, while the best one is not chosen yet

MULTILABEL_ROWS = RowKind(
    "multilabel",
    columns={"text": STRING, "text_pair": STRING, "label": List(STRING)},
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
        found = rows.get("label", [[]] * len(indices))
        has_label = np.zeros((len(indices), len(self.labels)), np.float32)
        for row, numbers in enumerate(found):
            has_label[row, numbers] = 1
        return super().features({**rows, "label": list(has_label)}, indices, split=split)


class MultiLabel(Classification):
    """Any number of labels for a text. A prediction has "id", "label" (if known), "prediction", "probabilities"."""

    makes_features = MultiLabelFeaturizer
    metric_names = ("loss", "f1_micro", "f1_macro", "average_precision", "subset_accuracy")

    def begin(self, train_table: TokenRows) -> None:
        self.limits()
        given, has_label = self.cfg.positive_weights, train_table.values["labels"]
        weights = positive_weights(given, self.labels, has_label)
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
        metrics = self.scores(self.truth(features), probabilities(statistics[:, 1:]))
        return {"loss": mean_loss(statistics), **metrics}

    def truth(self, features: Dataset) -> np.ndarray:
        """Return a mask of the labels that the texts have, [rows, C]."""
        return column(features, "label").reshape(-1, len(self.labels)).astype(bool)

    def scores(self, truth: np.ndarray, shares: np.ndarray) -> dict[str, float]:
        """Return metrics of a mask and of probabilities [rows, C]."""
        # Average precision is the mean over the labels that occur.
        from sklearn.metrics import accuracy_score, average_precision_score, f1_score

        answers = shares >= self.limits()
        present = np.flatnonzero(truth.any(0))
        precisions = [
            average_precision_score(truth[:, label], shares[:, label]) for label in present
        ]
        return {
            "f1_micro": float(f1_score(truth, answers, average="micro", zero_division=0)),
            "f1_macro": float(f1_score(truth, answers, average="macro", zero_division=0)),
            "average_precision": float(np.mean(precisions or [0.0])),
            "subset_accuracy": float(accuracy_score(truth, answers)),
        }

    def scores_by_name(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, Any]:
        # For each label: its scores at the thresholds in use.
        from sklearn.metrics import precision_recall_fscore_support

        truth, shares = self.truth(features), probabilities(statistics[:, 1:])
        answers = shares >= self.limits()
        scores = precision_recall_fscore_support(truth, answers, average=None, zero_division=0)
        return {"labels": self.labels, "per_class": table_of(self.labels, scores)}

    def choose(self, rows: np.ndarray, metrics: Mapping[str, float]) -> dict[str, Any]:
        validation = self.splits[0]
        truth = self.truth(validation.features)
        if self.cfg.threshold != "best" or not truth.any():
            return {}
        return {"threshold": best_threshold(truth, probabilities(validation.of(rows)[:, 1:]))}

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
        shares = probabilities(statistics[:, 1:])
        answers = shares >= self.limits()
        for row, share, answer in zip(rows, shares.tolist(), answers, strict=True):
            line: Entry = {key: row[key] for key in ("id", "label") if row.get(key) is not None}
            line["prediction"] = [self.labels[number] for number in np.flatnonzero(answer)]
            line["probabilities"] = dict(zip(self.labels, share, strict=True))
            yield line

    def in_words(self, row: Entry, answer: Any) -> str:
        return ", ".join(sorted(answer, key=self.labels.index)) or "(no label)"


def losses_of(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the losses [B, C] float32. Padding rows, whose targets are NaN, have a loss of 0."""
    losses = F.binary_cross_entropy_with_logits(
        logits.float(), targets.nan_to_num(), pos_weight=weights, reduction="none"
    )
    return torch.where(targets.isnan(), 0.0, losses)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities [rows, C] float64 for logits [rows, C]."""
    return torch.from_numpy(logits).double().sigmoid().numpy()


def positive_weights(
    given: Any, labels: Sequence[str], has_label: np.ndarray
) -> np.ndarray | None:
    """Return pos_weight for the loss, one per label, [C] float32; None if all are 1. `has_label` is [rows, C]."""
    if given is None:
        return None
    if given != "balanced":
        check_each("task.positive_weights", given, labels)
        return np.array(given, np.float32)
    counts = has_label.sum(0, dtype=np.float64)
    absent = [
        name for name, count in zip(labels, counts, strict=True) if count in (0, len(has_label))
    ]
    check(
        not absent,
        f"task.positive_weights=balanced: all or no training rows have the label {shortlist(absent)}",
    )
    return ((len(has_label) - counts) / counts).astype(np.float32)


def best_threshold(truth: np.ndarray, shares: np.ndarray) -> float:
    """Return a threshold with the highest micro F1 for `truth` and probabilities `shares`, both [rows, C]."""
    from sklearn.metrics import precision_recall_curve

    precision, recall, limits = precision_recall_curve(truth.ravel(), shares.ravel())
    f1 = 2 * precision * recall / np.maximum(precision + recall, np.finfo(float).tiny)
    best = int(f1[:-1].argmax())
    below = np.append(0.0, limits)[best]
    return max(float(limits[best] + below) / 2, np.finfo(np.float32).tiny.item())
