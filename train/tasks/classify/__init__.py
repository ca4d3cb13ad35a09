"""One label for a text or a pair of texts: the task's settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from train.config import HeadSize, TaskConfig, check, setting
from train.tasks.spec import LOSS, Metric, TaskSpec


@dataclass(kw_only=True)
class ClassifyConfig(TaskConfig):
    """Classification: one label for a text or a pair of texts."""

    kind: str = "classify"
    # The loss weights of the labels, in their order, such as [1,5,0.5]; balanced computes rows / (labels * rows of the
    # label) from the training data, and None weights all labels equally.
    class_weights: Any = None
    # The share of the target that is spread over all labels.
    label_smoothing: float = setting(0.0, least=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [] if self.class_weights in (None, "balanced") else self.class_weights
        ok = isinstance(given, list) and all(
            type(each) in (int, float) and 0 < each < inf for each in given
        )
        check(
            ok,
            f"task.class_weights={self.class_weights} must be balanced, or numbers above 0, such as [1,5,0.5]",
        )

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(labels=labels or 2)  # each further label costs 6 x hidden size FLOPs


SPEC = TaskSpec(
    settings=ClassifyConfig,
    module="train.tasks.classify.task",
    head="SequenceClassification",
    metrics=(
        Metric("f1_macro", hub_name="f1"),
        Metric("f1_weighted", hub_name="f1"),
        Metric("accuracy"),
        Metric("matthews_correlation"),
        Metric("f1"),  # F1 of the second label, if there are two labels
        LOSS,
    ),
    pipeline="text-classification",
    sentence="It labels a text, or a pair of texts, with one of {labels} labels: {names}.",
    example='"A text.", truncation=True',
    card_settings=(
        ("Label smoothing", "task.label_smoothing"),
        ("Class weights", "task.class_weights"),
    ),
    does="labels texts",
    inputs={"text": "text to label", "text_pair": "second text, for a model of pairs"},
    optional=("text_pair",),
)
