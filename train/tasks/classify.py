"""One label for a text or a pair of texts: features, loss, metrics and predictions. Shapes: B texts, C labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, Value
from torch import Tensor

from train.config import check, shortlist
from train.config.tasks import ClassifyConfig
from train.data.batches.masking import IGNORE_INDEX
from train.data.files.errors import BadRow
from train.data.records.featurizer import Featurizer
from train.data.records.kinds import STRING, RowKind
from train.data.records.row import Row
from train.data.records.table_facts import column
from train.data.records.token_rows import TokenRows
from train.models.heads import names_of_head
from train.tasks.finetune import Entry, TextTask, mean_loss, table_of
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from transformers import PreTrainedConfig

MOST_CONFUSED = 2000  # labels of a confusion matrix, whose size is their square


def read_texts(row: Row) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key in ("text", "text_pair"):
        if key in row.columns:
            texts[key] = row.text(key)
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


class ClassifyFeaturizer(Featurizer):
    """Texts as tokens, truncated to `seq_len`. Of a pair, the longer text is truncated."""

    kind = CLASSIFY_ROWS

    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        texts = rows["text"], rows.get("text_pair")
        encoded = self.encode_fast(*texts)
        self.count_cut(split, encoded, *texts)
        labels = rows.get("label", [0] * len(indices))
        return {**self.columns(split, encoded, indices), "label": labels}


class Classification(TextTask):
    """One of several labels for a text. A prediction has "id", "label" (if known), "prediction", "probabilities"."""

    makes_features: type[ClassifyFeaturizer] = ClassifyFeaturizer
    columns = {"labels": "label"}
    # in the loss, [C]; None: all labels have the same weight
    weights: Tensor | None = None
    # With two labels, there is also "f1".
    metric_names = ("loss", "accuracy", "f1_macro", "f1_weighted", "matthews_correlation")

    def __init__(self, cfg: Any, sizes: Sizes) -> None:
        super().__init__(cfg, sizes)
        self.featurizer = self.makes_features(sizes.tokenizer, seq_len=sizes.seq_len)

    @property
    def csv_columns(self) -> list[str]:  # type: ignore[override]
        return ["id", "label", "prediction", *(f"probability_{label}" for label in self.labels)]

    def begin(self, train_table: TokenRows) -> None:
        counts = np.bincount(train_table.values["labels"], minlength=len(self.labels))
        weights = class_weights(self.cfg, self.labels, counts)
        train_table.weights = weights
        if weights is not None:
            self.weights = torch.from_numpy(weights)
        if len(self.labels) == 2:
            self.metrics += tuple(f"{split.prefix}f1" for split in self.splits)

    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # The engine divides this sum by the sum of the texts' weights ("count"). The result is torch's weighted mean.
        if self.weights is not None:
            self.weights = self.weights.to(logits.device)  # moved once
        return F.cross_entropy(
            logits.float(),
            inputs["labels"],
            self.weights,
            ignore_index=IGNORE_INDEX,
            label_smoothing=self.cfg.label_smoothing,
            reduction="sum",
        )

    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 1 + C]: the loss without weights and smoothing, and logits [B, C].
        logits = logits.float()
        labels = inputs["labels"]
        losses = F.cross_entropy(
            logits,
            labels,
            ignore_index=IGNORE_INDEX,
            reduction="none",
        )
        return torch.cat([losses[:, None], logits], 1)

    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        metrics = self.score(column(features, "label"), statistics[:, 1:].argmax(1))
        return {"loss": mean_loss(statistics), **metrics}

    def score(self, truth: ArrayLike, predicted: ArrayLike) -> dict[str, float]:
        """Return metrics of labels [rows] and predicted labels [rows]."""
        return scores(truth, predicted, num_labels=len(self.labels))

    def scores_by_name(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, Any]:
        return tables(column(features, "label"), statistics[:, 1:].argmax(1), self.labels)

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        labels = names_of_head(config)
        problem = getattr(config, "problem_type", None)
        check(
            problem in (None, "single_label_classification") and len(labels) > 1,
            f"{source} does not predict one of several labels: it has {len(labels)} outputs and problem_type {problem}",
        )
        return labels

    def predictions(
        self, rows: Iterable[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        shares = self.probabilities(statistics[:, 1:])
        for row, share in zip(rows, shares, strict=True):
            line: Entry = {key: row[key] for key in ("id", "label") if key in row}
            line["prediction"] = self.answer(share)
            line["probabilities"] = dict(zip(self.labels, share.tolist(), strict=True))
            yield line

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities of the labels, [rows, C] float64, from logits [rows, C]."""
        return torch.from_numpy(logits).double().softmax(-1).numpy()

    def answer(self, shares: np.ndarray) -> Any:
        """Return what is predicted for a text whose labels have the probabilities `shares` [C]."""
        return self.labels[shares.argmax()]


