"""Metrics of classification by scikit-learn, on the host. A class that is empty or never predicted counts 0.

It is imported by the first evaluation: with scipy it takes a second, for which no first step should wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NAMES = ("accuracy", "f1_macro", "f1_weighted")


def summary(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """The metrics NAMES of labels and predictions [rows], int64. As by default in scikit-learn, F1 is averaged over the
    labels that occur in either; a label that is never predicted has 0.
    """
    from sklearn.metrics import accuracy_score, f1_score

    return {
        "accuracy": float(accuracy_score(labels, predicted)),
        "f1_macro": float(f1_score(labels, predicted, average="macro", zero_division=0)),
        "f1_weighted": float(f1_score(labels, predicted, average="weighted", zero_division=0)),
    }


def tables(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Precision, recall, F1 and support for each of `names` (in the order of their numbers), and the confusion matrix
    with a row for each true label and a column for each prediction.
    """
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

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
