"""Masked language modelling on prepared shards, with or without sentence-order prediction.

Shapes: B sequences, S tokens, P positions to predict, V vocabulary.

In ALBERT's paper, the token loss is a mean over tokens and the order loss a mean over sequences. Here both are sums,
which the engine divides by the number of masked tokens. Each order loss is multiplied by P, so the result is nearly the
same: if some of a sequence's P positions are unused, the order loss weighs slightly more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import InputError, ModelConfig, ShardsConfig, TrainConfig, check, shortlist
from train.data.batches.loader import MaskedRows, Swapper
from train.data.batches.masking import IGNORE_INDEX, Masker
from train.data.shards.cache import cache_dir
from train.data.shards.order import ShardSampler, eval_sample, eval_shards, spread
from train.data.shards.prefetch import Prefetcher
from train.data.shards.prepared import PreparedData
from train.data.text.coverage import unknown_share
from train.data.text.encoding import starts_of
from train.data.text.tokenizer import check_same_vocabulary, open_tokenizer
from train.data.text.words import word_edges
from train.models.encoder import MaskedLM, build_masked_lm, fitting_config
from train.models.source import resolved
from train.run_folder.samples import MOST_CHARS, MOST_GUESSES, Answer, Guess, Sample, excerpt
from train.storage.folders import Folder
from train.tasks.mlm import MLMConfig
from train.tasks.spec import Task
from train.tasks.state import TaskState, files_beside
from train.tasks.topk import topk

MOST_BLANKS = 4  # maximum in a sample
TOKENS_BEFORE = 12  # tokens that a sample shows before its first blank
SPACE = "\N{OPEN BOX}"
NO_PAIRS = "no validation sequence has two segments of the same document; set task.sop=false"


class MaskedLMTask(Task):
    """Masked language modelling, with or without sentence-order prediction."""

    def __init__(self, cfg: TrainConfig) -> None:
        assert isinstance(cfg.task, MLMConfig) and isinstance(cfg.data, ShardsConfig)
        self.token_loss: Callable[..., Tensor] = loss_sum
        self.model = model = resolved(cfg.model, cfg.s3, cache_dir(cfg.data))
        self.data = PreparedData(cfg.data, cfg.s3)
        self.verify = self.data.verify
        self.folder, self.manifest = self.data.folder, self.data.manifest
        self.seq_len, self.data_id = self.manifest.seq_len, self.manifest.id
        self.manifest.check_length(cfg.seq_len, cfg.data.path)
        self.state = TaskState.of(cfg.task, seq_len=self.seq_len, seed=cfg.seed)
        self.head = cfg.task.head_size(self.seq_len)
        self.predictions = self.head.predictions
        for name, slots in (
            ("mask_rate", self.predictions),
            ("eval_mask_rate", self.head.eval_predictions),
        ):
            check(
                slots <= self.seq_len - 3,
                f"task.{name}={getattr(cfg.task, name)} leaves no tokens to read in sequences of {self.seq_len}",
            )
        info = self.manifest.tokenizer
        self.fit = {"vocab_size": info.vocab_size, "pad_id": info.pad_id, "seq_len": self.seq_len}
        self.new_rows = self._new_rows()
        known = {**self.fit, "vocab_size": info.vocab_size - len(self.new_rows)}
        size = fitting_config(model, **known).vocab_size
        self.masker = Masker(
            seed=cfg.seed,
            mask_rate=cfg.task.mask_rate,
            max_predictions=self.predictions,
            max_ngram=cfg.task.max_ngram,
            mask_id=info.mask_id,
            special_ids=tuple(info.special_ids),
            vocab_size=info.vocab_size,
            words=word_edges(self.folder / "tokenizer") if cfg.task.whole_word else None,
        )
        self.eval_masker = self.masker
        if (rate := cfg.task.eval_mask_rate) is not None:
            self.eval_masker = replace(
                self.masker, mask_rate=rate, max_predictions=self.head.eval_predictions
            )
        self.swapper = Swapper(cfg.seed) if cfg.task.sop else None
        has_none = self.manifest.counts.get("validation_pairs") == 0
        check(not (cfg.task.sop and has_none), f"task.sop=true, but in {cfg.data.path} {NO_PAIRS}")
        self.shard_rows = [shard.rows for shard in self.manifest.splits["train"]]
        self.train_rows, self.eval_rows = (
            self.manifest.rows("train"),
            self.manifest.rows("validation"),
        )
        unknown, tokens = (
            self.manifest.counts.get(name, 0) for name in ("unknown_tokens", "tokens")
        )
        self.remarks = [
            unknown_share(
                unknown, tokens, f"data.path={cfg.data.path}: the tokenizer reads the text"
            )
        ]
        if self.new_rows:
            names = shortlist(
                f"{number} {token!r}" for number, token in sorted(self.new_rows.items())
            )
            grown = f"the embeddings grow from {size:,} rows to {max(size, info.vocab_size):,}"
            self.remarks.append(
                f"{grown}; new rows, which start as the mean of the others: {names}"
            )
        self.facts = {
            name: self.manifest.counts.get(name, math.nan)
            for name in ("unigram_entropy", "neighbour_accuracy")
        }
        check(
            self.eval_rows > 0 and all(map(math.isfinite, self.facts.values())),
            f"data.path={cfg.data.path} has no validation sequences, or lacks {' or '.join(self.facts)}, as does "
            "data from an earlier version; prepare the data again",
        )
        self.eval_sample = eval_sample(self.eval_rows, cfg.eval_examples, seed=cfg.seed)
        self.eval_rows, self.num_shown = len(self.eval_sample), cfg.samples
        of_order = ("mlm_loss", "sop_loss", "sop_accuracy") if cfg.task.sop else ()
        self.metrics = ("loss", "perplexity", "masked_accuracy", *of_order)

    def _new_rows(self) -> dict[int, str]:
        """Return the tokens that the data's tokenizer adds to the tokenizer of the weights, by embedding row.

        Raises InputError if the tokenizers differ in any other way, or if the embeddings of added tokens are frozen.
        """
        model = self.model
        if model.pretrained is None:
            return {}
        ours = open_tokenizer(self.folder / "tokenizer")
        new = check_same_vocabulary(
            model.pretrained,
            ours.get_vocab(),
            f"model.pretrained={model.pretrained} has a different tokenizer than the data; prepare it with "
            f"tokenizer.pretrained={model.pretrained}",
            added=[token.content for token in ours.get_added_tokens_decoder().values()],
        )
        frozen = [
            f"model.{key}" for key in ("freeze_embeddings", "freeze_layers") if getattr(model, key)
        ]
        says = f"{' and '.join(frozen)}: {len(new)} added tokens need new embeddings, but the embeddings are frozen"
        check(not (new and frozen), says)
        return new

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
        return self._model(self.model, new_rows=list(self.new_rows))

    def _model(self, cfg: ModelConfig, new_rows: Sequence[int] = ()) -> MaskedLM:
        model = build_masked_lm(
            cfg, **self.fit, predicts_order=self.swapper is not None, new_rows=new_rows
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
        return (
            loss if order is None else loss + self.predictions * loss_sum(order, inputs["order"])
        )

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
        loss_sum, right, count, *of_order = rows.sum(0, dtype=np.float64).tolist()
        loss = loss_sum / count
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
            metrics |= {"loss": loss + order_loss, "mlm_loss": loss, "sop_loss": order_loss}
            metrics["sop_accuracy"] = order_right / order_count
        return metrics

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        assert isinstance(model, MaskedLM)
        return model.train_flops(self.head, seq_len)

    def describe_model(self, model: nn.Module, folder: Folder) -> None:
        assert isinstance(model, MaskedLM)
        model.describe(folder, self.files_beside(model))

    def files_beside(self, model: MaskedLM) -> dict[str, bytes]:
        return files_beside(self.folder / "tokenizer", inputs=model.inputs, state=self.state)

    def export(self, model: nn.Module, folder: Path) -> None:
        assert isinstance(model, MaskedLM)
        model.export(folder)
        for name, content in self.files_beside(model).items():
            (folder / name).write_bytes(content)

    @torch.inference_mode()
    def samples(self, export: Path, run: Folder, most: int) -> list[Sample]:
        # In these validation sequences every token to predict is masked. The model runs on the host.
        info = self.manifest.tokenizer
        drawn = self._eval_rows(None).draw(spread(self.eval_rows, most)[None])["inputs"]
        inputs = {name: tensor[0] for name, tensor in drawn.items()}
        positions, labels = inputs["positions"], inputs["labels"]
        last = positions.amax(1, keepdim=True)  # unused slots get the last position
        inputs["input_ids"].scatter_(
            1, torch.where(labels == IGNORE_INDEX, last, positions), info.mask_id
        )
        model = self._model(replace(self.model, pretrained=str(export), attention="auto")).eval()
        shares, guesses = (
            self._logits(model, inputs)[0]
            .float()
            .softmax(-1)
            .unflatten(0, labels.shape)
            .topk(MOST_GUESSES)
        )
        spelling = Spelling(
            self.folder / "tokenizer", mask_id=info.mask_id, special_ids=info.special_ids
        )
        sequences = zip(
            inputs["input_ids"].numpy(),
            map(blanks_of, positions, labels, guesses, shares),
            strict=True,
        )
        return [spelling.sample(tokens, blanks) for tokens, blanks in sequences if blanks]


TASK = MaskedLMTask


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy [] of logits [N, C] and labels [N], in float32, summed over rows with a label."""
    # When compiled, this never stores the logits in float32.
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def scores(logits: Tensor, labels: Tensor) -> Tensor:
    """Return [N, 3] for logits [N, C] and labels [N]: loss, 1 if the prediction is right, 1 if the row has a label."""
    logits = logits.float()
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    right = topk(logits)[1].squeeze(-1) == labels
    return torch.stack([losses, right.float(), (labels != IGNORE_INDEX).float()], -1)


