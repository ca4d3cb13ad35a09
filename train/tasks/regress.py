"""Regression of numbers from a text or a pair of texts: features, loss, metrics and predictions.

Targets are standardised when the data is opened, so that loss and head work on numbers around 0. The export rescales
the head's last layer, so that it predicts in the units of the data.

Shapes: B texts, C targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset, List, Value
from torch import Tensor

from train.config import RecordsConfig, TrainConfig, check, shortlist
from train.config.tasks import RegressConfig
from train.data.files.errors import BadRow
from train.data.records.content_checks import PLAIN_NUMBER, is_number
from train.data.records.kinds import STRING, RowKind
from train.data.records.sources import NO_ROWS
from train.data.records.table_facts import column
from train.data.records.token_rows import TokenRows
from train.data.shards.order import spread
from train.models.heads import PaddedEncoder, Scale, default_names, learn_scaled, names_of_head
from train.run_folder.samples import Sample
from train.tasks.classify import ClassifyFeaturizer, read_texts
from train.tasks.finetune import Entry, TextTask, examples_of, mean_loss
from train.tasks.state import read_state
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

NAMES = ("mse", "mae", "rmse", "pearson", "spearman")
MOST = float(np.finfo(np.float32).max)
MOST_PAIRS = 500  # pairs of truth and prediction per target in evaluation.json


# ---- targets of rows -----------------------------------------------------------------------------------------------


def number_of(value: Any, name: str) -> float:
    """Return a target, which may be given as text. Raises BadRow if it is not a number that float32 can represent."""
    reason = why_no_number(value)
    if reason:
        raise BadRow(f"{name} holds {value!r:.40}, {reason}")
    number = float(value)
    if not abs(number) <= MOST:  # rejects NaN too
        raise BadRow(f"{name} holds {number}, not a number up to {MOST:.2g}")
    return number


def why_no_number(value: Any) -> str:
    """Return why a value is not a number; "" if it is one."""
    if isinstance(value, list):
        return "a list: each number needs a column"
    if isinstance(value, str):
        if PLAIN_NUMBER.fullmatch(value.strip()):
            return ""
        if is_number(value):
            return "not a number in this form: write 0.64, without a decimal comma, thousands or signs"
    elif isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return ""
    return "not a number"


def regress_rows(names: Sequence[str]) -> RowKind:
    """Return the kind of rows that have the targets `names`."""

    def read_numbers(value: Any, texts: dict[str, Any], is_learnt: bool) -> list[float] | None:
        if len(names) > 1:
            values = value
        else:
            values = [value]
        try:
            if not isinstance(values, list) or len(values) != len(names):
                raise BadRow(f"{value!r:.40} in place of the numbers {', '.join(names)}")
            return [number_of(each, name) for each, name in zip(values, names, strict=True)]
        except BadRow:
            if is_learnt:
                raise
            return None  # a new row whose answer is unknown

    return RowKind(
        "regress",
        columns={"text": STRING, "text_pair": STRING, "label": List(Value("float64"))},
        read=read_texts,
        target="label",
        read_target=read_numbers,
        split_by="text",
        tokens={"label": List(Value("float32"), length=len(names))},
        takes_columns=True,
    )


class RegressFeaturizer(ClassifyFeaturizer):
    """A featurizer that tokenizes texts like a classifier's; labels are numbers."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int, targets: Sequence[str]
    ) -> None:
        super().__init__(tokenizer, seq_len=seq_len, targets=list(targets))
        self.kind = regress_rows(targets)

    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        unknown = [[0.0] * len(self.settings["targets"])] * len(indices)
        return super().features({"label": unknown, **rows}, indices, split=split)


# ---- the task ------------------------------------------------------------------------------------------------------


