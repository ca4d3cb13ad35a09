"""Baselines for a language model: predictions from the token counts of its corpus."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import load

from train.data.shards.manifest import Shard, TokenizerInfo
from train.storage.folders import Folder

# tokens read from each split's first shard, which takes seconds for a corpus of any size
MOST_TOKENS = 2**22


def unigram_entropy(counts: np.ndarray, info: TokenizerInfo) -> float:
    """Return the entropy of token counts [vocab] in nats per token, without special tokens, which are never masked."""
    predicted = np.delete(counts, info.special_ids)
    share = predicted[predicted > 0] / max(1, predicted.sum())
    entropy = -(share * np.log(share)).sum()
    return round(float(entropy), 6)


def neighbour_accuracy(
    folder: Folder, splits: dict[str, list[Shard]], info: TokenizerInfo
) -> float:
    """Return the share of validation tokens that a table of neighbours predicts correctly.

    The table predicts the token that is most frequent in training data between the same two tokens, else after the same
    token, else anywhere. It sees both neighbours, even where a model would see a mask.
    """
    train = first_tokens(folder, splits["train"][0])
    validation = first_tokens(folder, splits["validation"][0])
    left, token, right = neighbours(train, info)
    before, truth, after = neighbours(validation, info)
    if not len(truth) or not len(token):
        return 0.0
    size = info.vocab_size
    guess = np.full(len(truth), np.bincount(token).argmax())
    both = left * size + right
    wanted_both = before * size + after
    for keys, wanted in ((left, before), (both, wanted_both)):
        known, best = most_frequent(keys, token, size)
        place = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        is_known = known[place] == wanted
        guess = np.where(is_known, best[place], guess)
    share = float((guess == truth).mean())
    return round(share, 6)


def neighbours(rows: np.ndarray, info: TokenizerInfo) -> list[np.ndarray]:
    """Return, for each token of `rows` that is not special: the token before it, itself, and the token after it."""
    left = rows[:, :-2]
    token = rows[:, 1:-1]
    right = rows[:, 2:]
    kept = ~np.isin(token, info.special_ids)
    return [left[kept], token[kept], right[kept]]


def first_tokens(folder: Folder, shard: Shard) -> np.ndarray:
    """Return the first sequences [rows, seq_len] of a shard, int64."""
    tokens = load(folder.read(shard.file))["tokens"]
    return tokens[: max(1, MOST_TOKENS // tokens.shape[1])].astype(np.int64)


def most_frequent(
    keys: np.ndarray, tokens: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct `keys` [n], ascending, and the most frequent token of each; in a tie, the lowest token."""
    pairs, counts = np.unique(keys * vocab_size + tokens, return_counts=True)
    order = np.lexsort((-pairs, counts, pairs // vocab_size))
    pairs = pairs[order]
    is_last = np.diff(pairs // vocab_size, append=-1) != 0
    best = pairs[is_last]
    return best // vocab_size, best % vocab_size
