"""Sequences of one length from the tokens of documents, without padding; only the last partial sequence is lost.

A sequence is `[CLS] A [SEP] B [SEP]`: two stretches of text. If a document ends inside a sequence, B begins
with the next document (further document ends keep their [SEP]). If none ends, A and B are consecutive text of one
document, split at a word start, so that a sentence-order objective can swap them. This is RoBERTa's full-sentences
packing (https://arxiv.org/abs/1907.11692, section 4.2) with ALBERT's two segments.

Shapes: R sequences of S tokens, of which N = S - 3 are text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from train.data.random_bits import hash_uniform
from train.data.shards.format import Rows


@dataclass
class Packer:
    """A stream of documents that become sequences. The result does not depend on how calls divide the stream."""

    seq_len: int
    cls_id: int
    sep_id: int
    word_start: np.ndarray  # [vocab] bool
    seed: int
    dtype: np.dtype
    next_row: int = 0  # index of the next sequence, which seeds the choice of where A ends
    # tokens not yet in a sequence
    stream: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> Rows:
        """Append documents, and return the sequences that are now full.

        `tokens` int32: all documents' tokens, concatenated, without special tokens. `lengths` int64: one per document.
        Documents without a token are left out.
        """
        ends = np.cumsum(lengths[lengths > 0])
        stream = np.concatenate([self.stream, np.insert(tokens, ends, self.sep_id)])
        starts, cuts, at_end, used = self._cut(stream)
        self.stream = stream[used:]
        return self._assemble(stream, starts, cuts, at_end)

    def _cut(self, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Cut the stream into sequences.

        Returns the start of each, the place in it of the document end nearest its middle, whether that is inside the
        sequence, and the number of tokens used.
        """
        length = self.seq_len - 3
        ends = np.flatnonzero(stream == self.sep_id)
        # The document that is not yet complete ends beyond all sequences, so that each position has a next end.
        ends = np.append(ends, len(stream) + length)
        list_of_ends = ends.tolist()
        starts = []
        position = 0
        number = 0
        while position + length + 1 <= len(stream):
            number = bisect_left(list_of_ends, position, number)
            next_end = list_of_ends[number]
            if next_end == position:  # the document ended with the previous sequence
                position += 1
                continue
            starts.append(position)
            position += length
            if next_end < position:  # its separator is the middle one of the sequence
                position += 1
        first = np.array(starts, np.int64)
        cuts = nearest(ends, first + length // 2) - first
        at_end = (cuts > 0) & (cuts < length)
        return first, cuts, at_end, position

    def _assemble(
        self, stream: np.ndarray, starts: np.ndarray, cuts: np.ndarray, at_end: np.ndarray
    ) -> Rows:
        num_rows = len(starts)
        length = self.seq_len - 3
        tokens = np.empty((num_rows, self.seq_len), self.dtype)
        if num_rows == 0:
            return Rows(tokens, np.empty(0, np.uint16), np.empty(0, np.uint8))
        # Positions of text tokens and the middle [SEP], from the start of A.
        offset = np.arange(length + 1)
        places = starts[:, None] + offset
        text = stream[np.minimum(places, len(stream) - 1)]
        rows = self.next_row + np.arange(num_rows)
        shares = hash_uniform(self.seed, rows[:, None], 0)[:, 0]
        drawn = 1 + (shares * (length - 1)).astype(np.int64)
        is_start = self.word_start[text]
        is_start &= offset >= drawn[:, None]
        is_start &= offset < length
        drawn = np.where(is_start.any(1), is_start.argmax(1), drawn)
        cuts = np.where(at_end, cuts, drawn)
        # In a sequence without a document end, the middle [SEP] is inserted, so the tokens after it move by one.
        is_inserted = ~at_end[:, None]
        moved = is_inserted & (offset > cuts[:, None])
        body = stream[places - moved]
        body[np.arange(num_rows), cuts] = self.sep_id
        tokens[:, 0] = self.cls_id
        tokens[:, 1:-1] = body
        tokens[:, -1] = self.sep_id
        self.next_row += num_rows
        pivot = (cuts + 2).astype(np.uint16)
        same_document = (~at_end).astype(np.uint8)
        return Rows(tokens, pivot, same_document)


def nearest(values: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the nearest of ascending `values` for each of `targets`; the lower one of two that are equally near."""
    after = np.searchsorted(values, targets).clip(max=len(values) - 1)
    before = (after - 1).clip(min=0)
    is_before = targets - values[before] <= values[after] - targets
    return np.where(is_before, values[before], values[after])
