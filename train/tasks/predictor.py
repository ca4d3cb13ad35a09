"""A trained model for new rows: labels of texts, or answers to questions, as an evaluation of its run gives them.

Rows are those of `train.data.raw.read_texts`. One process, on the CPU or a CUDA device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset, Features, concatenate_datasets
from torch import Tensor

from train.config import ClassifyConfig, ModelConfig, QAConfig, TaskConfig, check
from train.data.buckets import BUCKET_SHIFT
from train.data.features import FEATURES, Featurizer
from train.data.token_rows import TokenRows
from train.models.encoder import model_config
from train.models.heads import Classifier, SpanReader, build_classifier, build_span_reader
from train.models.source import task_tokenizer
from train.tasks import classify, qa, scores, spans
from train.tasks.featurize import ClassifyFeaturizer, QAFeaturizer
from train.tasks.finetune import most_positions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from train.backend.ddp import DDP

TOKENISED_TOGETHER = 500  # rows: what they are before they are an Arrow table takes ten times as much memory
STEP = 8  # tokens: batches are padded to multiples of it, which matrix units like
MOST_LENGTHS = 128  # that batches are padded to
SHOWN_LABELS = 10
HEADS = {
    "SequenceClassification": ClassifyConfig,
    "QuestionAnswering": QAConfig,
}  # in the names of transformers' models


@dataclass(frozen=True)
class Trained:
    """What is known of a model before its weights are read."""

    model: ModelConfig
    tokenizer: PreTrainedTokenizerFast
    task: ClassifyConfig | QAConfig
    labels: list[str]  # classify: in the order of their numbers
    seq_len: int

    @staticmethod
    def of(source: str, task: TaskConfig | None, seq_len: int | None) -> Trained:
        """Of a folder of transformers or a Hub id; None: the task that the model is for, the longest it can read.
        InputError if it has no head for labels or answers, or is not to be had.
        """
        model = ModelConfig(pretrained=source, tokenizer=source)
        tokenizer = task_tokenizer(model)
        config = model_config(model, vocab_size=len(tokenizer), pad_id=tokenizer.pad_token_id)
        names = ", ".join(config.architectures or ["none"])
        known = next((kind for head, kind in HEADS.items() if head in names), None)
        has_head = f"{source} has no head for labels or answers (its config.json names the architecture {names})"
        check(known is not None, f"{has_head}; give a run of task=classify or task=qa, or such a model")
        if not isinstance(task, ClassifyConfig | QAConfig):
            task = ClassifyConfig() if known is ClassifyConfig else QAConfig()
        check(type(task) is known, f"{source}: the run's task is {task.kind}, but the model is a {names}")
        labels = []
        if isinstance(task, ClassifyConfig):
            labels = [config.id2label[number] for number in range(config.num_labels)]
            one_of = getattr(config, "problem_type", None) in (None, "single_label_classification") and len(labels) > 1
            what = f"{len(labels)} outputs, problem_type {getattr(config, 'problem_type', None)}"
            check(one_of, f"{source} does not give one of several labels to a text: {what}")
        return Trained(model, tokenizer, task, labels, seq_len or most_positions(config))


class Predictor(ABC):
    """`model` is a Classifier or a SpanReader on the device of the backend."""

    kind: str
    texts: tuple[str, ...]  # of a row, what the featurizer reads
    csv_columns: list[str]

    def __init__(
        self, trained: Trained, featurizer: Featurizer, model: Classifier | SpanReader, shortest: int, columns: dict
    ) -> None:
        """`shortest`: tokens that every batch has at least; `columns`: see TokenRows."""
        check(
            not model.new,
            f"{trained.model.pretrained} holds no weights for {', '.join(sorted(model.new)[:3])}: its head was not "
            "trained",
        )
        self.trained, self.featurizer, self.model, self.columns = trained, featurizer, model.eval(), columns
        seq_len = trained.seq_len
        step = max(STEP, -(-seq_len // MOST_LENGTHS))
        self.lengths = [*range(-(-min(shortest, seq_len) // step) * step, seq_len, step), seq_len]

    def predict(
        self, rows: list[dict[str, Any]], backend: DDP, *, batch_size: int, on_batch: Callable[[int], Any]
    ) -> list[dict[str, Any]]:
        """What is found for each row, in their order. `on_batch` is told how many sequences were read."""
        features = self.features(rows)
        found = self.statistics(features, backend, batch_size, on_batch)
        check(bool(np.isfinite(found).all()), f"{self.trained.model.pretrained} gives NaN: its weights are no good")
        return list(self.results(rows, features, found))

    def features(self, rows: list[dict[str, Any]]) -> Dataset:
        parts = []
        for first in range(0, len(rows), TOKENISED_TOGETHER):
            part = rows[first : first + TOKENISED_TOGETHER]
            texts = {key: [row[key] for row in part] for key in self.texts if key in part[0]}
            found = self.featurizer.features(texts, [*range(first, first + len(part))], split="new")
            parts.append(Dataset.from_dict(found, features=Features(FEATURES[self.kind])))
        return concatenate_datasets(parts)

    @torch.inference_mode()
    def statistics(
        self, features: Dataset, backend: DDP, batch_size: int, on_batch: Callable[[int], Any]
    ) -> np.ndarray:
        """[rows, n] float32, in the order of the features, which are read by their length, the longest first: little
        padding, and what does not fit into memory shows at once.
        """
        pad_id = self.trained.tokenizer.pad_token_id
        table = TokenRows(features, pad_id=pad_id, lengths=self.lengths, columns=self.columns)
        order = np.argsort(-table.row_lengths, kind="stable")
        found = []
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            bucket = int(table.bucket_of[rows[0]])
            drawn = table.draw((rows + (bucket << BUCKET_SHIFT))[None])["inputs"]
            inputs = {name: tensor[0].to(backend.device) for name, tensor in drawn.items()}
            with backend.autocast():
                logits = self.model(inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"])
                found += backend.read([self.statistics_of(logits, inputs)])
            on_batch(len(rows))
        gathered = torch.cat(found).numpy()
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    @abstractmethod
    def statistics_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """[B, n] float32: as of the task."""

    @abstractmethod
    def results(self, rows: list[dict[str, Any]], features: Dataset, found: np.ndarray) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def metrics(self) -> str:
        """A line on all rows so far of which it is known what is right; empty if there are none."""


class LabelPredictor(Predictor):
    """{"id", "label" (if the row has one), "prediction", "probabilities": {label: p}}"""

    kind, texts = "classify", ("text", "text_pair")

    def __init__(self, trained: Trained, backend: DDP) -> None:
        tokenizer, self.labels, seq_len = trained.tokenizer, trained.labels, trained.seq_len
        model = build_classifier(
            trained.model,
            labels=self.labels,
            vocab_size=len(tokenizer),
            pad_id=tokenizer.pad_token_id,
            seq_len=seq_len,
        ).to(backend.device)
        super().__init__(trained, ClassifyFeaturizer(tokenizer, seq_len=seq_len), model, STEP, {"labels": "label"})
        self.csv_columns = ["id", "label", "prediction", *(f"probability_{label}" for label in self.labels)]
        self.rows, self.labelled = 0, False
        self.known: list[int] = []  # the labels of rows that have one
        self.given: list[int] = []  # what was predicted for these

    def statistics_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return classify.statistics(logits, inputs["labels"])  # of no label: the loss in it means nothing

    def results(self, rows: list[dict[str, Any]], features: Dataset, found: np.ndarray) -> Iterator[dict[str, Any]]:
        answers, shares = classify.predicted(found).tolist(), classify.probabilities(found[:, 1:]).tolist()
        self.rows += len(rows)
        for row, answer, share in zip(rows, answers, shares, strict=True):
            self.labelled |= "label" in row
            if row.get("label") is not None:
                self.known.append(self.labels.index(row["label"]))
                self.given.append(answer)
            yield {
                **{key: row[key] for key in ("id", "label") if key in row},
                "prediction": self.labels[answer],
                "probabilities": dict(zip(self.labels, share, strict=True)),
            }

    def metrics(self) -> str:
        if not self.known:
            labels = ", ".join(self.labels[:SHOWN_LABELS]) + (", ..." if len(self.labels) > SHOWN_LABELS else "")
            return f"no row has a label that the model knows: {labels}" if self.labelled else ""
        found = scores.summary(np.array(self.known), np.array(self.given))
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        return f"{numbers} of the {len(self.known):,} rows with a label that the model knows (of {self.rows:,})"


class AnswerPredictor(Predictor):
    """{"id", "answer", "score", "n_best"}; `threshold`: see spans.Reading.answer, None for a model that always answers.

    `shortest`: of the lengths that the run's batches had, which bounds how many places of a window it looked at.
    """

    kind, texts = "qa", ("question", "context")
    csv_columns = ["id", "answer", "score"]

    def __init__(self, trained: Trained, backend: DDP, *, lengths: Sequence[int], threshold: float | None) -> None:
        assert isinstance(trained.task, QAConfig)
        tokenizer, seq_len, self.task, self.threshold = trained.tokenizer, trained.seq_len, trained.task, threshold
        featurizer = QAFeaturizer(tokenizer, seq_len=seq_len, task=self.task)
        model = build_span_reader(
            trained.model, vocab_size=len(tokenizer), pad_id=tokenizer.pad_token_id, seq_len=seq_len
        ).to(backend.device)
        self.k = min([self.task.n_best, *lengths, seq_len])
        super().__init__(trained, featurizer, model, self.k, qa.TARGETS | qa.CONTEXT)
        self.questions = 0  # of which the answer is known
        self.exact, self.f1 = 0.0, 0.0

    def statistics_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return qa.statistics(logits, inputs, self.k)

    def results(self, rows: list[dict[str, Any]], features: Dataset, found: np.ndarray) -> Iterator[dict[str, Any]]:
        examples = Dataset.from_list([{"id": row["id"], "context": row["context"]} for row in rows])
        for row, one in zip(rows, qa.answered(found, features, examples, self.task), strict=True):
            answer, n_best = one.reading.answer(self.threshold), one.reading.n_best(v2=self.threshold is not None)
            self.judge(answer, row.get("answers"))
            score = one.reading.spans[0].score if answer else one.reading.null_score
            yield {"id": row["id"], "answer": answer, "score": score, "n_best": n_best}

    def judge(self, answer: str, wanted: dict[str, list] | None) -> None:
        v2 = self.threshold is not None
        if wanted is not None and (wanted["text"] or v2):
            exact, f1 = spans.score(answer, wanted["text"], v2=v2)
            self.questions, self.exact, self.f1 = self.questions + 1, self.exact + exact, self.f1 + f1

    def metrics(self) -> str:
        if not self.questions:
            return ""
        exact, f1 = 100 * self.exact / self.questions, 100 * self.f1 / self.questions
        return f"exact_match {exact:.2f}, f1 {f1:.2f} of the {self.questions:,} questions whose answers are known"
