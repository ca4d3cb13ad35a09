"""Entities in sequences of tags and how well they were found, by seqeval, which follows CoNLL's script conlleval: an
entity is right if its first word, its last word and its type are.

seqeval is imported by the first evaluation: with scikit-learn it takes a second, for which no first step should wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

NAMES = ("precision", "recall", "f1", "accuracy")
Tags = Sequence[list[str]]  # of the words of each sentence


def summary(truth: Tags, predicted: Tags) -> dict[str, float]:
    """The metrics NAMES: of all entities, whatever their type, and the share of the words whose tag is right. Without
    an entity precision, recall and F1 are 0.
    """
    from seqeval.metrics.sequence_labeling import accuracy_score, precision_recall_fscore_support

    scores = precision_recall_fscore_support(truth, predicted, average="micro", zero_division=0)
    values = (*scores[:3], accuracy_score(truth, predicted))
    return {name: float(value) for name, value in zip(NAMES, values, strict=True)}


def tables(truth: Tags, predicted: Tags) -> dict[str, Any]:
    """Precision, recall, F1 and support for each type of entity that is in either."""
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    types = sorted({kind for tags in (*truth, *predicted) for kind, _, _ in entities(tags)})
    if not types:
        return {"labels": [], "per_class": {}}
    scores = precision_recall_fscore_support(truth, predicted, average=None, zero_division=0)
    rows = zip(types, *(column.tolist() for column in scores), strict=True)
    names = ("precision", "recall", "f1", "support")
    return {"labels": types, "per_class": {kind: dict(zip(names, values, strict=True)) for kind, *values in rows}}


def entities(tags: list[str]) -> list[tuple[str, int, int]]:
    """The type, the first and the last word of each entity of a sentence."""
    from seqeval.metrics.sequence_labeling import get_entities

    found: list[tuple[str, int, int]] = get_entities(tags)
    return found
