"""Regression of a number from a text or a pair of texts: features, loss, metrics and predictions.

Targets are standardised when the data is opened, so that loss and head work on numbers around 0. The export rescales
the head's last layer, so that it predicts in the units of the data. Targets have the shape of the logits, [B, 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset, List, Value
from torch import Tensor

from train.config import EvaluatedConfig, RecordsConfig, TrainConfig, check
from train.config.tasks import RegressConfig
from train.data.files.errors import BadRow
from train.data.records.content_checks import PLAIN_NUMBER, is_number
from train.data.records.kinds import STRING, RowKind
from train.data.records.table_facts import column
from train.data.records.token_rows import TokenRows
from train.models.heads import PaddedEncoder, Scale, default_names, learn_scaled, names_of_head
from train.tasks.classify import ClassifyFeaturizer, read_texts
from train.tasks.finetune import Entry, TextTask, examples_of, known, mean_loss
from train.tasks.state import read_state
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

NAMES = ("mse", "mae", "rmse", "pearson", "spearman")
MOST = float(np.finfo(np.float32).max)


# ---- targets of rows -----------------------------------------------------------------------------------------------


def number_of(value: Any, name: str) -> float:
    """Return a target, which may be given as text. Raises BadRow if it is not a number that float32 can represent."""
    is_text = isinstance(value, str)
    is_plain = is_text and PLAIN_NUMBER.fullmatch(value.strip())
    is_value = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
    if is_text and not is_plain and is_number(value):
        raise BadRow(
            f"{name} holds {value!r:.40}, not a number in this form: write 0.64, without a decimal comma, thousands or "
            "signs"
        )
    if not (is_plain or is_value):
        raise BadRow(f"{name} holds {value!r:.40}, not a number")
    number = float(value)
    if not abs(number) <= MOST:  # rejects NaN too
        raise BadRow(f"{name} holds {number}, not a number up to {MOST:.2g}")
    return number


def regress_rows(name: str) -> RowKind:
    """Return the kind of rows that have the target `name`."""

    def read_number(value: Any, texts: dict[str, Any], is_learnt: bool) -> list[float] | None:
        try:
            return [number_of(value, name)]
        except BadRow:
            if is_learnt:
                raise
            return None  # a new row whose answer is unknown

    return RowKind(
        "regress",
        columns={
            "text": STRING,
            "text_pair": STRING,
            "label": List(Value("float64")),
        },
        read=read_texts,
        target="label",
        read_target=read_number,
        split_by="text",
        tokens={"label": List(Value("float32"), length=1)},
    )


class RegressFeaturizer(ClassifyFeaturizer):
    """A featurizer that tokenizes texts like a classifier's; the label is a number."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int, target: str) -> None:
        super().__init__(tokenizer, seq_len=seq_len, targets=[target])
        self.kind = regress_rows(target)

    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        unknown = [[0.0]] * len(indices)
        return super().features({"label": unknown, **rows}, indices, split=split)


# ---- the task ------------------------------------------------------------------------------------------------------


