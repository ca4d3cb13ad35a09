"""Any number of labels for texts or pairs: features, loss, metrics and predictions. Shapes: B texts, C labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, List, Value
from torch import Tensor

from train.config import RecordsConfig, check, shortlist
from train.data.records.featurizer import TOKENS
from train.data.records.kinds import STRING, RowKind
from train.data.records.table_facts import column
from train.data.records.token_rows import TokenRows
from train.models.heads import names_of_head
from train.run_folder.samples import Answer, Guess, Sample, excerpt
from train.tasks.classify.task import ClassifyFeaturizer, check_each, read_texts
from train.tasks.finetune import (
    Entry,
    Results,
    TextTask,
    examples_of,
    json_lines,
    mean_loss,
    table_of,
)
from train.tasks.multilabel import CHOSEN, MultiLabelConfig
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

USUAL = 0.5

MULTILABEL_ROWS = RowKind(
    "multilabel",
    columns={"text": STRING, "text_pair": STRING, "label": List(STRING)},
    read=read_texts,
    target="label",
    split_by="text",
    tokens={"label": List(Value("float32"))},
    takes_columns=True,
)


class MultiLabelFeaturizer(ClassifyFeaturizer):
    """A featurizer that tokenizes texts as a classifier's does; a label is 1 if the text has it, otherwise 0."""

    kind = MULTILABEL_ROWS

    @property
    def types(self) -> dict[str, Any]:
        return TOKENS | {"label": List(Value("float32"), length=len(self.labels))}

    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        found = rows.get("label", [[]] * len(indices))
        has_label = np.zeros((len(indices), len(self.labels)), np.float32)
        for row, numbers in enumerate(found):
            has_label[row, numbers] = 1
        return super().features({**rows, "label": list(has_label)}, indices, split=split)


