"""Masked language modelling on prepared shards, with or without sentence-order prediction.

Shapes: B sequences, S tokens, P positions to predict, V vocabulary.

In ALBERT's paper, the token loss is a mean over tokens and the order loss a mean over sequences. Here both are sums,
which the engine divides by the number of masked tokens. Each order loss is multiplied by P, so the result is nearly the
same: if some of a sequence's P positions are unused, the order loss weighs slightly more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import InputError, ShardsConfig, TrainConfig, check
from train.config.tasks import EVAL_MASK_RATE, MLMConfig
from train.data.batches.loader import MaskedRows, Swapper
from train.data.batches.masking import IGNORE_INDEX, Masker
from train.data.shards.cache import cache_dir
from train.data.shards.order import ShardSampler, eval_sample, eval_shards, evenly_spaced
from train.data.shards.prefetch import Prefetcher
from train.data.shards.prepared import PreparedData
from train.data.text.coverage import unknown_share
from train.data.text.encoding import open_tokenizer, starts_of
from train.data.text.tokenizer import check_same_vocabulary
from train.models.encoder import MaskedLM, build_masked_lm, fitting_config, mask_filler
from train.models.source import resolved
from train.run_folder.samples import MOST_GUESSES, Answer, Guess, Sample, excerpt
from train.tasks.spec import Task
from train.tasks.state import TaskState, files_beside
from train.tasks.topk import topk

FACTS = ("unigram_entropy", "neighbour_accuracy")  # counts of the manifest, for metrics and report
TOKENS_SHOWN = 16  # tokens of a sample on each side of its blank
NO_PAIRS = "no validation sequence has two segments of the same document; set task.sop=false"


class MaskedLMTask(Task):
    """Masked language modelling, with or without sentence-order prediction."""

    def __init__(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.task, MLMConfig) and isinstance(cfg.data, ShardsConfig)
        self.token_loss: Callable[..., Tensor] = loss_sum
        self.model = resolved(cfg.model, cfg.s3, cache_dir(cfg.data))
        self.data = PreparedData(cfg.data, cfg.s3)
        self.verify = self.data.verify
        self.folder = self.data.folder
        self.manifest = self.data.manifest
        self.seq_len = self.manifest.seq_len
        self.data_id = self.manifest.id
        self.manifest.check_length(cfg.seq_len, cfg.data.path)
        self.state = TaskState.of(cfg.task, seq_len=self.seq_len, seed=cfg.seed)
        self.head = cfg.task.head_size(self.seq_len)
        self.predictions = self.head.predictions
        info = self.manifest.tokenizer
        self.fit = {
            "vocab_size": info.vocab_size,
            "pad_id": info.pad_id,
            "seq_len": self.seq_len,
        }
        self._check_tokenizer()
        fitting_config(self.model, **self.fit)
        self.masker, self.eval_masker = self._maskers(cfg.task, seed=cfg.seed)
        self.swapper: Swapper | None = None
        if cfg.task.sop:
            self.swapper = Swapper(cfg.seed)
        self.shard_rows = [shard.rows for shard in self.manifest.splits["train"]]
        self.train_rows = self.manifest.rows("train")
        self.facts = {name: self.manifest.counts.get(name, math.nan) for name in FACTS}
        self._check_data(cfg.data.path)
        unknown = self.manifest.counts.get("unknown_tokens", 0)
        tokens = self.manifest.counts.get("tokens", 0)
        reads = f"data.path={cfg.data.path}: the tokenizer reads the text"
        self.remarks = [unknown_share(unknown, tokens, reads)]
        self._choose_evaluation(cfg)

    def _choose_evaluation(self, cfg: TrainConfig) -> None:
        """Set which rows are evaluated, by which metrics, and how many of them the report shows."""
        num_validation = self.manifest.rows("validation")
        self.eval_sample = eval_sample(num_validation, cfg.eval_examples, seed=cfg.seed)
        self.eval_rows = len(self.eval_sample)
        self.num_shown = cfg.samples
        self.metrics = ("loss", "perplexity", "masked_accuracy")
        if self.swapper is not None:
            self.metrics += ("mlm_loss", "sop_loss", "sop_accuracy")

    def _maskers(self, cfg: MLMConfig, *, seed: int) -> tuple[Masker, Masker]:
        """Return the masker of training and that of evaluations. Raises InputError if they leave no tokens to read."""
        check(
            self.predictions <= self.seq_len - 3,
            f"task.mask_rate={cfg.mask_rate} leaves no tokens to read in sequences of {self.seq_len}",
        )
        info = self.manifest.tokenizer
        words = None
        if cfg.whole_word:
            words = starts_of(open_tokenizer(self.folder / "tokenizer"))
        masker = Masker(
            seed=seed,
            mask_rate=cfg.mask_rate,
            max_predictions=self.predictions,
            max_ngram=cfg.max_ngram,
            mask_id=info.mask_id,
            special_ids=tuple(info.special_ids),
            vocab_size=info.vocab_size,
            words=words,
        )
        in_evaluations = replace(
            masker,
            mask_rate=EVAL_MASK_RATE,
            max_predictions=self.head.eval_predictions,
        )
        return masker, in_evaluations

    def _check_data(self, path: str) -> None:
        """Raise InputError if the prepared data lacks what an evaluation needs."""
        has_no_pairs = self.manifest.counts.get("validation_pairs") == 0
        check(self.swapper is None or not has_no_pairs, f"task.sop=true, but in {path} {NO_PAIRS}")
        is_whole = all(map(math.isfinite, self.facts.values()))
        check(
            self.manifest.rows("validation") > 0 and is_whole,
            f"data.path={path} has no validation sequences, or lacks {' or '.join(FACTS)}, as does data from an "
            "earlier version; prepare the data again",
        )

    def _check_tokenizer(self) -> None:
        """Raise InputError if the data's tokenizer is not that of the weights."""
        source = self.model.pretrained
        if source is not None:
            check_same_vocabulary(
                source,
                open_tokenizer(self.folder / "tokenizer").get_vocab(),
                f"model.pretrained={source} has a different tokenizer than the data; prepare it with "
                f"tokenizer.pretrained={source}",
            )

    def verify_data(self) -> None:
        self.verify()

    def only_evaluates(self) -> None:
        """Make `verify_data` fetch and verify only the validation data."""
        self.verify = partial(self.data.bring, self.manifest.splits["validation"])

    def window_shards(self, order: ShardSampler) -> int:
        return self.data.window_shards(order)

    def eval_shards(self, ranks: Sequence[int], world_size: int) -> list[int]:
        shard_rows = [shard.rows for shard in self.manifest.splits["validation"]]
        return eval_shards(shard_rows, self.eval_sample, ranks, world_size, self.num_shown)

    def prefetcher(self, order: ShardSampler, *, is_first_on_machine: bool) -> Prefetcher | None:
        return self.data.prefetcher(order, is_first_on_machine=is_first_on_machine)

    def build_model(self) -> MaskedLM:
        model = build_masked_lm(
            self.model,
            **self.fit,
            predicts_order=self.swapper is not None,
        )
        model.head_share = self.predictions / self.seq_len
        return model

    def train_data(self) -> MaskedRows:
        return MaskedRows(
            self.data.split("train"), self.masker, is_training=True, swapper=self.swapper
        )

    def eval_data(self) -> MaskedRows:
        return self._eval_rows(self.swapper)

    def _eval_rows(self, swapper: Swapper | None) -> MaskedRows:
        shards, sample = self.data.split("validation"), self.eval_sample
        return MaskedRows(
            shards, self.eval_masker, is_training=False, swapper=swapper, sample=sample
        )

    def compile_loss(
        self, compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
    ) -> None:
        self.token_loss = compiled(loss_sum)

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        logits, labels, order = self._logits(model, inputs)
        loss = self.token_loss(logits, labels)
        if order is None:
            return loss
        return loss + self.predictions * loss_sum(order, inputs["order"])

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        # [B, 3]: loss, number of right predictions, number of predictions; with SOP [B, 6], also these for the order.
        logits, labels, order = self._logits(model, inputs)
        statistics = [scores(logits, labels).unflatten(0, inputs["labels"].shape).sum(1)]
        if order is not None:
            statistics.append(scores(order, inputs["order"]))
        return torch.cat(statistics, -1)

    def _logits(
        self, model: nn.Module, inputs: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return logits [B * P, V], labels [B * P], and logits [B, 2] of the order if it is predicted."""
        output = model(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
        logits, order = (output, None) if self.swapper is None else output
        return logits.flatten(0, 1), inputs["labels"].flatten(), order

    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        total, right, count, *of_order = rows.sum(0, dtype=np.float64).tolist()
        loss = total / count
        metrics = {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "masked_accuracy": right / count,
        }
        if of_order:
            order_sum, order_right, order_count = of_order
            if order_count == 0:
                raise InputError(NO_PAIRS)
            order_loss = order_sum / order_count
            metrics |= {
                "loss": loss + order_loss,
                "mlm_loss": loss,
                "sop_loss": order_loss,
            }
            metrics["sop_accuracy"] = order_right / order_count
        return metrics

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        assert isinstance(model, MaskedLM)
        return model.train_flops(self.head, seq_len)

    def files_beside(self, model: MaskedLM) -> dict[str, bytes]:
        return files_beside(self.folder / "tokenizer", inputs=model.inputs, state=self.state)

    def samples(self, export: Path, most: int) -> list[Sample]:
        # In each of these validation sequences, the first token to predict is masked. The model runs on the host.
        fill = mask_filler(export)
        rows = evenly_spaced(self.eval_rows, most)
        drawn = self._eval_rows(None).draw(rows[None])["inputs"]
        parts = [drawn[name][0] for name in ("input_ids", "positions", "labels")]
        found = []
        for tokens, places, hidden in zip(*parts, strict=True):
            is_used = hidden != IGNORE_INDEX
            tokens[places[is_used]] = hidden[is_used]
            if is_used.any():
                at = int(places[is_used][0])
                found.append(sample_of(fill, tokens.tolist(), at))
        return found


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy [] of logits [N, C] and labels [N], in float32, summed over rows with a label."""
    # When compiled, this never stores the logits in float32.
    return F.cross_entropy(
        logits.float(),
        labels,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [N, 3] for logits [N, C] and labels [N]: loss, 1 if the prediction is right, 1 if the row has a label."""
    logits = logits.float()
    losses = F.cross_entropy(
        logits,
        labels,
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    right = topk(logits)[1].squeeze(-1) == labels
    return torch.stack([losses, right.float(), (labels != IGNORE_INDEX).float()], -1)


def sample_of(fill: Any, tokens: Sequence[int], at: int) -> Sample:
    """Return the text around the token `at` of a sequence, with the answers of transformers' pipeline `fill`."""
    read = fill.tokenizer
    first = max(0, at - TOKENS_SHOWN)
    last = at + TOKENS_SHOWN
    before = read.decode(tokens[first:at], skip_special_tokens=True)
    behind = read.decode(tokens[at + 1 : last], skip_special_tokens=True)
    answers = fill(f"{before} {read.mask_token} {behind}", top_k=MOST_GUESSES)
    guesses = [Guess(excerpt(each["token_str"]), each["score"]) for each in answers]
    is_right = answers[0]["token"] == tokens[at]
    truth = excerpt(read.decode([tokens[at]]))
    text = excerpt(f"{before} [1] {behind}", len(before))
    return Sample(text, [Answer(truth, guesses, float(is_right))])
