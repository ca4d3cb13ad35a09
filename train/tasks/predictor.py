"""Predictions of a trained model for new rows, which are read as in an evaluation of its run.

Rows are those of `train.data.records.raw.read_texts`. One process, on the CPU or a CUDA device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from datasets import Dataset, Features, concatenate_datasets
from torch import Tensor

from train.config import ModelConfig, TaskConfig, check
from train.data.batches.buckets import BUCKET_SHIFT
from train.data.records.kinds import TOKENS, Featurizer
from train.data.records.token_rows import TokenRows
from train.models.heads import PaddedEncoder, build_with_head, logits_of
from train.run_folder.samples import Sample
from train.tasks import TASKS, spec_of
from train.tasks.spec import Origin, Prediction
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOKENISED_TOGETHER = 500  # rows; before they are an Arrow table they take ten times as much memory
STEP = 8  # tokens; batches are padded to multiples of it, which suits matrix units
MOST_LENGTHS = 128  # different lengths that batches are padded to


class Computes(Protocol):
    """What a predictor needs of a backend."""

    device: torch.device

    def autocast(self) -> AbstractContextManager[Any]: ...

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...


class Host:
    """The CPU in float32, beside a run whose backend has the devices and their graphs."""

    device = torch.device("cpu")

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(tensors)


@dataclass(frozen=True)
class Trained:
    """What is known of a model before its weights are read."""

    origin: Origin
    sizes: Sizes
    prediction: Prediction
    predictor: type[Predictor]
    task: TaskConfig
    featurizer: Featurizer
    labels: list[str]  # in the order of their numbers; empty for a task without labels

    @staticmethod
    def of(origin: Origin, seq_len: int | None) -> Trained:
        """The model of a run, a folder of transformers or a Hub id. The task of the last two is the first in the table
        whose head the model has. `seq_len` None: that of the run, or the longest that the model can read. InputError if
        there is no such task.
        """
        source, task = origin.source, None
        if origin.run is not None:
            task, seq_len = origin.run[0].task, seq_len or origin.run[0].seq_len
        sizes = Sizes.read(ModelConfig(pretrained=source, tokenizer=source), seq_len)
        names = ", ".join(sizes.config.architectures or ["none"])
        if task is None:
            fitting = (spec.settings for spec in TASKS.values() if spec.prediction is not None and spec.head in names)
            settings = next(fitting, None)
            heads = ", ".join(spec.head for spec in TASKS.values() if spec.prediction is not None)
            check(
                settings is not None,
                f"{source} has no head that predicts (its config.json names the architecture {names}); give a model "
                f"with one of: {heads}",
            )
            assert settings is not None
            task = settings()
        spec = spec_of(task)
        check(spec.head in names, f"{source}: the run's task is {task.kind}, but the model is a {names}")
        assert spec.prediction is not None
        predictor = spec.prediction.predictor()
        labels = predictor.labels_of(source, sizes.config)
        featurizer = predictor.build_featurizer(sizes, task)
        return Trained(origin, sizes, spec.prediction, predictor, task, featurizer, labels)


class Predictor(ABC):
    """The answers of a task's models. See `train.tasks.spec.Prediction`."""

    columns: Mapping[str, str]  # see TokenRows
    model_kind: type[PaddedEncoder]
    csv_columns: list[str]
    shortest = STEP  # the least tokens of a batch

    def __init__(self, trained: Trained, backend: Computes, options: Mapping[str, Any]) -> None:
        """Read the weights. `options`: the values of the flags in the task's Prediction."""
        self.trained, self.options = trained, options
        sizes = trained.sizes
        model = build_with_head(self.model_kind, sizes.model, labels=trained.labels, **sizes.fit)
        source, new = trained.origin.source, ", ".join(sorted(model.new)[:3])
        check(not model.new, f"{source} holds no weights for {new}: its head was not trained")
        self.model = model.to(backend.device).eval()
        seq_len = sizes.seq_len
        step = max(STEP, -(-seq_len // MOST_LENGTHS))
        self.lengths = [*range(-(-min(self.shortest, seq_len) // step) * step, seq_len, step), seq_len]

    @classmethod
    def labels_of(cls, source: str, config: PreTrainedConfig) -> list[str]:
        """The labels of a model, from its transformers configuration. InputError if the task cannot use them."""
        return []

    def predict(
        self, rows: list[dict[str, Any]], backend: Computes, *, batch_size: int, on_batch: Callable[[int], Any]
    ) -> list[dict[str, Any]]:
        """The model's answer to each row, in their order. `on_batch` gets the number of sequences read."""
        features = self.features(rows)
        statistics = self.statistics(features, backend, batch_size, on_batch)
        check(
            bool(np.isfinite(statistics).all()), f"{self.trained.origin.source} computes NaN: its weights are damaged"
        )
        return list(self.results(rows, features, statistics))

    def features(self, rows: list[dict[str, Any]]) -> Dataset:
        parts = []
        for first in range(0, len(rows), TOKENISED_TOGETHER):
            part = rows[first : first + TOKENISED_TOGETHER]
            texts = {key: [row[key] for row in part] for key in self.trained.prediction.inputs if key in part[0]}
            columns = self.trained.featurizer.features(texts, [*range(first, first + len(part))], split="new")
            parts.append(Dataset.from_dict(columns, features=Features(TOKENS | self.trained.featurizer.kind.tokens)))
        return concatenate_datasets(parts)

    @torch.inference_mode()
    def statistics(
        self, features: Dataset, backend: Computes, batch_size: int, on_batch: Callable[[int], Any]
    ) -> np.ndarray:
        """[rows, n] float32, in the order of the features. They are read in the order of their length, longest first:
        there is little padding, and a batch that does not fit into memory fails at once.
        """
        pad_id = self.trained.sizes.tokenizer.pad_token_id
        table = TokenRows(features, pad_id=pad_id, lengths=self.lengths, columns=self.columns)
        order = np.argsort(-table.row_lengths, kind="stable")
        batches = []
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            bucket = int(table.bucket_of[rows[0]])
            drawn = table.draw((rows + (bucket << BUCKET_SHIFT))[None])["inputs"]
            inputs = {name: tensor[0].to(backend.device) for name, tensor in drawn.items()}
            with backend.autocast():
                batches += backend.to_host([self.statistics_of(logits_of(self.model, inputs), inputs)])
            on_batch(len(rows))
        gathered = torch.cat(batches).numpy()
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    @staticmethod
    def row_of(texts: dict[str, str]) -> dict[str, Any]:
        """The row that the texts of flags mean, by column."""
        return dict(texts)

    @staticmethod
    @abstractmethod
    def build_featurizer(sizes: Sizes, task: Any) -> Featurizer: ...

    @abstractmethod
    def statistics_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """[B, n] float32, like the statistics of the task."""

    @abstractmethod
    def results(
        self, rows: list[dict[str, Any]], features: Dataset, statistics: np.ndarray
    ) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def sample(self, row: dict[str, Any], result: dict[str, Any]) -> Sample:
        """A row whose right answer is known and what `predict` gave for it, for the report."""

    @abstractmethod
    def metrics(self) -> str:
        """A line with the metrics of all rows so far that have a right answer; empty if there are none."""