class MultiLabel(TextTask):
    """Any number of labels for a text. A prediction has "id", "label" (if known), "prediction", "probabilities"."""

    columns = {"labels": "label"}
    metric_names = ("loss", "f1_micro", "f1_macro", "average_precision", "subset_accuracy")
    # [C]
    weights: Tensor | None = None

    def __init__(self, cfg: MultiLabelConfig, sizes: Sizes) -> None:
        super().__init__(cfg, sizes)
        self.featurizer = MultiLabelFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len)
        self.threshold: float | None = None  # for all labels; None: the settings' threshold

    @property
    def csv_columns(self) -> list[str]:  # type: ignore[override]
        return ["id", "label", "prediction", *(f"probability_{label}" for label in self.labels)]

    def begin(self, train_table: TokenRows) -> None:
        self.limits()
        weights = positive_weights(
            self.cfg.positive_weights, self.labels, train_table.values["labels"]
        )
        self.weights = None if weights is None else torch.from_numpy(weights)

    def limits(self) -> list[float]:
        """Return the minimum probability at which each label is predicted, [C]."""
        # Evaluations use USUAL if thresholds are chosen on the same rows: the chosen ones would make scores too good.
        given = self.threshold or (USUAL if self.cfg.threshold in CHOSEN else self.cfg.threshold)
        limits = given if isinstance(given, list) else [given] * len(self.labels)
        check_each("task.threshold", limits, self.labels)
        return limits

    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # The engine divides this sum by texts * labels ("count"). The result is torch's mean.
        if self.weights is not None:
            self.weights = self.weights.to(logits.device)  # moved once
        return losses_of(logits, inputs["labels"], self.weights).sum()

    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 1 + C]: the unweighted loss, averaged over the labels, and logits [B, C].
        losses = losses_of(logits, inputs["labels"], None).mean(1, keepdim=True)
        return torch.cat([losses, logits.float()], 1)

    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        return {
            "loss": mean_loss(statistics),
            **self.score(self.truth(features), probabilities(statistics[:, 1:])),
        }

    def truth(self, features: Dataset) -> np.ndarray:
        """Return a mask of the labels that the texts have, [rows, C]."""
        return column(features, "label").reshape(-1, len(self.labels)).astype(bool)

    def score(self, truth: Any, predicted: Any) -> dict[str, float]:
        # `predicted` has probabilities. Average precision is the mean over the labels that occur.
        from sklearn.metrics import accuracy_score, average_precision_score, f1_score

        truth, shares = np.asarray(truth, bool), np.asarray(predicted, np.float64)
        answers = shares >= self.limits()
        f1_of = {
            f"f1_{how}": f1_score(truth, answers, average=how, zero_division=0)
            for how in ("micro", "macro")
        }
        present = np.flatnonzero(truth.any(0))
        precisions = [
            average_precision_score(truth[:, label], shares[:, label]) for label in present
        ]
        return {
            **{name: float(value) for name, value in f1_of.items()},
            "average_precision": float(np.mean(precisions)) if precisions else 0.0,
            "subset_accuracy": float(accuracy_score(truth, answers)),
        }

    def results(
        self, split: str, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> Results:
        # One line per text. For each label: its scores at the thresholds in use, and the threshold with the best F1.
        from sklearn.metrics import precision_recall_fscore_support

        truth, shares = self.truth(features), probabilities(statistics[:, 1:])
        names = examples_of(examples, features)["id"]
        rows = [
            {"id": name, "label": self.named(has)} for name, has in zip(names, truth, strict=True)
        ]
        lines = json_lines(self.predictions(rows, features, statistics))
        scores = precision_recall_fscore_support(
            truth, shares >= self.limits(), average=None, zero_division=0
        )
        table = table_of(self.labels, scores)
        for number in np.flatnonzero(truth.any(0)):
            table[self.labels[number]] |= best_threshold(truth[:, number], shares[:, number])
        return {f"{split}.jsonl": lines}, {"labels": self.labels, "per_class": table}

    def choose(self, rows: np.ndarray, metrics: Mapping[str, float]) -> dict[str, Any]:
        if self.cfg.threshold not in CHOSEN:
            return {}
        validation = self.splits[0]
        truth, shares = self.truth(validation.features), probabilities(validation.of(rows)[:, 1:])
        return {"threshold": chosen(truth, shares, each=self.cfg.threshold == CHOSEN[1])}

    # ---- predictions -----------------------------------------------------------------------------------------------

    def use(self, data: RecordsConfig, options: Mapping[str, Any]) -> None:
        self.threshold = given = options["threshold"]
        check(given is None or 0 < given < 1, f"--threshold {given} must be between 0 and 1")
        self.limits()

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        labels, problem = names_of_head(config), getattr(config, "problem_type", None)
        ok = problem == "multi_label_classification"
        check(
            ok,
            f"{source} is not a multi-label model: problem_type is {problem}, not multi_label_classification",
        )
        return labels

    def named(self, has_label: Sequence[Any]) -> list[str]:
        return [label for label, has in zip(self.labels, has_label, strict=True) if has]

    def predictions(
        self, rows: list[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        shares = probabilities(statistics[:, 1:])
        for row, share, answer in zip(rows, shares.tolist(), shares >= self.limits(), strict=True):
            yield {
                **{key: row[key] for key in ("id", "label") if row.get(key) is not None},
                "prediction": self.named(answer),
                "probabilities": dict(zip(self.labels, share, strict=True)),
            }

    def known(self, row: Entry, prediction: Entry) -> tuple[list[bool], list[float]] | None:
        if (truth := row.get("label")) is None:
            return None
        return [label in truth for label in self.labels], [*prediction["probabilities"].values()]

    def sample(self, row: Entry, prediction: Entry) -> Sample:
        truth, answer = set(row["label"]), set(prediction["prediction"])
        score = len(truth & answer) / len(truth | answer) if truth | answer else 1.0
        words = [
            excerpt(", ".join(labels) or "(no label)")
            for labels in (row["label"], prediction["prediction"])
        ]
        answers = [Answer(words[0], [Guess(words[1], None)], score)]
        return Sample(excerpt(row["text"]), answers, excerpt(row.get("text_pair") or ""))


TASK = MultiLabel


def losses_of(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return the losses [B, C] float32. Padding rows, whose targets are NaN, have a loss of 0."""
    losses = F.binary_cross_entropy_with_logits(
        logits.float(), targets.nan_to_num(), pos_weight=weights, reduction="none"
    )
    return torch.where(targets.isnan(), 0.0, losses)


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities [rows, C] float64 for logits [rows, C]."""
    return torch.from_numpy(logits).double().sigmoid().numpy()


def positive_weights(
    given: Any, labels: Sequence[str], has_label: np.ndarray
) -> np.ndarray | None:
    """Return pos_weight for the loss, one per label, [C] float32; None if all are 1. `has_label` is [rows, C]."""
    if given is None:
        return None
    if given != "balanced":
        check_each("task.positive_weights", given, labels)
        return np.array(given, np.float32)
    counts = has_label.sum(0, dtype=np.float64)
    absent = [
        name for name, count in zip(labels, counts, strict=True) if count in (0, len(has_label))
    ]
    check(
        not absent,
        f"task.positive_weights=balanced: all or no training rows have the label {shortlist(absent)}",
    )
    return ((len(has_label) - counts) / counts).astype(np.float32)


def best_threshold(truth: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    """Return the highest F1 for `truth` and probabilities `shares` [rows], and a threshold that reaches it."""
    from sklearn.metrics import precision_recall_curve

    precision, recall, limits = precision_recall_curve(truth, shares)
    f1 = 2 * precision * recall / np.maximum(precision + recall, np.finfo(float).tiny)
    best = int(f1[:-1].argmax())
    middle = (limits[best] + (limits[best - 1] if best else 0)) / 2
    return {
        "best_f1": float(f1[best]),
        "best_threshold": max(float(middle), np.finfo(np.float32).tiny.item()),
    }


def chosen(truth: np.ndarray, shares: np.ndarray, *, each: bool) -> list[float]:
    """Return the thresholds [C] with the best F1 on truth and probabilities [rows, C]; all are equal unless `each`."""
    columns = (
        list(zip(truth.T, shares.T, strict=True)) if each else [(truth.ravel(), shares.ravel())]
    )
    limits = [
        best_threshold(*column)["best_threshold"] if column[0].any() else USUAL
        for column in columns
    ]
    return limits if each else limits * truth.shape[1]
