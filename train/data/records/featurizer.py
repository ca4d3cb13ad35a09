"""The base class of the tasks' converters from text rows to token rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from train.data.records.kinds import TOKENS
from train.storage.imported import code_of

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedTokenizerFast

    from train.data.records.kinds import RowKind


class Featurizer(ABC):
    """A task's converter from text rows to token rows. It uses a fast tokenizer, and counts lost and unknown tokens.

    A special token's name in a text, such as "[SEP]", counts as plain text. If the tokenizer encodes it as the special
    token anyway, the unknown token replaces it.
    """

    kind: RowKind

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int, **settings: Any
    ) -> None:
        """Store the tokenizer. `settings`: everything else that determines the token rows, as JSON values."""
        self.tokenizer = tokenizer
        self.settings: dict[str, Any] = {
            "version": 1,
            "seq_len": seq_len,
            **settings,
            **code_of(type(self)),
        }
        names = ("cls", "sep", "pad", "mask")
        reserved = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
        unknown = tokenizer.unk_token_id
        self.labels: Sequence[str] = ()  # label names by id; empty until they are known
        self.stand_ins: dict[int, int] = {}
        if unknown is not None:
            self.stand_ins = dict.fromkeys(reserved, unknown)
        self._notes: dict[str, Counter[str]] = {}
        # [rows] tokens cut off at seq_len, in the latest batch
        self.tokens_cut = np.zeros(0, np.int64)

    @property
    def types(self) -> dict[str, Any]:
        """Return the columns of a token row, with their types."""
        return TOKENS | self.kind.tokens

    @abstractmethod
    def features(
        self, rows: dict[str, list], indices: list[int], *, split: str
    ) -> dict[str, list]:
        """Return the columns of the token rows made from `rows` (any number per row). `indices`: the rows' indices."""
        # If the rows lack a column, such as the target in new rows, its values are 0.

    def encode(self, *texts: list[str] | None, **options: Any) -> BatchEncoding:
        return self.tokenizer(
            *texts,
            max_length=self.settings["seq_len"],
            split_special_tokens=True,
            verbose=False,
            **options,
        )

    def encode_fast(self, first: list[str], second: list[str] | None = None) -> list[Encoding]:
        """Return encodings without offsets in half the time of `encode`; of a pair, the longer text is cut."""
        fast = self.tokenizer.backend_tokenizer
        side = self.tokenizer.truncation_side
        fast.enable_truncation(self.settings["seq_len"], strategy="longest_first", direction=side)
        fast.encode_special_tokens = True
        texts: Any = first
        if second is not None:
            texts = list(zip(first, second, strict=True))
        encodings: list[Encoding] = fast.encode_batch_fast(texts)
        return encodings

    def count_cut(
        self, split: str, encodings: Sequence[Encoding], *texts: list[str] | None
    ) -> None:
        """Count the truncated rows and the tokens they lost. `texts`: one list per segment; None: no such segment."""
        cut = [number for number, encoding in enumerate(encodings) if encoding.overflowing]
        self.tokens_cut = np.zeros(len(encodings), np.int64)
        if cut:
            parts = [[part[number] for number in cut] for part in texts if part is not None]
            whole = self.tokenizer(*parts, split_special_tokens=True, verbose=False).encodings
            lost = [
                len(one.ids) - len(encodings[number].ids)
                for number, one in zip(cut, whole, strict=True)
            ]
            self.tokens_cut[cut] = lost
        self.count(split, truncated=len(cut), tokens_cut=int(self.tokens_cut.sum()))

    def columns(
        self, split: str, encodings: Sequence[Encoding], rows: Sequence[int]
    ) -> dict[str, list]:
        """Return the columns TOKENS for encodings of the rows at indices `rows`, and count unknown tokens."""
        # Each access to an attribute of an encoding makes a new list.
        ids = [encoding.ids for encoding in encodings]
        masks = [encoding.special_tokens_mask for encoding in encodings]
        tokens = np.fromiter(chain.from_iterable(ids), np.int32)
        is_special = np.fromiter(chain.from_iterable(masks), bool)
        unknown = int((tokens == self.tokenizer.unk_token_id).sum())
        text_tokens = int((~is_special).sum())
        self.count(split, unknown_tokens=unknown, text_tokens=text_tokens)
        is_reserved = np.isin(tokens, list(self.stand_ins))
        if (is_reserved & ~is_special).any():
            ids = list(map(self.ids, encodings))
        return {
            "input_ids": ids,
            "second_at": [second_at(encoding) for encoding in encodings],
            "length": list(map(len, ids)),
            "row": list(rows),
        }

    def ids(self, encoding: Encoding) -> list[int]:
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [
            token if is_special else self.stand_ins.get(token, token)
            for token, is_special in pairs
        ]

    def count(self, split: str, **numbers: int) -> None:
        self._notes.setdefault(split, Counter()).update(numbers)

    def notes(self, split: str) -> dict[str, float]:
        """Return the counts of a split: truncated, tokens_cut, unknown_tokens, text_tokens, and the task's counts."""
        return {name: float(number) for name, number in self._notes.get(split, Counter()).items()}


def second_at(encoding: Encoding) -> int:
    """Return the index of segment 1's first token; the length if there is no segment 1, as in RoBERTa."""
    segments = encoding.type_ids
    if 1 in segments:
        return segments.index(1)
    return len(segments)
