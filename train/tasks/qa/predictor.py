"""Answers to new questions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset
from torch import Tensor

from train.config import InputError
from train.models.heads import SpanReader
from train.run_folder.samples import MOST_GUESSES, Answer, Guess, Sample, excerpt
from train.tasks.predictor import Predictor, Trained
from train.tasks.qa import QAConfig, spans
from train.tasks.qa.task import CONTEXT, TARGETS, answered, statistics
from train.tasks.qa.windows import QAFeaturizer
from train.tasks.spec import Origin
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from train.tasks.predictor import Computes


def threshold_of(origin: Origin, given: float | None) -> float | None:
    """The odds above which there is no answer: the given ones, those of the settings, or those that were best for F1 on
    the run's validation data. None: the model always answers. InputError if the run's evaluation has none.
    """
    if given is not None or origin.run is None:
        return given
    cfg, folder = origin.run
    assert isinstance(cfg.task, QAConfig)
    if not cfg.task.unanswerable or cfg.task.null_threshold is not None:
        return cfg.task.null_threshold
    try:
        return float(json.loads(folder.read("evaluation.json"))["splits"]["validation"]["best_f1_threshold"])
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(
            f"{folder.location}/evaluation.json has no threshold for no answer ({type(error).__name__}); give one, as "
            "--null-threshold 0"
        ) from error


class AnswerPredictor(Predictor):
    """{"id", "answer", "score", "n_best"}"""

    columns = TARGETS | CONTEXT
    model_kind = SpanReader
    csv_columns = ["id", "answer", "score"]

    def __init__(self, trained: Trained, backend: Computes, options: Mapping[str, Any]) -> None:
        assert isinstance(trained.task, QAConfig)
        self.task = trained.task
        self.threshold = threshold_of(trained.origin, options["null_threshold"])  # see spans.Reading.answer
        # As many scores as the run kept of a window; the shortest length is an upper limit.
        self.k = self.shortest = min([self.task.n_best, *trained.origin.data.lengths, trained.sizes.seq_len])
        super().__init__(trained, backend, options)
        self.questions = 0  # with known answers
        self.exact, self.f1 = 0.0, 0.0

    @staticmethod
    def build_featurizer(sizes: Sizes, task: QAConfig) -> QAFeaturizer:
        return QAFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len, task=task)

    def statistics_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return statistics(logits, inputs, self.k)

    def results(
        self, rows: list[dict[str, Any]], features: Dataset, statistics: np.ndarray
    ) -> Iterator[dict[str, Any]]:
        examples = Dataset.from_list([{"id": row["id"], "context": row["context"]} for row in rows])
        for row, one in zip(rows, answered(statistics, features, examples, self.task), strict=True):
            answer, n_best = one.reading.answer(self.threshold), one.reading.n_best(v2=self.threshold is not None)
            self.count(answer, row.get("answers"))
            score = one.reading.spans[0].score if answer else one.reading.null_score
            yield {"id": row["id"], "answer": answer, "score": score, "n_best": n_best}

    def count(self, answer: str, wanted: dict[str, list] | None) -> None:
        """Add the scores of an answer to the metrics, if the right answers are known."""
        v2 = self.threshold is not None
        if wanted is not None and (wanted["text"] or v2):
            exact, f1 = spans.score(answer, wanted["text"], v2=v2)
            self.questions, self.exact, self.f1 = self.questions + 1, self.exact + exact, self.f1 + f1

    def sample(self, row: dict[str, Any], result: dict[str, Any]) -> Sample:
        wanted, given = row["answers"], result["answer"]
        first, *others = sorted(result["n_best"], key=lambda span: span["text"] != given)
        others = [span for span in others if span["text"] != given]
        guesses = [Guess(excerpt(span["text"]), span["probability"]) for span in (first, *others)[:MOST_GUESSES]]
        truth, at = (wanted["text"][0], wanted["answer_start"][0]) if wanted["text"] else ("", first["begin"])
        score = spans.score(given, wanted["text"], v2=self.threshold is not None)[1]
        return Sample(excerpt(row["question"]), [Answer(excerpt(truth), guesses, score)], excerpt(row["context"], at))

    def metrics(self) -> str:
        if not self.questions:
            return ""
        exact, f1 = 100 * self.exact / self.questions, 100 * self.f1 / self.questions
        known = f"the {self.questions:,} questions whose answers are known"
        by = "" if self.threshold is None else f", with no answer above odds of {self.threshold:g}"
        return f"exact_match {exact:.2f}, f1 {f1:.2f} of {known}{by}"
