"""What featurizers share: token ids from the encodings of a fast tokenizer."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerFast


class TextFeaturizer:
    """Token ids from the encodings of a fast tokenizer, and counts of what was done to the texts of each split.

    "[SEP]" in a text is text. If the vocabulary has such a piece nevertheless, it becomes the unknown token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        names = ("cls", "sep", "pad", "mask")
        reserved = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
        unknown = tokenizer.unk_token_id
        self.stand_ins: dict[int, int] = {} if unknown is None else dict.fromkeys(reserved, unknown)
        self._notes: dict[str, Counter[str]] = {}

    def ids(self, encoding: Encoding) -> list[int]:
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token if is_special else self.stand_ins.get(token, token) for token, is_special in pairs]

    def count(self, split: str, **numbers: int) -> None:
        self._notes.setdefault(split, Counter()).update(numbers)

    def notes(self, split: str) -> dict[str, float]:
        return {name: float(number) for name, number in self._notes.get(split, Counter()).items()}


def second_at(encoding: Encoding) -> int:
    """The first token of segment 1; the length if the tokenizer (RoBERTa's) has no segments or the text is single."""
    segments = encoding.type_ids
    return segments.index(1) if 1 in segments else len(segments)
