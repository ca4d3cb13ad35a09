"""The span of a context that answers a question (SQuAD), after transformers' question-answering example.

Contexts that are too long are read in windows that overlap. Shapes: B windows, S tokens, k places with high scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import QAConfig, TrainConfig
from train.data.masking import IGNORE_INDEX
from train.data.table_facts import column
from train.data.token_rows import Lists
from train.models.heads import SpanReader, build_span_reader
from train.storage import canonical_json
from train.tasks import spans
from train.tasks.featurize import QAFeaturizer
from train.tasks.finetune import FineTuning, Sizes, Split, json_lines

if TYPE_CHECKING:
    from datasets import Dataset

TARGETS = {"start": "start", "end": "end"}
CONTEXT = {"context_first": "context_first", "context_end": "context_end"}


def build(cfg: TrainConfig) -> QATask:
    return QATask(cfg)


# ---- scores to answers ---------------------------------------------------------------------------------------------


def losses_of(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """[B]: mean cross entropy of start and end, of logits [B, S, 2]; 0 for PADDING."""
    start, end = logits.float().unbind(-1)
    pairs = ((start, inputs["start"]), (end, inputs["end"]))
    losses = [F.cross_entropy(one, place, ignore_index=IGNORE_INDEX, reduction="none") for one, place in pairs]
    return (losses[0] + losses[1]) / 2


def statistics(logits: Tensor, inputs: dict[str, Tensor], k: int) -> Tensor:
    """[B, 2 + 4 * k] float32: loss, score of [CLS], k highest scores of starts in the context, their places, and the
    same of ends (see spans.Window.of).
    """
    start, end = logits.float().unbind(-1)
    places = torch.arange(logits.size(1), device=logits.device)
    is_context = (places >= inputs["context_first"][:, None]) & (places < inputs["context_end"][:, None])
    null = start[:, 0] + end[:, 0]
    parts = [losses_of(logits, inputs)[:, None], null[:, None]]
    for scores in (start, end):
        best = scores.masked_fill(~is_context, spans.LOWEST).topk(k)
        parts += [best.values, best.indices.float()]
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Answered:
    """A question with its reading."""

    id: str
    wanted: list[str]  # right answers; none of a question that has none, or of which none are known
    reading: spans.Reading


def answered(rows: np.ndarray, features: Dataset, examples: Dataset, task: QAConfig) -> Iterator[Answered]:
    """Each question of `features`, in their order, out of their statistics [windows, 2 + 4 * k]."""
    owners, context_first = column(features, "row"), column(features, "context_first").tolist()
    offsets = Lists(features.with_format("arrow")[:].column("offsets"))
    bounds = np.flatnonzero(np.diff(owners, prepend=-1, append=-1)).tolist()
    asked = examples.select(owners[bounds[:-1]])
    for example, first, stop in zip(asked, bounds[:-1], bounds[1:], strict=True):
        places = offsets.take(np.arange(first, stop))
        windows = [
            spans.Window.of(rows[row, 1:], context_first[row], place.reshape(-1, 2))
            for row, place in zip(range(first, stop), places, strict=True)
        ]
        reading = spans.read(windows, example["context"], n_best=task.n_best, max_answer_tokens=task.max_answer_tokens)
        yield Answered(example["id"], list(example.get("answers", {"text": []})["text"]), reading)


def n_best_lines(questions: Iterable[Answered], *, v2: bool) -> bytes:
    lines = (
        {"id": one.id, "null_odds": one.reading.null_odds if one.reading.spans else None}
        | {"answers": one.reading.n_best(v2=v2)}
        for one in questions
    )
    return json_lines(lines)


# ---- the task ------------------------------------------------------------------------------------------------------


class QATask(FineTuning):
    """See `train.tasks.Task`."""

    def __init__(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.task, QAConfig)
        self.task, sizes = cfg.task, Sizes.of(cfg)
        self.k = min(self.task.n_best, sizes.lengths[0])
        super().__init__(
            cfg,
            sizes,
            QAFeaturizer(sizes.tokenizer, seq_len=sizes.lengths[-1], task=self.task),
            train_columns=TARGETS,
            eval_columns=TARGETS | CONTEXT,
            metrics=("loss", *(spans.V2_NAMES if self.task.unanswerable else spans.V1_NAMES)),
        )

    def cut(self, features: Dataset, most: int) -> int:
        """At the end of a question, the first one at least."""
        owners = column(features, "row")
        return int(np.searchsorted(owners, owners[most])) or int(np.searchsorted(owners, owners[0], side="right"))

    def build_model(self) -> SpanReader:
        return build_span_reader(
            self.model_config,
            vocab_size=len(self.tokenizer),
            pad_id=self.tokenizer.pad_token_id,
            seq_len=self.lengths[-1],
        )

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return losses_of(self._logits(model, inputs), inputs).sum()

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """See `statistics`."""
        return statistics(self._logits(model, inputs), inputs, self.k)

    def _logits(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(inputs["input_ids"], inputs["attention_mask"], inputs["token_type_ids"])
        return logits

    def answered(self, split: Split, rows: np.ndarray) -> list[Answered]:
        return list(answered(rows, split.features, self.tables.examples(split.name), self.task))

    def evaluate(self, rows: np.ndarray) -> dict[str, dict[str, float]]:
        """v2's threshold is the one given, or the best one of the first split for all."""
        found: dict[str, dict[str, float]] = {}
        for split in self.splits:
            part = split.of(rows)
            questions = self.answered(split, part)
            readings, wanted = [one.reading for one in questions], [one.wanted for one in questions]
            if self.task.unanswerable:
                metrics = spans.evaluate_v2(readings, wanted, self.threshold(found))
            else:
                metrics = spans.evaluate(readings, wanted)
            found[split.name] = {"loss": float(part[:, 0].mean(dtype=np.float64)), **metrics}
        return found

    def threshold(self, found: dict[str, dict[str, float]]) -> float | None:
        """Of the odds of no answer; None if there is none (v1), or none yet. `found`: metrics of the first split."""
        if self.task.null_threshold is not None or not found:
            return self.task.null_threshold
        return found[self.splits[0].name].get("best_f1_threshold")

    def results(
        self, split: Split, rows: np.ndarray, found: dict[str, dict[str, float]]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Answers as the official scripts read them, and the n best of each question."""
        questions, threshold = self.answered(split, rows), self.threshold(found)
        files = {
            f"{split.name}.json": canonical_json({one.id: one.reading.answer(threshold) for one in questions}),
            f"{split.name}_nbest.jsonl": n_best_lines(questions, v2=self.task.unanswerable),
        }
        return files, {"questions": len(questions), "windows": len(rows), "threshold": threshold}
