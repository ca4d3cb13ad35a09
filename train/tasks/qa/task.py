"""The span of a context that answers a question (SQuAD), after transformers' question-answering example.

Contexts that are too long are read in overlapping windows. Shapes: B windows, S tokens, k tokens with high scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import TrainConfig
from train.data.batches.masking import IGNORE_INDEX
from train.data.records.table_facts import column
from train.data.records.token_rows import Lists
from train.models.heads import SpanReader, logits_of
from train.storage.folders import canonical_json
from train.tasks.finetune import FineTuning, Split, json_lines, mean_loss
from train.tasks.qa import QAConfig, spans
from train.tasks.qa.windows import QAFeaturizer
from train.tasks.texts import Sizes
from train.tasks.topk import topk

if TYPE_CHECKING:
    from datasets import Dataset

TARGETS = {"start": "start", "end": "end"}
CONTEXT = {"context_first": "context_first", "context_end": "context_end"}


# ---- scores to answers ---------------------------------------------------------------------------------------------


def losses_of(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """[B]: mean cross entropy of start and end, of logits [B, S, 2]; 0 for windows that fill a batch."""
    start, end = logits.float().unbind(-1)
    pairs = ((start, inputs["start"]), (end, inputs["end"]))
    losses = [F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="none") for logits, target in pairs]
    return (losses[0] + losses[1]) / 2


def statistics(logits: Tensor, inputs: dict[str, Tensor], k: int) -> Tensor:
    """[B, 2 + 4 * k] float32: loss, score of [CLS], the k highest scores of starts in the context, their tokens, and
    the same for ends (see spans.Window.of).
    """
    start, end = logits.float().unbind(-1)
    tokens = torch.arange(logits.size(1), device=logits.device)
    is_context = (tokens >= inputs["context_first"][:, None]) & (tokens < inputs["context_end"][:, None])
    null = start[:, 0] + end[:, 0]
    parts = [losses_of(logits, inputs)[:, None], null[:, None]]
    for scores in (start, end):
        parts += topk(scores.masked_fill(~is_context, spans.LOWEST), k)
    return torch.cat(parts, 1)


@dataclass(frozen=True)
class Answered:
    """A question with its reading."""

    id: str
    wanted: list[str]  # right answers; empty if the question has none or they are not known
    reading: spans.Reading


def answered(rows: np.ndarray, features: Dataset, examples: Dataset, task: QAConfig) -> Iterator[Answered]:
    """Each question of `features` in their order, with its reading by their statistics [windows, 2 + 4 * k]."""
    owners, context_first = column(features, "row"), column(features, "context_first").tolist()
    offsets = Lists(features.with_format("arrow")[:].column("offsets"))
    bounds = np.flatnonzero(np.diff(owners, prepend=-1, append=-1)).tolist()
    asked = examples.select(owners[bounds[:-1]])
    for example, first, stop in zip(asked, bounds[:-1], bounds[1:], strict=True):
        window_offsets = offsets.take(np.arange(first, stop))
        windows = [
            spans.Window.of(rows[row, 1:], context_first[row], pairs.reshape(-1, 2))
            for row, pairs in zip(range(first, stop), window_offsets, strict=True)
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

    model_kind = SpanReader

    def __init__(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.task, QAConfig)
        self.task, sizes = cfg.task, Sizes.of(cfg)
        self.k = min(self.task.n_best, sizes.lengths[0])
        # The odds above which there is no answer in evaluations; v1 has none.
        self.threshold = (self.task.null_threshold or 0.0) if self.task.unanswerable else None
        super().__init__(
            cfg,
            sizes,
            QAFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len, task=self.task),
            train_columns=TARGETS,
            eval_columns=TARGETS | CONTEXT,
            metrics=("loss", *(spans.V2_NAMES if self.task.unanswerable else spans.V1_NAMES)),
        )

    def cut(self, features: Dataset, most: int) -> int:
        """The number of rows up to the end of a question, at least the first question's."""
        owners = column(features, "row")
        return int(np.searchsorted(owners, owners[most])) or int(np.searchsorted(owners, owners[0], side="right"))

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return losses_of(logits_of(model, inputs), inputs).sum()

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """See `statistics`."""
        return statistics(logits_of(model, inputs), inputs, self.k)

    def answered(self, split: Split, rows: np.ndarray) -> list[Answered]:
        return list(answered(rows, split.features, self.tables.examples(split.name), self.task))

    def evaluate(self, rows: np.ndarray) -> dict[str, dict[str, float]]:
        """The metrics of each split."""
        by_split: dict[str, dict[str, float]] = {}
        for split in self.splits:
            part = split.of(rows)
            questions = self.answered(split, part)
            readings, wanted = [one.reading for one in questions], [one.wanted for one in questions]
            if self.threshold is None:
                metrics = spans.evaluate(readings, wanted)
            else:
                metrics = spans.evaluate_v2(readings, wanted, self.threshold)
            by_split[split.name] = {"loss": mean_loss(part), **metrics}
        return by_split

    def results(
        self, split: Split, rows: np.ndarray, metrics: dict[str, dict[str, float]]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """The answers in the format of the official scripts, and the n best of each question."""
        questions = self.answered(split, rows)
        files = {
            f"{split.name}.json": canonical_json({one.id: one.reading.answer(self.threshold) for one in questions}),
            f"{split.name}_nbest.jsonl": n_best_lines(questions, v2=self.task.unanswerable),
        }
        return files, {"questions": len(questions), "windows": len(rows), "threshold": self.threshold}