def class_weights(
    cfg: ClassifyConfig, labels: Sequence[str], counts: np.ndarray
) -> np.ndarray | None:
    """Return the loss weights of labels, [C] float32; None if all are equal. `counts` [C]: training rows per label."""
    # as scikit-learn's "balanced"
    balanced = counts.sum() / (len(labels) * np.maximum(counts, 1))
    return given_weights("task.class_weights", cfg.class_weights, labels, balanced, counts == 0)


def given_weights(
    key: str, given: Any, labels: Sequence[str], balanced: np.ndarray, is_absent: np.ndarray
) -> np.ndarray | None:
    """Return the loss weights of labels, [C] float32: those of a setting, or the `balanced` ones [C]; None: no weights.

    Raises InputError if balanced weights are asked for and a label `is_absent` [C]: all or no rows have it.
    """
    if given is None:
        return None
    if given != "balanced":
        check_each(key, given, labels)
        return np.array(given, np.float32)
    absent = shortlist(name for name, is_it in zip(labels, is_absent, strict=True) if is_it)
    check(
        not absent,
        f"{key}=balanced: all or no training rows have the label {absent}; give numbers",
    )
    return balanced.astype(np.float32)


def check_each(key: str, values: Sequence[float], labels: Sequence[str]) -> None:
    """Raise InputError unless there is a value for each label."""
    ok = len(values) == len(labels)
    check(ok, f"{key} has {len(values)} numbers for {len(labels)} labels ({shortlist(labels)})")


def tables(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    """Return precision, recall, F1 and support per label, and the confusion matrix, unless there are too many."""
    from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

    numbers = list(range(len(names)))
    scores = precision_recall_fscore_support(
        labels,
        predicted,
        labels=numbers,
        zero_division=0,
    )
    per_class = table_of(names, scores)
    found: dict[str, Any] = {"labels": list(names), "per_class": per_class}
    if len(names) <= MOST_CONFUSED:
        found["confusion"] = confusion_matrix(labels, predicted, labels=numbers).tolist()
    return found


def scores(truth: ArrayLike, predicted: ArrayLike, *, num_labels: int) -> dict[str, float]:
    """Return accuracy, F1 and Matthews' correlation.

    F1 is averaged over the labels that occur in truth or predictions, as in scikit-learn. A label that is never
    predicted has an F1 of 0. With two labels, `f1` is that of the second. Matthews' correlation is 0 if only one label
    is predicted.
    """
    # Imported here: importing scikit-learn and scipy takes a second, which must not delay the first step.
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    values = {"accuracy": accuracy_score(truth, predicted)}
    for average in ("macro", "weighted"):
        values[f"f1_{average}"] = f1_score(
            truth,
            predicted,
            average=average,
            zero_division=0,
        )
    values["matthews_correlation"] = 0.0
    is_mixed = len(np.unique([truth, predicted])) > 1  # otherwise scikit-learn warns
    if is_mixed:
        values["matthews_correlation"] = matthews_corrcoef(truth, predicted)
    if num_labels == 2:
        values["f1"] = f1_score(truth, predicted, zero_division=0)
    return {name: float(value) for name, value in values.items()}
