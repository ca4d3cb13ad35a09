"""Masked language modelling: its settings and its entry in the table of tasks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from train.config import HeadSize, ShardsConfig, TaskConfig, setting
from train.tasks.spec import LOSS, Metric, TaskSpec


@dataclass(kw_only=True)
class MLMConfig(TaskConfig):
    """Masked language modelling, with n-grams and sentence order as in ALBERT (https://arxiv.org/abs/1909.11942)."""

    learns_from: ClassVar[type[ShardsConfig]] = ShardsConfig
    kind: str = "mlm"
    # The share of a sequence's tokens to predict.
    mask_rate: float = setting(0.15, above=0, below=1)
    # The mask_rate in evaluations; None uses mask_rate.
    eval_mask_rate: float | None = setting(None, above=0, below=1)
    # The maximum number of consecutive tokens (or whole words) that are masked together; runs of n have a probability
    # proportional to 1/n. A maximum of 1 is BERT's masking.
    max_ngram: int = setting(3, above=0)
    # Mask whole words instead of tokens.
    whole_word: bool = False
    # Also predict the order of two segments. The two losses have the same weight.
    sop: bool = False

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        predictions = max(1, round(seq_len * self.mask_rate))
        rate = self.eval_mask_rate
        in_evaluation = predictions if rate is None else max(1, round(seq_len * rate))
        return HeadSize(
            predictions=predictions, eval_predictions=in_evaluation, labels=2 if self.sop else 0
        )


SPEC = TaskSpec(
    settings=MLMConfig,
    module="train.tasks.mlm.task",
    head="MaskedLM",
    metrics=(
        # With sentence-order prediction, "loss" is the sum of "mlm_loss" and "sop_loss".
        *(replace(LOSS, name=name, hub_name="loss") for name in ("mlm_loss", "loss", "sop_loss")),
        Metric("perplexity", higher_is_better=False),
        *(Metric(name, hub_name="accuracy") for name in ("masked_accuracy", "sop_accuracy")),
    ),
    pipeline="fill-mask",
    sentence="It fills in masked tokens, and is a starting point for fine-tuning.",
    example='f"It fills in {pipe.tokenizer.mask_token} tokens."',
    card_settings=(("Masked tokens", "task.mask_rate"),),
)
