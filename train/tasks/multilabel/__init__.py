"""Any number of labels for a text or a pair of texts: the task's settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from train.config import HeadSize, TaskConfig, check
from train.tasks.spec import LOSS, Metric, TaskSpec

# values of task.threshold that choose it on the validation data
CHOSEN = (
    "best",
    "best_per_label",
)


def are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(each, int | float) and each > 0 for each in values
    )


@dataclass(kw_only=True)
class MultiLabelConfig(TaskConfig):
    """Multi-label classification: any number of labels, or none, for a text or a pair of texts."""

    kind: str = "multilabel"
    # The weights in the loss of texts that have a label, one for each label in order; texts without it have weight 1.
    # balanced computes rows without the label / rows with it from the training data; None uses 1.
    positive_weights: Any = None
    # The minimum probability at which a label is predicted, or a list of these, one for each label; best (one for all,
    # by micro F1) and best_per_label choose it on the validation data. The export keeps it.
    threshold: Any = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        weights, limits = (
            self.positive_weights,
            self.threshold if are_numbers(self.threshold) else [self.threshold],
        )
        limits = [] if self.threshold in CHOSEN else limits
        ok = weights in (None, "balanced") or are_numbers(weights)
        check(
            ok, f"task.positive_weights={weights} must be balanced, or a list of numbers above 0"
        )
        ok = are_numbers(limits) and all(limit < 1 for limit in limits)
        words = "must be a number between 0 and 1, or a list of these"
        check(ok, f"task.threshold={self.threshold} {words}, or {' or '.join(CHOSEN)}")

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(labels=labels or 2)


SPEC = TaskSpec(
    settings=MultiLabelConfig,
    module="train.tasks.multilabel.task",
    head="SequenceClassification",
    problem_type="multi_label_classification",
    metrics=(
        Metric("f1_micro", hub_name="f1"),
        Metric("f1_macro", hub_name="f1"),
        Metric("average_precision"),
        Metric("subset_accuracy", hub_name="accuracy"),
        LOSS,
    ),
    pipeline="text-classification",
    sentence="It labels a text, or a pair of texts, with any of {labels} labels: {names}.",
    example='"A text.", top_k=None, truncation=True',
    note="A label is predicted if its score is at least the threshold, which Training lists.",
    card_settings=(
        ("Threshold", "task.threshold"),
        ("Weights of positives", "task.positive_weights"),
    ),
    does="labels texts",
    inputs={"text": "text to label", "text_pair": "second text, for a model of pairs"},
    optional=("text_pair",),
    options={"threshold": "minimum probability at which a label is predicted"},
)
