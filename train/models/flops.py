"""Floating point operations of a training step, true to the architecture.

A multiply-add counts 2, the backward pass twice the forward one.

H hidden, I feed-forward, L layers executed (shared or not), E embedding, V vocabulary, S sequence, P predictions.
"""

from __future__ import annotations

from transformers import PreTrainedConfig

BERT_LIKE = ("bert", "roberta", "xlm-roberta", "camembert")


def train_flops_per_sequence(config: PreTrainedConfig, *, seq_len: int, predictions: int) -> float | None:
    """FLOPs to train on one sequence; None for an architecture whose formula is not known here.

    The usual 6 x parameters is 8.5 times too low for ALBERT-base, whose layers share their parameters but not their
    work. Checked against torch.utils.flop_counter in the tests.
    """
    if config.model_type not in ("albert", *BERT_LIKE):
        return None
    hidden, ffn, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    encoder = config.num_hidden_layers * (6 * (4 * hidden**2 + 2 * hidden * ffn) + 12 * seq_len * hidden)
    if config.model_type == "albert":
        embedding = config.embedding_size
        return seq_len * (encoder + 6 * embedding * hidden) + predictions * 6 * embedding * (hidden + vocab)
    return seq_len * encoder + predictions * 6 * hidden * (hidden + vocab)
