"""Floating point operations of a training step, by the model's architecture.

A multiply-add counts as 2 operations, the backward pass as twice the forward pass.

H hidden, I feed-forward, L layers executed (shared or not), E embedding, V vocabulary, S sequence, P predictions,
C labels. No torch here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from train.models.model_sizes import Shape

BERT_LIKE = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")


def train_flops_per_sequence(
    config: PreTrainedConfig | Shape,
    *,
    seq_len: int,
    predictions: int = 0,
    labels: int = 0,
    has_spans: bool = False,
    frozen: int = 0,
) -> float | None:
    """FLOPs to train on one sequence; None for an architecture without a formula here.

    The head predicts tokens at `predictions` positions, or one of `labels` (a dense layer and a classifier on one
    token), or spans (two scores a token). The lowest `frozen` layers have no backward pass.

    The usual 6 x parameters is 8.5 times too low for ALBERT-base, whose layers share their parameters but not their
    work. Checked against torch.utils.flop_counter in the tests.
    """
    if config.model_type not in ("albert", *BERT_LIKE):
        return None
    hidden, vocab = config.hidden_size, config.vocab_size
    ffn = config.hidden_dim if config.model_type == "distilbert" else config.intermediate_size
    layer = 6 * (4 * hidden**2 + 2 * hidden * ffn) + 12 * seq_len * hidden
    encoder = (config.num_hidden_layers - frozen * 2 / 3) * layer
    embedding = config.embedding_size if config.model_type == "albert" else hidden
    projection = 6 * embedding * hidden if config.model_type == "albert" else 0
    tokens = predictions * 6 * embedding * (hidden + vocab)
    label = 6 * hidden * (hidden + labels) if labels else 0
    spans = seq_len * 6 * hidden * 2 if has_spans else 0
    return seq_len * (encoder + projection) + tokens + label + spans
