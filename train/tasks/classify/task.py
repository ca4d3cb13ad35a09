"""One label for a text or a pair of texts: features, loss and evaluation.

Shapes: B texts, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Value
from torch import Tensor, nn

from train.config import TrainConfig, check
from train.data.batches.masking import IGNORE_INDEX
from train.data.files.errors import BadRow
from train.data.records.kinds import STRING, Row, RowKind
from train.data.records.table_facts import column
from train.models.heads import Classifier, logits_of
from train.tasks.classify import ClassifyConfig, scores
from train.tasks.finetune import FineTuning, Split, json_lines, mean_loss
from train.tasks.texts import Sizes, TextFeaturizer, second_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

METRICS = ("loss", *scores.NAMES)
COLUMNS = {"labels": "label"}  # input of a batch: column of the features


def probabilities(logits: np.ndarray) -> np.ndarray:
    """[rows, C] float64 of logits [rows, C]."""
    return torch.from_numpy(logits).double().softmax(-1).numpy()


def statistics(logits: Tensor, labels: Tensor) -> Tensor:
    """[B, 1 + C] float32: loss and logits, of logits [B, C] and labels [B] int64."""
    logits = logits.float()
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return torch.cat([losses[:, None], logits], 1)


def class_weights(cfg: ClassifyConfig, labels: Sequence[str], counts: np.ndarray) -> np.ndarray | None:
    """[C] float32: how much an error counts; None: all the same. `counts` [C]: training rows of each label.

    Balanced weights are those of scikit-learn's "balanced": rows / (labels * rows of the label).
    """
    given = cfg.class_weights
    if given is not None:
        check(
            len(given) == len(labels),
            f"task.class_weights has {len(given)} numbers for {len(labels)} labels ({', '.join(labels)})",
        )
        return np.array(given, np.float32)
    if not cfg.balanced:
        return None
    absent = [name for name, count in zip(labels, counts, strict=True) if not count]
    check(not absent, f"task.balanced=true: no training row has the label {', '.join(absent)}; set task.class_weights")
    return (counts.sum() / (len(labels) * counts)).astype(np.float32)


def read_texts(row: Row) -> dict[str, str]:
    texts: dict[str, str] = {key: row.text(key) for key in ("text", "text_pair") if key in row.columns}
    if not any(text.strip() for text in texts.values()):
        raise BadRow(f"an empty {row.columns['text']}")
    return texts


CLASSIFY_ROWS = RowKind(
    "classify",
    columns={"text": STRING, "text_pair": STRING, "label": STRING},
    read=read_texts,
    target="label",
    split_by="text",
    tokens={"label": Value("int64")},
)


class ClassifyFeaturizer(TextFeaturizer):
    """Texts to tokens, truncated to `seq_len`; in a pair the longer text is truncated. See `Featurizer`."""

    kind = CLASSIFY_ROWS

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int) -> None:
        super().__init__(tokenizer)
        self.settings: dict[str, Any] = {"version": 1, "seq_len": seq_len}

    def features(self, rows: dict[str, list], indices: list[int], *, split: str) -> dict[str, list]:
        """The features of rows of `text`, `text_pair` (for pairs) and `label`, which becomes 0 in rows to predict."""
        encoded = self.tokenizer(
            rows["text"],
            rows.get("text_pair"),
            truncation="longest_first",
            max_length=self.settings["seq_len"],
            split_special_tokens=True,
            verbose=False,
        ).encodings
        self.count(split, truncated=sum(bool(encoding.overflowing) for encoding in encoded))
        return {
            "input_ids": [self.ids(encoding) for encoding in encoded],
            "second_at": [second_at(encoding) for encoding in encoded],
            "length": [len(encoding.ids) for encoding in encoded],
            "row": list(indices),
            "label": rows.get("label", [0] * len(indices)),
        }


class ClassifyTask(FineTuning):
    """See `train.tasks.Task`."""

    model_kind = Classifier

    def __init__(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.task, ClassifyConfig)
        sizes = Sizes.of(cfg)
        featurizer = ClassifyFeaturizer(sizes.tokenizer, seq_len=sizes.seq_len)
        super().__init__(cfg, sizes, featurizer, train_columns=COLUMNS, eval_columns=COLUMNS, metrics=METRICS)
        self.label_smoothing = cfg.task.label_smoothing
        counts = np.bincount(self.train_table.values["labels"], minlength=len(self.labels))
        weights = class_weights(cfg.task, self.labels, counts)
        self.train_table.weights = weights
        self.weights = None if weights is None else torch.from_numpy(weights)

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """The loss summed over the texts. Divided by the sum of their weights ("count") it is torch's weighted mean."""
        logits = logits_of(model, inputs)
        if self.weights is not None:
            self.weights = self.weights.to(logits.device)  # once
        return F.cross_entropy(
            logits.float(),
            inputs["labels"],
            self.weights,
            ignore_index=IGNORE_INDEX,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """[B, 1 + C]: loss without weights and smoothing, and logits."""
        return statistics(logits_of(model, inputs), inputs["labels"])

    def evaluate(self, rows: np.ndarray) -> dict[str, dict[str, float]]:
        return {
            split.name: {
                "loss": mean_loss(split.of(rows)),
                **scores.summary(column(split.features, "label"), predicted(split.of(rows))),
            }
            for split in self.splits
        }

    def results(
        self, split: Split, rows: np.ndarray, metrics: dict[str, dict[str, float]]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """A line for each text, and the tables of each class."""
        labels, answers = column(split.features, "label"), predicted(rows)
        ids = self.tables.examples(split.name).select(column(split.features, "row"))["id"]
        lines = (
            {
                "id": name,
                "label": self.labels[label],
                "prediction": self.labels[answer],
                "probabilities": dict(zip(self.labels, shares, strict=True)),
            }
            for name, label, answer, shares in zip(
                ids, labels, answers, probabilities(rows[:, 1:]).tolist(), strict=True
            )
        )
        return {f"{split.name}.jsonl": json_lines(lines)}, scores.tables(labels, answers, self.labels)


def predicted(rows: np.ndarray) -> np.ndarray:
    """[rows] int64: the labels with the highest logits, of statistics [rows, 1 + C]."""
    return rows[:, 1:].argmax(1)
