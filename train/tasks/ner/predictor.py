"""Tags and entities of new words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from train.config import check
from train.run_folder.samples import Answer, Guess, Sample, excerpt
from train.tasks.ner import scores
from train.tasks.ner.task import COLUMNS, TAG, NERFeaturizer, TokenClassifier, statistics, tagged
from train.tasks.predictor import Predictor, Trained
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

    from train.tasks.predictor import Computes


class TagPredictor(Predictor):
    """{"id", "tokens", "prediction": [tag of each], "entities": [{"type", "text", "first", "last", "probability"}]}

    `first` and `last` are numbers of words; `probability` is the mean of theirs.
    """

    columns = COLUMNS
    model_kind = TokenClassifier
    csv_columns = ["id", "tokens", "prediction", "entities"]

    def __init__(self, trained: Trained, backend: Computes, options: Mapping[str, Any]) -> None:
        super().__init__(trained, backend, options)
        self.truth: list[list[str]] = []  # the tags of the sentences that have them
        self.predicted: list[list[str]] = []  # the predictions for these

    @classmethod
    def labels_of(cls, source: str, config: PreTrainedConfig) -> list[str]:
        labels = [config.id2label[number] for number in range(config.num_labels)]
        strange = [label for label in labels if not TAG.fullmatch(label)]
        check(not strange, f"{source} must give tags as O, B-PER and I-PER; it has {', '.join(strange[:3])}")
        return labels

    @staticmethod
    def row_of(texts: dict[str, str]) -> dict[str, Any]:
        return {"tokens": texts["tokens"].split()}

    @staticmethod
    def build_featurizer(sizes: Sizes, task: Any) -> NERFeaturizer:
        return NERFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len)

    def statistics_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return statistics(logits, inputs["labels"], self.trained.sizes.seq_len)  # without tags, the loss means nothing

    def results(
        self, rows: list[dict[str, Any]], features: Dataset, statistics: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        answers = tagged(statistics, features, [row["tokens"] for row in rows], self.trained.labels)
        for row, (tags, shares) in zip(rows, answers, strict=True):
            if row.get("tags") is not None:
                self.truth.append(row["tags"])
                self.predicted.append(tags)
            found = [
                {
                    "type": kind,
                    "text": " ".join(row["tokens"][first : last + 1]),
                    "first": first,
                    "last": last,
                    "probability": float(np.mean(shares[first : last + 1])),
                }
                for kind, first, last in scores.entities(tags)
            ]
            yield {"id": row["id"], "tokens": row["tokens"], "prediction": tags, "entities": found}

    def sample(self, row: dict[str, Any], result: dict[str, Any]) -> Sample:
        words = row["tokens"]
        truth, answer = (named_entities(words, tags) for tags in (row["tags"], result["prediction"]))
        surest = min([1.0, *(entity["probability"] for entity in result["entities"])])
        score = float(row["tags"] == result["prediction"])
        return Sample(excerpt(" ".join(words)), [Answer(excerpt(truth), [Guess(excerpt(answer), surest)], score)])

    def metrics(self) -> str:
        if not self.truth:
            return ""
        values = scores.summary(self.truth, self.predicted)
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
        return f"{numbers} of the {len(self.truth):,} sentences whose tags are known"


def named_entities(words: list[str], tags: list[str]) -> str:
    """The entities of a sentence as text; empty if it has none."""
    found = scores.entities(tags)
    return ", ".join(f"{' '.join(words[first : last + 1])} ({kind})" for kind, first, last in found)