class Regression(TextTask):
    """Regression. A prediction has "id", "label" (if known) and "prediction", a number."""

    columns = {"labels": "label"}
    metric_names = ("loss", *NAMES)
    csv_columns = ["id", "label", "prediction"]
    # The scale of the head's outputs; None: they are in the units of the data.
    scale: Scale | None = None

    def __init__(self, cfg: RegressConfig, sizes: Sizes) -> None:
        super().__init__(cfg, sizes)
        self.use_target("label")

    def use_target(self, name: str) -> None:
        self.target = name
        self.featurizer = RegressFeaturizer(
            self.sizes.tokenizer, seq_len=self.sizes.seq_len, target=name
        )

    @property
    def outputs(self) -> Sequence[str]:
        return [self.target]

    def open(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.data, RecordsConfig)
        check(
            not (cfg.data.labels or cfg.data.label_map),
            "data.labels and data.label_map name classes; task=regress learns numbers: leave them out",
        )
        name = cfg.data.columns.label
        check(isinstance(name, str), f"data.columns.label={name}: task=regress reads one column")
        if isinstance(cfg.data, EvaluatedConfig):
            # the model's config names the target
            name = names_of_head(self.sizes.config)[0]
        self.use_target(name)
        super().open(cfg)

    def begin(self, train_table: TokenRows) -> None:
        # This standardises the targets of both tables. Raises InputError if all training rows have the same target.
        numbers = train_table.values["labels"].astype(np.float64)
        check(
            float(np.ptp(numbers)) > 0,
            f"train: all {len(numbers):,} rows have the number {numbers[0, 0]:g} in {self.target}, so there is nothing "
            "to learn; is data.columns.label right?",
        )
        scale = Scale(float(numbers.mean()), float(numbers.std()))
        self.standardize(scale, train_table, self.eval_table)

    def standardize(self, scale: Scale, *tables: TokenRows) -> None:
        self.scale = scale
        for table in tables:
            numbers = (table.values["labels"] - scale.mean) / scale.deviation
            table.values["labels"] = numbers.astype(np.float32)

    def only_evaluates(self) -> None:
        """Standardise the targets as the run did, because the loss is that of standardised targets."""
        super().only_evaluates()
        state = read_state(str(self.sizes.model.pretrained))
        if self.scale is None and state is not None and state.scale is not None:
            self.standardize(state.scale, self.eval_table)

    def build_model(self) -> PaddedEncoder:
        model = super().build_model()
        learn_scaled(model, self.scale, is_trained=self.sizes.model.pretrained is not None)
        return model

    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        return squared_errors(logits, inputs["labels"]).sum()

    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 2]: the loss and the head's output.
        logits = logits.float()
        return torch.cat([squared_errors(logits, inputs["labels"]), logits], 1)

    def numbers(self, statistics: np.ndarray) -> np.ndarray:
        """Return the predictions [rows] float64, in the units of the data."""
        computed = statistics[:, 1].astype(np.float64)
        if self.scale is None:
            return computed
        return computed * self.scale.deviation + self.scale.mean

    def truth(self, examples: Dataset, features: Dataset) -> np.ndarray:
        """Return the targets [rows] float64 of the features' examples."""
        return column(examples_of(examples, features), "label").reshape(-1)

    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        metrics = scores(self.truth(examples, features), self.numbers(statistics))
        return {"loss": mean_loss(statistics), **metrics}

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        problem = getattr(config, "problem_type", None)
        check(
            problem in (None, "regression") and config.num_labels == 1,
            f"{source} must compute one number; it has {config.num_labels} outputs and problem_type {problem}",
        )
        self.use_target(names_of_head(config)[0])
        return []  # its output is no label

    def settings_of_outputs(self) -> dict[str, Any]:
        if [self.target] == default_names(1):
            return {}
        return {"data.columns.label": self.target}

    def predictions(
        self, rows: Iterable[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        for row, number in zip(rows, self.numbers(statistics).tolist(), strict=True):
            line = known(row, "id", "label")
            if "label" in line:
                line["label"] = line["label"][0]
            yield {**line, "prediction": number}


def squared_errors(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses [B, 1] float32. Padding rows, whose targets are NaN, have a loss of 0."""
    is_known = ~targets.isnan()
    return torch.where(is_known, logits.float() - targets.nan_to_num(), 0.0).square()


# ---- metrics -------------------------------------------------------------------------------------------------------


def scores(truth: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return each metric of NAMES, from numbers [rows]."""
    from scipy.stats import rankdata  # imported here: it must not delay the first step

    errors = predicted - truth
    mse = float(np.square(errors).mean())
    return {
        "mse": mse,
        "mae": float(np.abs(errors).mean()),
        "rmse": mse**0.5,
        "pearson": correlation(truth, predicted),
        "spearman": correlation(rankdata(truth), rankdata(predicted)),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Return Pearson's correlation of two [rows]; 0 if one is constant."""
    first = first - first.mean()
    second = second - second.mean()
    squares = np.square(first).sum() * np.square(second).sum()
    product = np.sqrt(squares)
    if product == 0:
        return 0.0
    return float((first * second).sum() / product)
