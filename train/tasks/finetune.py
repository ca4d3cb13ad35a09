"""What classification and question answering share: prepared tables to batches of static shapes, and evaluations of
several splits that come one after the other.
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

from train.config import ModelConfig, RecordsConfig, TrainConfig, check
from train.data.buckets import Buckets
from train.data.cache import cache_dir
from train.data.features import Featurizer
from train.data.order import ShardSampler, Windows
from train.data.prepared import NothingToDo, Supply
from train.data.table_facts import padding_share
from train.data.tables import open_tables
from train.data.token_rows import TokenRows
from train.models.encoder import OFFSET_POSITIONS, check_fits, model_config
from train.models.heads import Classifier, SpanReader
from train.models.source import resolved, task_tokenizer
from train.storage import Folder, canonical_json

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast


def json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


# ---- sizes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A model to be, its tokenizer, and the lengths that batches are padded to."""

    model: ModelConfig  # with what it starts from on this machine
    tokenizer: PreTrainedTokenizerFast
    lengths: tuple[int, ...]  # tokens, rising

    @staticmethod
    def of(cfg: TrainConfig) -> Sizes:
        """InputError if model, tokenizer and lengths do not go together."""
        assert isinstance(cfg.data, RecordsConfig)
        model = resolved(cfg.model, cfg.s3, cache_dir(cfg.data))
        tokenizer = task_tokenizer(model)
        config = model_config(model, vocab_size=len(tokenizer), pad_id=tokenizer.pad_token_id)
        seq_len = cfg.seq_len or most_positions(config)
        check_fits(config, vocab_size=len(tokenizer), seq_len=seq_len)
        return Sizes(model, tokenizer, lengths_up_to(seq_len, cfg.data.lengths))


def most_positions(config: Any) -> int:
    """Tokens that a model (its transformers configuration) can read. InputError if it does not say."""
    positions: int = getattr(config, "max_position_embeddings", None) or 0
    check(positions > 0, f"{config.model_type} has no longest sequence of its own: set seq_len")
    return positions - (config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0)


def lengths_up_to(seq_len: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """`lengths` with seq_len as the last. InputError if one is longer."""
    longest = max(lengths, default=0)
    check(longest <= seq_len, f"data.lengths ends with {longest}, more than the seq_len={seq_len} of this run")
    return (*(length for length in lengths if length < seq_len), seq_len)


# ---- the task ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Validation data, as far as it is used."""

    name: str  # of its tables
    prefix: str  # of its metrics: none for "validation"
    features: Dataset
    first: int  # its place in the statistics of an evaluation

    def of(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.first : self.first + len(self.features)]


class FineTuning(ABC):
    """See `train.tasks.Task`. `eval_columns` and `train_columns`: inputs of a batch and the features they hold."""

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
        self.model_config, self.tokenizer, self.lengths = sizes.model, sizes.tokenizer, sizes.lengths
        self.tables = open_tables(cfg, featurizer)
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
        self.buckets = None  # one length is a plain order
        if len(self.lengths) > 1:
            self.buckets = Buckets(self.lengths, train=self.train_table.bucket_of, evaluation=self.eval_table.bucket_of)
        self.metrics = tuple(f"{split.prefix}{name}" for split in self.splits for name in metrics)
        self.train_rows, self.data_id = len(self.train_table), self.tables.id
        self.shard_rows = [self.train_rows]
        self.details = self._details()
        train = self.details["splits"]["train"]
        notes = {f"{name}_share": number / train["examples"] for name, number in train["notes"].items()}
        self.facts: dict[str, float] = {"padding_share": train["padding_share"], **notes}

    def _rows(self, table: Dataset, columns: Mapping[str, str]) -> TokenRows:
        return TokenRows(table, pad_id=self.tokenizer.pad_token_id, lengths=self.lengths, columns=columns)

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
        """How many rows of a longer table to evaluate."""
        return most

    def verify_data(self) -> None:
        """With data.verify, checksums were compared as the tables were opened."""
        return

    def windows(self) -> Windows:
        return Windows(1)

    def supply(self, order: ShardSampler, *, is_first_on_machine: bool) -> Supply:
        return NothingToDo()

    def train_data(self) -> TokenRows:
        return self.train_table

    def eval_data(self) -> TokenRows:
        return self.eval_table

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        assert isinstance(model, Classifier | SpanReader)
        return model.train_flops(seq_len)

    @abstractmethod
    def evaluate(self, rows: np.ndarray) -> dict[str, dict[str, float]]:
        """Metrics of each split out of the statistics of all rows."""

    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        found = self.evaluate(rows)
        return {f"{part.prefix}{name}": value for part in self.splits for name, value in found[part.name].items()}

    @abstractmethod
    def results(
        self, split: Split, rows: np.ndarray, found: dict[str, dict[str, float]]
    ) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Of a split's statistics, and the metrics of all splits: files for predictions/ and what evaluation.json is to
        say beside the metrics.
        """

    def write_evaluation(self, rows: np.ndarray, folder: Folder, *, step: int) -> None:
        """predictions/ and, last, evaluation.json."""
        found = self.evaluate(rows)
        splits = {}
        for split in self.splits:
            files, tables = self.results(split, split.of(rows), found)
            for name, content in files.items():
                folder.write(f"predictions/{name}", content)
            splits[split.name] = {**found[split.name], **tables}
        folder.write("evaluation.json", canonical_json({"step": step, "splits": splits}))

    def describe_model(self, model: nn.Module, folder: Folder) -> None:
        """model/: what a checkpoint lacks to be exported without the data, tokenizer and transformers' config.json."""
        assert isinstance(model, Classifier | SpanReader)
        for path in sorted((self.tables.folder / "tokenizer").iterdir()):
            folder.write(f"model/{path.name}", path.read_bytes())
        folder.write("model/config.json", model.network.config.to_json_string().encode())

    def export(self, model: nn.Module, folder: Path) -> None:
        """The model and its tokenizer, for transformers' from_pretrained(folder)."""
        assert isinstance(model, Classifier | SpanReader)
        model.export(folder)
        shutil.copytree(self.tables.folder / "tokenizer", folder, dirs_exist_ok=True)
