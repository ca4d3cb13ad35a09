"""Metrics of classification, on the host: scikit-learn's, where a class that is empty or never given counts 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, precision_recall_fscore_support

NAMES = ("accuracy", "f1_macro", "f1_weighted")


def summary(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """NAMES of labels and predictions [rows], int64. F1 is averaged over the labels that occur in either, as
    scikit-learn does by default; one that nobody predicts has 0.
    """
    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "f1_macro": float(f1_score(labels, predicted, average="macro", zero_division=0)),
        "f1_weighted": float(f1_score(labels, predicted, average="weighted", zero_division=0)),
    }


def tables(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """For each of `names` (in the order of their numbers) precision, recall, F1 and support, and the confusion matrix:
    a row for each true label, a column for each prediction.
    """
    numbers = list(range(len(names)))
    columns = precision_recall_fscore_support(labels, predicted, labels=numbers, zero_division=0)
    precision, recall, f1, support = (column.tolist() for column in columns)
    return {
        "labels": list(names),
        "per_class": {
            name: {"precision": precision[i], "recall": recall[i], "f1": f1[i], "support": support[i]}
            for i, name in enumerate(names)
        },
        "confusion": confusion_matrix(labels, predicted, labels=numbers).tolist(),
    }
