"""The span of a context that answers a question (SQuAD), modelled on transformers' question-answering example.

Contexts that are too long are read in overlapping windows. Shapes: B windows, S tokens, k tokens with high scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor

from train.config.tasks import QAConfig
from train.data.batches.masking import IGNORE_INDEX
from train.data.records.table_facts import column
from train.data.records.token_rows import Lists
from train.run_folder.samples import MOST_GUESSES, Answer, Guess, Sample, excerpt
from train.storage.folders import canonical_json
from train.tasks.finetune import Entry, Results, TextTask, mean_loss
from train.tasks.qa import spans
from train.tasks.qa.windows import QAFeaturizer
from train.tasks.texts import Sizes
from train.tasks.topk import topk

# candidate answers per question, as in SQuAD's scripts; more would only increase transfers
N_BEST = 20

# ---- scores to answers ---------------------------------------------------------------------------------------------


def losses_of(logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """Return losses [B] for logits [B, S, 2]: the mean cross entropy of start and end, 0 for padding windows.

    Padding cannot be an answer, so that the loss of a row does not depend on the length of its batch.
    """
    logits = logits.float()
    if "attention_mask" in inputs:  # else there is no padding
        is_padding = inputs["attention_mask"] == 0
        logits = logits.masked_fill(is_padding[..., None], spans.LOWEST)
    start, end = logits.unbind(-1)
    pairs = ((start, inputs["start"]), (end, inputs["end"]))
    losses = [
        F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX, reduction="none")
        for logits, target in pairs
    ]
    return (losses[0] + losses[1]) / 2


@dataclass(frozen=True)
class Answered:
    """A question with the model's answers."""

    id: str
    # right answers; empty if the question has none or they are unknown
    wanted: list[str]
    predicted: spans.Answers


def answered(
    rows: np.ndarray, features: Dataset, examples: Dataset, task: QAConfig
) -> Iterator[Answered]:
    """Yield each question of `features` in order, with its answers from statistics [windows, 2 + 4 * k]."""
    owners = column(features, "row")
    context_first = column(features, "context_first").tolist()
    offsets = Lists(features.with_format("arrow")[:].column("offsets"))
    bounds = np.flatnonzero(np.diff(owners, prepend=-1, append=-1)).tolist()
    asked = examples.select(owners[bounds[:-1]])
    for example, (first, stop) in zip(asked, pairwise(bounds), strict=True):
        windows = []
        for row, of_window in enumerate(offsets.take(np.arange(first, stop)), first):
            pairs = of_window.reshape(-1, 2)
            windows.append(spans.WindowScores.of(rows[row, 1:], context_first[row], pairs))
        predicted = spans.read(
            windows,
            example["context"],
            n_best=N_BEST,
            max_answer_tokens=task.max_answer_tokens,
        )
        wanted = example.get("answers", {"text": []})["text"]
        yield Answered(example["id"], list(wanted), predicted)


# ---- the task ------------------------------------------------------------------------------------------------------


class QuestionAnswering(TextTask):
    """The span of a context that answers a question. A prediction is {"id", "answer", "score", "n_best"}."""

    columns = {"start": "start", "end": "end"}
    eval_columns = {"context_first": "context_first", "context_end": "context_end"}
    csv_columns = ["id", "answer", "score"]

    def __init__(self, cfg: QAConfig, sizes: Sizes) -> None:
        super().__init__(cfg, sizes)
        self.featurizer = QAFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len, task=cfg)
        self.shortest = N_BEST  # tokens; shorter batches would keep fewer candidates
        # The `null_odds` above which no answer is given. SQuAD v1 has no threshold: its models always answer.
        self.threshold: float | None = None
        self.metric_names = ("loss", *spans.V1_NAMES)
        if cfg.unanswerable:
            self.threshold = cfg.null_threshold or 0.0
            self.metric_names = ("loss", *spans.V2_NAMES)

    @property
    def k(self) -> int:
        """The number of scores kept per window."""
        return min(self.shortest, self.sizes.lengths[0])

    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return losses_of(logits, inputs).sum()

    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 2 + 4 * k]: loss, [CLS] score, k best start scores, their tokens, k best end scores, their tokens.
        start, end = logits.float().unbind(-1)
        tokens = torch.arange(logits.size(1), device=logits.device)
        is_context = (tokens >= inputs["context_first"][:, None]) & (
            tokens < inputs["context_end"][:, None]
        )
        null = start[:, 0] + end[:, 0]
        parts = [losses_of(logits, inputs)[:, None], null[:, None]]
        for scores in (start, end):
            parts += topk(scores.masked_fill(~is_context, spans.LOWEST), self.k)
        return torch.cat(parts, 1)

    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        questions = list(answered(statistics, features, examples, self.cfg))
        predicted = [one.predicted for one in questions]
        wanted = [one.wanted for one in questions]
        metrics = spans.evaluate(predicted, wanted, self.threshold)
        return {"loss": mean_loss(statistics), **metrics}

    def results(
        self, split: str, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> Results:
        # The answers in the format of the official scripts.
        questions = list(answered(statistics, features, examples, self.cfg))
        answers = {one.id: one.predicted.answer(self.threshold) for one in questions}
        files = {f"{split}.json": canonical_json(answers)}
        sizes = {"questions": len(questions), "windows": len(statistics)}
        return files, {**sizes, "threshold": self.threshold}

    def choose(self, rows: np.ndarray, metrics: Mapping[str, float]) -> dict[str, Any]:
        if not self.cfg.unanswerable or self.cfg.null_threshold is not None:
            return {}
        # infinite if a question has no span; no score exceeds LOWEST
        margin = metrics["best_f1_threshold"]
        return {"null_threshold": float(np.clip(margin, spans.LOWEST, -spans.LOWEST))}

    def predictions(
        self, rows: Iterable[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        examples = Dataset.from_list(
            [{"id": row["id"], "context": row["context"]} for row in rows]
        )
        for one in answered(statistics, features, examples, self.cfg):
            answer = one.predicted.answer(self.threshold)
            if answer:
                score = one.predicted.spans[0].score
            else:
                score = one.predicted.null_score
            n_best = one.predicted.n_best(v2=self.threshold is not None)
            yield {
                "id": one.id,
                "answer": answer,
                "score": score,
                "n_best": n_best,
            }

    def sample(self, row: Entry, prediction: Entry) -> Sample:
        wanted = row["answers"]
        given = prediction["answer"]
        spans_by_rank = sorted(prediction["n_best"], key=lambda span: span["text"] != given)
        guesses = []
        for span in spans_by_rank[:MOST_GUESSES]:
            guesses.append(Guess(excerpt(span["text"]), span["probability"]))
        truth = ""
        at = spans_by_rank[0]["begin"]
        if wanted["text"]:
            truth = wanted["text"][0]
            at = wanted["answer_start"][0]
        _, f1 = spans.score(given, wanted["text"], v2=self.threshold is not None)
        answer = Answer(excerpt(truth), guesses, f1)
        return Sample(excerpt(row["question"]), [answer], excerpt(row["context"], at))
