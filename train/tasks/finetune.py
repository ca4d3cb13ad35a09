"""What the tasks that learn from records share: batches of static shapes from prepared tables, and evaluations of
several splits, one after the other.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import concatenate_datasets
from torch import nn

from train.config import RecordsConfig, TrainConfig
from train.data.batches.buckets import Buckets
from train.data.records.kinds import Featurizer
from train.data.records.table_facts import padding_share
from train.data.records.tables import open_tables
from train.data.records.token_rows import TokenRows
from train.data.shards.order import ShardSampler, ShuffleBlock
from train.data.shards.prefetch import Prefetcher
from train.models.heads import PaddedEncoder, build_with_head, check_labels
from train.run_folder.samples import Sample
from train.storage.folders import Folder, canonical_json
from train.tasks.predictor import Host, Trained
from train.tasks.sample_choice import candidates, mixed
from train.tasks.spec import Origin
from train.tasks.texts import Sizes

if TYPE_CHECKING:
    from datasets import Dataset


def json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def mean_loss(rows: np.ndarray) -> float:
    """The mean loss of statistics [rows, n] that begin with the loss."""
    return float(rows[:, 0].mean(dtype=np.float64))


@dataclass(frozen=True)
class Split:
    """The part of a table of validation data that is used."""

    name: str  # of its tables
    prefix: str  # of its metrics: none for "validation"
    features: Dataset
    first: int  # row at which it begins in the statistics of an evaluation

    def of(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.first : self.first + len(self.features)]


class FineTuning(ABC):
    """See `train.tasks.Task`. `eval_columns` and `train_columns` name the features of each input of a batch."""

    model_kind: type[PaddedEncoder]

    def __init__(
        self,
        cfg: TrainConfig,
        sizes: Sizes,
        featurizer: Featurizer,
        *,
        train_columns: Mapping[str, str],
        eval_columns: Mapping[str, str],
        metrics: Sequence[str],
    ) -> None:
        assert isinstance(cfg.data, RecordsConfig)
        self.cfg, self.data = cfg, cfg.data
        self.sizes, self.lengths, self.seq_len = sizes, sizes.lengths, sizes.seq_len
        self.tables = open_tables(cfg, featurizer)
        self.labels: list[str] = self.tables.facts["labels"]
        if self.labels:
            check_labels(sizes.model, sizes.config, self.labels)
        self.splits: list[Split] = []
        self.eval_rows = 0
        for name in ("validation", *cfg.data.more_validation):
            features = self.tables.features(name)
            if cfg.eval_examples is not None and cfg.eval_examples < len(features):
                features = features.select(range(self.cut(features, cfg.eval_examples)))
            self.splits.append(Split(name, "" if name == "validation" else f"{name}_", features, self.eval_rows))
            self.eval_rows += len(features)
        self.train_table = self._rows(self.tables.features("train"), train_columns)
        self.eval_table = self._rows(concatenate_datasets([split.features for split in self.splits]), eval_columns)
        self.buckets: Buckets | None = None  # one length is a plain order
        if len(self.lengths) > 1:
            self.buckets = Buckets(self.lengths, train=self.train_table.bucket_of, evaluation=self.eval_table.bucket_of)
        self.metrics = tuple(f"{split.prefix}{name}" for split in self.splits for name in metrics)
        self.train_rows, self.data_id = len(self.train_table), self.tables.id
        self.shard_rows: Sequence[int] = [self.train_rows]
        self.details = self._details()
        train = self.details["splits"]["train"]
        notes = {f"{name}_share": number / train["examples"] for name, number in train["notes"].items()}
        self.facts: dict[str, float] = {"padding_share": train["padding_share"], **notes}

    def _rows(self, table: Dataset, columns: Mapping[str, str]) -> TokenRows:
        return TokenRows(table, pad_id=self.sizes.tokenizer.pad_token_id, lengths=self.lengths, columns=columns)

    def _details(self) -> dict[str, Any]:
        """What is known of the data, with the share of padding that this run's lengths come to."""
        facts = self.tables.facts
        used = {"train": self.train_table.row_lengths}
        used |= {split.name: split.of(self.eval_table.row_lengths) for split in self.splits}
        splits = {
            name: {
                **facts["splits"][name],
                "used_rows": len(lengths),
                "padding_share": padding_share(lengths, self.lengths),
            }
            for name, lengths in used.items()
        }
        return {"kind": facts["kind"], "labels": facts["labels"], "lengths": list(self.lengths), "splits": splits}

    def cut(self, features: Dataset, most: int) -> int:
        """The number of rows of a longer table to evaluate."""
        return most

    def verify_data(self) -> None:
        """Do nothing: with data.verify, checksums were compared when the tables were opened."""
        return

    def shuffle_block(self) -> ShuffleBlock:
        return ShuffleBlock(1)

    def prefetcher(self, order: ShardSampler, *, is_first_on_machine: bool) -> Prefetcher:
        return Prefetcher()

    def build_model(self) -> PaddedEncoder:
        return build_with_head(self.model_kind, self.sizes.model, labels=self.labels, **self.sizes.fit)

    def train_data(self) -> TokenRows:
        return self.train_table

    def eval_data(self) -> TokenRows:
        return self.eval_table

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        assert isinstance(model, PaddedEncoder)
        return model.train_flops(self.cfg.task.head_size(seq_len, len(self.labels)), seq_len)

    @abstractmethod
    def evaluate(self, rows: np.ndarray) -> dict[str, dict[str, float]]:
        """The metrics of each split, from the statistics of all rows."""

    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        metrics = self.evaluate(rows)
        return {f"{part.prefix}{name}": value for part in self.splits for name, value in metrics[part.name].items()}

    @abstractmethod
    def results(
        self, split: Split, rows: np.ndarray, metrics: dict[str, dict[str, float]]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Files for predictions/ and further entries of evaluation.json, from the statistics of a split and the metrics
        of all splits.
        """

    def write_evaluation(self, rows: np.ndarray, folder: Folder, *, step: int) -> None:
        """Write predictions/ and, last, evaluation.json."""
        metrics = self.evaluate(rows)
        splits = {}
        for split in self.splits:
            files, tables = self.results(split, split.of(rows), metrics)
            for name, content in files.items():
                folder.write(f"predictions/{name}", content)
            splits[split.name] = {**metrics[split.name], **tables}
        folder.write("evaluation.json", canonical_json({"step": step, "splits": splits}))

    def describe_model(self, model: nn.Module, folder: Folder) -> None:
        """Write model/: tokenizer and config.json, so that a checkpoint can be exported without the data."""
        assert isinstance(model, PaddedEncoder)
        for path in sorted((self.tables.folder / "tokenizer").iterdir()):
            folder.write(f"model/{path.name}", path.read_bytes())
        folder.write("model/config.json", model.network.config.to_json_string().encode())

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model and its tokenizer, for transformers' from_pretrained(folder)."""
        assert isinstance(model, PaddedEncoder)
        model.export(folder)
        shutil.copytree(self.tables.folder / "tokenizer", folder, dirs_exist_ok=True)

    def samples(self, export: Path, run: Folder, most: int) -> list[Sample]:
        """Some validation examples, as `python -m train.predict` answers them."""
        trained, host = Trained.of(Origin(str(export), (self.cfg, run), self.data), self.seq_len), Host()
        examples, target = self.tables.examples("validation"), trained.featurizer.kind.target
        rows = list(candidates(examples, most, target=target, labels=trained.labels))
        if not rows:
            return []
        predictor = trained.predictor(trained, host, dict.fromkeys(trained.prediction.options))
        results = predictor.predict(rows, host, batch_size=8, on_batch=lambda _: None)
        return mixed([predictor.sample(*pair) for pair in zip(rows, results, strict=True)], most)