# ---- samples: validation sequences with blanks, and what the model fills in ------------------------------------------


@dataclass(frozen=True)
class Blank:
    # the index in the sequence
    position: int
    # the hidden token
    token: int
    # tokens with their probabilities, the highest first
    guesses: list[tuple[int, float]]


def blanks_of(positions: Tensor, labels: Tensor, guesses: Tensor, shares: Tensor) -> list[Blank]:
    """Return the blanks of a sequence from its positions and tokens [P], the guesses and their probabilities [P, n]."""
    pairs = (
        list(zip(*pair, strict=True))
        for pair in zip(guesses.tolist(), shares.tolist(), strict=True)
    )
    blanks = zip(positions.tolist(), labels.tolist(), pairs, strict=True)
    return [Blank(*blank) for blank in blanks if blank[1] != IGNORE_INDEX]


class Spelling:
    """A converter of tokens to readable text, with the tokenizer of a prepared data set."""

    def __init__(self, folder: Path, *, mask_id: int, special_ids: Sequence[int]) -> None:
        self.tokenizer = open_tokenizer(folder)
        self.starts = starts_of(self.tokenizer)
        self.mask_id, self.hidden = mask_id, set(special_ids) - {mask_id}

    def piece(self, token: int) -> str:
        spelled = self.tokenizer.id_to_token(token) or f"token {token}"
        # shown, since without them it is another token
        spaces = len(spelled) - len(spelled.lstrip("▁Ġ"))
        return excerpt(SPACE * spaces + self.tokenizer.decode([token]).strip() or spelled)

    def sample(self, tokens: np.ndarray, blanks: Sequence[Blank]) -> Sample:
        """Return the part of a sequence [S] around its first blanks."""
        first = max(0, blanks[0].position - TOKENS_BEFORE)
        last = blanks[MOST_BLANKS].position if len(blanks) > MOST_BLANKS else len(tokens)
        while True:
            known = [blank for blank in blanks[:MOST_BLANKS] if blank.position < last]
            text = self.text(tokens[first:last], known)
            if len(text) <= MOST_CHARS:
                return Sample(text, [self.answer(blank) for blank in known])
            first, last = min(first + 1, blanks[0].position), last - 1

    def text(self, tokens: np.ndarray, blanks: Sequence[Blank]) -> str:
        """Return the text with its masks numbered: [1], [2], ..."""
        ids = [token for token in tokens.tolist() if token not in self.hidden]
        mask = self.tokenizer.id_to_token(self.mask_id)
        begin, *others = self.tokenizer.decode(ids, skip_special_tokens=False).split(mask)
        spaces = [" " if self.starts[blank.token] else "" for blank in blanks]
        parts = [
            f"{space}[{number}]{part}"
            for number, (space, part) in enumerate(zip(spaces, others, strict=True), 1)
        ]
        return " ".join((begin + "".join(parts)).split())

    def answer(self, blank: Blank) -> Answer:
        guesses = [Guess(self.piece(token), min(1.0, share)) for token, share in blank.guesses]
        return Answer(self.piece(blank.token), guesses, float(blank.guesses[0][0] == blank.token))
