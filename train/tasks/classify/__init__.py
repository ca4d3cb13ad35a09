"""One label for a text or a pair of texts: the task's settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import HeadSize, TaskConfig, check, setting
from train.tasks.spec import LOSS, Metric, TaskSpec


@dataclass(kw_only=True)
class ClassifyConfig(TaskConfig):
    """Classification: one label for a text or a pair of texts."""

    kind: str = "classify"
    class_weights: list[float] | None = None  # how much an error counts, for each label in order; None: all the same
    balanced: bool = False  # class weights are rows / (labels * rows of the label) of the training data
    label_smoothing: float = setting(0.0, least=0, below=1)  # share of the target that is spread over all labels

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = self.class_weights
        check(weights is None or all(w > 0 for w in weights), f"task.class_weights={weights} must be above 0")
        check(not (self.balanced and weights), "task.balanced=true computes the weights: leave task.class_weights out")

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(labels=labels or 2)  # one more costs 6 x hidden size FLOPs


SPEC = TaskSpec(
    settings=ClassifyConfig,
    module="train.tasks.classify.task",
    head="SequenceClassification",
    metrics=(Metric("f1_macro", hub_name="f1"), Metric("f1_weighted", hub_name="f1"), Metric("accuracy"), LOSS),
    pipeline="text-classification",
    sentence="It labels a text, or a pair of texts, with one of {labels} labels: {names}.",
    example='"A text."',
    card_settings=(
        ("Label smoothing", "task.label_smoothing"),
        ("Class weights", "task.class_weights"),
        ("Class weights from the data", "task.balanced"),
    ),
    does="labels texts",
    inputs={"text": "to label", "text_pair": "the second text, for a model of pairs"},
    optional=("text_pair",),
)