class Regression(TextTask):
    """Regression. A prediction has "id", "label" (if known) and "prediction": a number, or {target: number}."""

    columns = {"labels": "label"}
    metric_names = ("loss", *NAMES)
    # The scale of the head's outputs; None: they are in the units of the data.
    scale: Scale | None = None

    def __init__(self, cfg: RegressConfig, sizes: Sizes) -> None:
        super().__init__(cfg, sizes)
        self.use_targets(["label"])

    def use_targets(self, names: Sequence[str]) -> None:
        self.targets = list(names)
        self.featurizer = RegressFeaturizer(
            self.sizes.tokenizer, seq_len=self.sizes.seq_len, targets=names
        )

    @property
    def outputs(self) -> Sequence[str]:
        return self.targets

    @property
    def csv_columns(self) -> list[str]:  # type: ignore[override]
        if len(self.targets) == 1:
            return ["id", "label", "prediction"]
        labels = [f"label_{name}" for name in self.targets]
        return ["id", *labels, *(f"prediction_{name}" for name in self.targets)]

    def open(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.data, RecordsConfig)
        check(
            not (cfg.data.labels or cfg.data.label_map),
            "data.labels and data.label_map name classes; task=regress learns numbers: leave them out",
        )
        names = cfg.data.columns.label
        if cfg.data.train == NO_ROWS and self.sizes.config.num_labels == 1:
            names = names_of_head(self.sizes.config)  # the model's config names the target
        self.use_targets(names if isinstance(names, list) else [names])
        super().open(cfg)

    def begin(self, train_table: TokenRows) -> None:
        # This standardises the targets of both tables. Raises InputError if a target is the same in all training rows.
        numbers = train_table.values["labels"].astype(np.float64)
        mean, deviation = numbers.mean(0), numbers.std(0)
        for name, value, apart in zip(self.targets, mean, np.ptp(numbers, 0), strict=True):
            check(
                apart > 0,
                f"train: all {len(numbers):,} rows have the number {value:g} in {name}, so there is nothing to learn; "
                "is data.columns.label right?",
            )
        scale = Scale(mean.tolist(), deviation.tolist())
        self.standardize(scale, train_table, self.eval_table)

    def standardize(self, scale: Scale, *tables: TokenRows) -> None:
        self.scale = scale
        mean, deviation = np.array(scale.mean), np.array(scale.deviation)
        for table in tables:
            numbers = (table.values["labels"] - mean) / deviation
            table.values["labels"] = numbers.astype(np.float32)

    def only_evaluates(self) -> None:
        """Standardise the targets as the run did, because the loss is that of standardised targets."""
        super().only_evaluates()
        source = str(self.sizes.model.pretrained)
        state = read_state(source)
        if self.scale is not None or state is None or state.scale is None:
            return
        check(
            len(state.scale.mean) == len(self.targets),
            f"{source}: its scale is not that of the targets {shortlist(self.targets)}",
        )
        self.standardize(state.scale, self.eval_table)

    def build_model(self) -> PaddedEncoder:
        model = super().build_model()
        learn_scaled(model, self.scale, is_trained=self.sizes.model.pretrained is not None)
        return model

    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return squared_errors(logits, inputs["labels"]).sum()

    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 1 + C]: the loss, averaged over the targets, and the head's outputs [B, C].
        logits = logits.float()
        losses = squared_errors(logits, inputs["labels"]).mean(1, keepdim=True)
        return torch.cat([losses, logits], 1)

    def numbers(self, statistics: np.ndarray) -> np.ndarray:
        """Return the predictions [rows, C] float64, in the units of the data."""
        computed = statistics[:, 1:].astype(np.float64)
        if self.scale is None:
            return computed
        return computed * self.scale.deviation + self.scale.mean

    def truth(self, examples: Dataset, features: Dataset) -> np.ndarray:
        """Return the targets [rows, C] float64 of the features' examples."""
        return column(examples_of(examples, features), "label").reshape(-1, len(self.targets))

    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        # Each metric is the mean over the targets.
        each = scores(self.truth(examples, features), self.numbers(statistics))
        metrics = {name: float(values.mean()) for name, values in each.items()}
        return {"loss": mean_loss(statistics), **metrics}

    def scores_by_name(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, Any]:
        # Pairs of truth and prediction for some rows, and each target's metrics if there are several.
        truth, predicted = self.truth(examples, features), self.numbers(statistics)
        pairs = np.stack([truth, predicted], -1)[spread(len(truth), MOST_PAIRS)]
        pairs = pairs[np.isfinite(pairs).all((1, 2))]
        found: dict[str, Any] = {
            "pairs": {name: pairs[:, at].tolist() for at, name in enumerate(self.targets)}
        }
        if len(self.targets) > 1:
            for metric, values in scores(truth, predicted).items():
                for target, value in zip(self.targets, values.tolist(), strict=True):
                    found[f"{target}_{metric}"] = value
        return found

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        problem = getattr(config, "problem_type", None)
        check(
            problem in (None, "regression"),
            f"{source} must compute numbers; it has problem_type {problem}",
        )
        self.use_targets(names_of_head(config))
        return []  # its outputs are not labels

    def settings_of_outputs(self) -> dict[str, Any]:
        names = self.targets
        if names == default_names(len(names)):
            return {}
        return {"data.columns.label": names if len(names) > 1 else names[0]}

    def named(self, numbers: Sequence[float]) -> Any:
        """Return the number of a single target, or numbers by name if there are several targets."""
        if len(self.targets) == 1:
            return numbers[0]
        return dict(zip(self.targets, numbers, strict=True))

    def predictions(
        self, rows: Iterable[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        for row, numbers in zip(rows, self.numbers(statistics).tolist(), strict=True):
            line = {"id": row["id"]}
            if row.get("label") is not None:
                line["label"] = self.named(row["label"])
            line["prediction"] = self.named(numbers)
            yield line

    def sample(self, row: Entry, prediction: Entry) -> Sample:
        sample = super().sample({**row, "label": self.named(row["label"])}, prediction)
        answer = replace(sample.answers[0], score=0.5)  # a number is neither right nor wrong
        return replace(sample, answers=[answer])

    def in_words(self, row: Entry, answer: Any) -> str:
        if not isinstance(answer, dict):
            return f"{answer:.4g}"
        return ", ".join(f"{name} {number:.4g}" for name, number in answer.items())


def squared_errors(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses [B, C] float32. Padding rows, whose targets are NaN, have a loss of 0."""
    is_known = ~targets.isnan()
    return torch.where(is_known, logits.float() - targets.nan_to_num(), 0.0).square()


# ---- metrics -------------------------------------------------------------------------------------------------------


def scores(truth: np.ndarray, predicted: np.ndarray) -> dict[str, np.ndarray]:
    """Return each metric of NAMES for all targets, [C], from numbers [rows, C]."""
    from scipy.stats import rankdata  # imported here: it must not delay the first step

    errors = predicted - truth
    mse = np.square(errors).mean(0)
    return {
        "mse": mse,
        "mae": np.abs(errors).mean(0),
        "rmse": np.sqrt(mse),
        "pearson": correlations(truth, predicted),
        "spearman": correlations(rankdata(truth, axis=0), rankdata(predicted, axis=0)),
    }


def correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return Pearson's correlation [C] of the columns of [rows, C]; 0 if a column is constant."""
    first, second = first - first.mean(0), second - second.mean(0)
    product = np.sqrt(np.square(first).sum(0) * np.square(second).sum(0))
    return (first * second).sum(0) / np.where(product > 0, product, 1.0)
