"""Sentence-order prediction: the two segments of a sequence in their order, or swapped, for the model to tell which.

ALBERT (https://arxiv.org/abs/1909.11942, section 3.1) swaps every second pair; here each epoch draws it afresh.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from train.data.batches.masking import IGNORE_INDEX
from train.data.random_bits import hash_uniform

ORDER = 4  # the random number of a sequence, beside those of train.data.batches.masking


@dataclass(frozen=True)
class Swapper:
    """Swaps segments as a function of (seed, epoch, sequence)."""

    seed: int

    def __call__(
        self, tokens: np.ndarray, pivot: np.ndarray, same_document: np.ndarray, epochs: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of `tokens` [B, S], `[CLS] A [SEP] B [SEP]` with B from index `pivot` [B], about half become
        `[CLS] B [SEP] A [SEP]`. Returns tokens, pivots, and labels [B] int64: 0 in order, 1 swapped, and IGNORE_INDEX
        where the order means nothing, since A and B are not from one document (`same_document` [B] is 0).
        """
        seq_len = tokens.shape[1]
        pivot = pivot.astype(np.int64)
        has_order = same_document.astype(bool) & (pivot > 2) & (pivot < seq_len - 1)  # neither segment is empty
        swaps = has_order & (hash_uniform(self.seed, epochs, rows, 0, ORDER) < 0.5)
        index, swapped_pivot = np.arange(seq_len), seq_len + 1 - pivot
        first = index[None] < swapped_pivot[:, None]  # [CLS] B [SEP]
        source = index + np.where(first, pivot[:, None] - 1, 1 - swapped_pivot[:, None])
        source[:, 0], source[:, -1] = 0, seq_len - 1
        separator = swapped_pivot - 1
        source[swaps, separator[swaps]] = pivot[swaps] - 1
        source = np.where(swaps[:, None], source, index)
        labels = np.where(has_order, swaps, IGNORE_INDEX).astype(np.int64)
        return np.take_along_axis(tokens, source, 1), np.where(swaps, swapped_pivot, pivot), labels
