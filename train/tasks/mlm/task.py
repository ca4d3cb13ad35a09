"""Masked language modelling on prepared shards.

Shapes: B sequences, S tokens, P positions to predict, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import InputError, ShardsConfig, TrainConfig, check
from train.data.batches.buckets import Buckets
from train.data.batches.loader import MaskedRows
from train.data.batches.masking import IGNORE_INDEX, Masker
from train.data.shards.cache import cache_dir
from train.data.shards.order import ShardSampler, Windows
from train.data.shards.prepared import PreparedData, Supply
from train.data.text.tokenizer import check_same_vocabulary, read_vocabulary, word_starts
from train.models.encoder import MaskedLM, build_masked_lm, check_fits, model_config
from train.models.flops import train_flops_per_sequence
from train.models.source import resolved
from train.storage.folders import Folder
from train.tasks.highest import highest
from train.tasks.mlm import MLMConfig


class MaskedLMTask:
    """See `train.tasks.Task`."""

    def __init__(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.task, MLMConfig) and isinstance(cfg.data, ShardsConfig)
        self.model = model = resolved(cfg.model, cfg.s3, cache_dir(cfg.data))
        self.data = PreparedData(cfg.data, cfg.s3)
        self.folder, self.manifest = self.data.folder, self.data.manifest
        self.seq_len, self.data_id = self.manifest.seq_len, self.manifest.id
        check(
            cfg.seq_len in (None, self.seq_len),
            f"seq_len={cfg.seq_len}, but {cfg.data.path} has {self.seq_len}; leave it out, or prepare the data again",
        )
        self.predictions = cfg.task.max_predictions or max(1, round(self.seq_len * cfg.task.mask_rate))
        check(
            self.predictions <= self.seq_len - 3,
            f"task.max_predictions={self.predictions} leaves nothing of a sequence of {self.seq_len} tokens to read; "
            f"set at most {self.seq_len - 3}",
        )
        info = self.manifest.tokenizer
        check_fits(
            model_config(model, vocab_size=info.vocab_size, pad_id=info.pad_id),
            vocab_size=info.vocab_size,
            seq_len=self.seq_len,
        )
        if model.pretrained is not None:
            check_same_vocabulary(
                model.pretrained,
                read_vocabulary(self.folder / "tokenizer"),
                f"model.pretrained={model.pretrained} has another tokenizer than the data; prepare it with "
                f"tokenizer.pretrained={model.pretrained}",
            )
        self.masker = Masker(
            seed=cfg.seed,
            mask_rate=cfg.task.mask_rate,
            max_predictions=self.predictions,
            max_ngram=cfg.task.max_ngram,
            mask_id=info.mask_id,
            special_ids=tuple(info.special_ids),
            vocab_size=info.vocab_size,
            word_start=word_starts(self.folder / "tokenizer") if cfg.task.whole_word else None,
        )
        self.shard_rows: Sequence[int] = [shard.rows for shard in self.manifest.splits["train"]]
        self.train_rows, self.eval_rows = self.manifest.rows("train"), self.manifest.rows("validation")
        entropy = self.manifest.counts.get("unigram_entropy", math.nan)
        check(
            self.eval_rows > 0 and math.isfinite(entropy),
            f"data.path={cfg.data.path} has no validation sequences or no unigram_entropy; prepare the data again",
        )
        if cfg.eval_examples is not None:
            self.eval_rows = min(self.eval_rows, cfg.eval_examples)
        self.buckets: Buckets | None = None
        self.metrics: tuple[str, ...] = ("loss", "perplexity", "masked_accuracy")
        self.details: dict[str, Any] = {}
        self.facts = {"unigram_entropy": entropy}

    def verify_data(self) -> None:
        self.data.verify()

    def windows(self) -> Windows:
        return self.data.windows()

    def supply(self, order: ShardSampler, *, is_first_on_machine: bool) -> Supply:
        return self.data.supply(order, is_first_on_machine=is_first_on_machine)

    def build_model(self) -> MaskedLM:
        info = self.manifest.tokenizer
        return build_masked_lm(self.model, vocab_size=info.vocab_size, pad_id=info.pad_id, seq_len=self.seq_len)

    def train_data(self) -> MaskedRows:
        return MaskedRows(self.data.split("train"), self.masker, is_training=True)

    def eval_data(self) -> MaskedRows:
        return MaskedRows(self.data.split("validation"), self.masker, is_training=False)

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits, labels = self._logits(model, inputs)
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """[B, 3]: loss sum, number of right predictions and of all predictions of each sequence."""
        logits, labels = self._logits(model, inputs)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
        right = highest(logits)[1].squeeze(-1) == labels
        statistics = torch.stack([losses, right.float(), (labels != IGNORE_INDEX).float()], -1)
        return statistics.unflatten(0, inputs["labels"].shape).sum(1)

    def _logits(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits [B * P, V] in float32 and labels [B * P]."""
        logits = model(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
        return logits.flatten(0, 1).float(), inputs["labels"].flatten()

    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        loss_sum, right, count = rows.sum(0, dtype=np.float64).tolist()
        if count == 0:
            raise InputError("the validation sequences have no masked tokens; raise task.mask_rate")
        loss = loss_sum / count
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "masked_accuracy": right / count}

    def write_evaluation(self, rows: np.ndarray, folder: Folder, *, step: int) -> None:
        """Write nothing: this task has metrics only."""

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        assert isinstance(model, MaskedLM)
        return train_flops_per_sequence(model.network.config, seq_len=seq_len, predictions=self.predictions)

    def describe_model(self, model: nn.Module, folder: Folder) -> None:
        """Write nothing: the tokenizer is in the data."""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model and its tokenizer, for AutoModelForMaskedLM.from_pretrained(folder)."""
        assert isinstance(model, MaskedLM)
        model.export(folder)
        shutil.copytree(self.folder / "tokenizer", folder, dirs_exist_ok=True)
