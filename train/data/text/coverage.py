"""Measures of how well a tokenizer fits a text: what its normalisation loses, and the share of unknown tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING
from unicodedata import normalize

from tokenizers import Tokenizer

from train.config import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_UNKNOWN = 0.01  # share of unknown tokens above which to warn
TOO_MANY_UNKNOWN = 0.3  # share of unknown tokens above which to reject
MOST_CHANGED = 0.01  # maximum share of characters that normalisation may change without a warning
MOST_SAMPLES, SAMPLED_CHARS = 1024, 256
SHOWN_CHARS = 40  # maximum characters of an example in a message
CURE = (
    "choose a tokenizer that knows the text's characters, or, if the text itself contains its unknown token, such as "
    "<unk>, replace that in the text"
)


class TextSample:
    """An evenly spaced sample of all texts seen: at most MOST_SAMPLES excerpts of SAMPLED_CHARS characters."""

    def __init__(self) -> None:
        self.excerpts: list[str] = []
        self.seen = 0
        self.every = 1

    def watched(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts, and sample them."""
        for text in texts:
            for start in range(0, len(text), SAMPLED_CHARS):
                if self.seen % self.every == 0:
                    self.excerpts.append(text[start : start + SAMPLED_CHARS])
                self.seen += 1
                if len(self.excerpts) == MOST_SAMPLES:
                    self.excerpts = self.excerpts[::2]
                    self.every *= 2
            yield text

    def take(self, texts: Iterable[str]) -> None:
        """Sample texts without yielding them."""
        for _ in self.watched(texts):
            pass


def changed_by(tokenizer: Tokenizer, texts: Iterable[str]) -> str:
    """Return a phrase about characters that normalisation changes other than in case, as accents; "" if few are."""
    if tokenizer.normalizer is None:
        return ""
    num_chars = 0
    num_changed = 0
    examples: Counter[tuple[str, str]] = Counter()
    words = Counter(word for text in texts for word in text.split())
    for word, times in words.items():
        # A different Unicode form (NFC, NFD) does not count as a change, nor does ▁, which replaces a space.
        before = normalize("NFC", word)
        after = normalize("NFC", re.sub(r"[\s▁]", "", tokenizer.normalizer.normalize_str(word)))
        changed = (Counter(before.lower()) - Counter(after.lower())).total() * times
        num_chars += len(before) * times
        num_changed += changed
        if changed:
            examples[before[:SHOWN_CHARS], after[:SHOWN_CHARS]] += times
    if num_changed <= MOST_CHANGED * num_chars:
        return ""
    (old, new), _ = examples.most_common(1)[0]
    return f"{num_changed / num_chars:.1%} of the characters: {old} becomes {new}"


def unknown_share(
    unknown: float, tokens: float, reads: str, most: float = TOO_MANY_UNKNOWN
) -> str:
    """Return a sentence about the share of unknown tokens; it is a warning if the share is above MOST_UNKNOWN.

    Raises InputError if the share is above `most`. `reads`: how the sentence begins, such as "tokenizer x reads y".
    """
    if tokens:
        share = unknown / tokens
    else:
        share = 0.0
    text = f"{reads} with {share:.2%} unknown tokens"
    if share > most:
        raise InputError(f"{text}, too many to learn from; {CURE}")
    if share > MOST_UNKNOWN:
        return f"warning: {text}; {CURE}"
    return text


def unknown_of(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[int, int]:
    """Return the count of unknown tokens in texts, and the count of all tokens."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ids = Counter(token for encoding in encodings for token in encoding.ids)
    unknown = 0
    if tokenizer.unk_token_id is not None:
        unknown = ids[tokenizer.unk_token_id]
    return unknown, ids.total()
