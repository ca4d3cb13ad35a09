"""Numbers for a text or a pair of texts: the task's settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass

from train.config import HeadSize, TaskConfig
from train.tasks.spec import LOSS, Metric, TaskSpec


@dataclass(kw_only=True)
class RegressConfig(TaskConfig):
    """Regression: one or several numbers for a text or a pair of texts."""

    kind: str = "regress"
    # Learn (target - mean) / standard deviation of the training rows; the export predicts in the units of the data.
    standardize: bool = True

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        return HeadSize(labels=labels or 1)


SPEC = TaskSpec(
    settings=RegressConfig,
    module="train.tasks.regress.task",
    head="SequenceClassification",
    problem_type="regression",
    metrics=(
        *(Metric(name, higher_is_better=False) for name in ("mse", "mae", "rmse")),
        Metric("pearson", hub_name="pearsonr"),
        Metric("spearman", hub_name="spearmanr"),
        LOSS,
    ),
    pipeline="text-classification",
    sentence="It predicts numbers for a text, or a pair of texts: {names}.",
    example='"A text.", truncation=True',
    note="The score of the pipeline is the predicted number.",
    card_settings=(("Standardised targets", "task.standardize"),),
    does="predicts numbers for texts",
    inputs={"text": "text to score", "text_pair": "second text, for a model of pairs"},
    optional=("text_pair",),
)
