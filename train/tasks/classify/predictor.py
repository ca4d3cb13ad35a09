"""Labels of new texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from train.config import check
from train.models.heads import Classifier
from train.run_folder.samples import MOST_GUESSES, Answer, Guess, Sample, excerpt
from train.tasks.classify import scores
from train.tasks.classify.task import COLUMNS, ClassifyFeaturizer, predicted, probabilities, statistics
from train.tasks.predictor import Predictor, Trained
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from train.tasks.predictor import Computes

SHOWN_LABELS = 10


class LabelPredictor(Predictor):
    """{"id", "label" (if the row has one), "prediction", "probabilities": {label: p}}"""

    columns = COLUMNS
    model_kind = Classifier

    def __init__(self, trained: Trained, backend: Computes, options: Mapping[str, Any]) -> None:
        super().__init__(trained, backend, options)
        self.labels = trained.labels
        self.csv_columns = ["id", "label", "prediction", *(f"probability_{label}" for label in self.labels)]
        self.num_rows, self.labelled = 0, False
        self.known: list[int] = []  # the labels of rows that have one
        self.predicted: list[int] = []  # the predictions for these rows

    @classmethod
    def labels_of(cls, source: str, config: PreTrainedConfig) -> list[str]:
        labels = [config.id2label[number] for number in range(config.num_labels)]
        problem = getattr(config, "problem_type", None)
        check(
            problem in (None, "single_label_classification") and len(labels) > 1,
            f"{source} must choose one of several labels; it has {len(labels)} outputs and problem_type {problem}",
        )
        return labels

    @staticmethod
    def build_featurizer(sizes: Sizes, task: Any) -> ClassifyFeaturizer:
        return ClassifyFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len)

    def statistics_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return statistics(logits, inputs["labels"])  # rows have no label here, so the loss means nothing

    def results(
        self, rows: list[dict[str, Any]], features: Dataset, statistics: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        answers, shares = predicted(statistics).tolist(), probabilities(statistics[:, 1:]).tolist()
        self.num_rows += len(rows)
        for row, answer, share in zip(rows, answers, shares, strict=True):
            self.labelled |= "label" in row
            if row.get("label") is not None:
                self.known.append(self.labels.index(row["label"]))
                self.predicted.append(answer)
            yield {
                **{key: row[key] for key in ("id", "label") if key in row},
                "prediction": self.labels[answer],
                "probabilities": dict(zip(self.labels, share, strict=True)),
            }

    def sample(self, row: dict[str, Any], result: dict[str, Any]) -> Sample:
        shares = sorted(result["probabilities"].items(), key=lambda pair: -pair[1])[:MOST_GUESSES]
        guesses = [Guess(excerpt(label), min(1.0, share)) for label, share in shares]
        answer = Answer(excerpt(row["label"]), guesses, float(result["prediction"] == row["label"]))
        return Sample(excerpt(row["text"]), [answer], excerpt(row.get("text_pair") or ""))

    def metrics(self) -> str:
        if not self.known:
            labels = ", ".join(self.labels[:SHOWN_LABELS]) + (", ..." if len(self.labels) > SHOWN_LABELS else "")
            return f"no row has a label that the model knows: {labels}" if self.labelled else ""
        values = scores.summary(np.array(self.known), np.array(self.predicted))
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        return f"{numbers} of the {len(self.known):,} rows with a label that the model knows (of {self.num_rows:,})"
