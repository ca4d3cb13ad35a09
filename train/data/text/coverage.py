"""A measure of how well a tokenizer fits a text: the share of unknown tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from train.config import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_UNKNOWN = 0.01  # share of unknown tokens above which to warn
TOO_MANY_UNKNOWN = 0.3  # share of unknown tokens above which to reject
MOST_SAMPLES, SAMPLED_CHARS = 4096, 256
CURE = (
    "choose a tokenizer that knows the text's characters, or, if the text itself contains its unknown token, such as "
    "<unk>, replace that in the text"
)


class UnusableText(InputError):
    """An error raised if the settings cannot turn the text into a data set. Neither a retry nor another part helps."""


class Sample:
    """An evenly spaced sample of all texts seen: at most MOST_SAMPLES pieces of SAMPLED_CHARS characters."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.seen = 0
        self.every = 1

    def watched(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts, and sample them."""
        for text in texts:
            for start in range(0, len(text), SAMPLED_CHARS):
                if self.seen % self.every == 0:
                    self.pieces.append(text[start : start + SAMPLED_CHARS])
                self.seen += 1
                if len(self.pieces) == MOST_SAMPLES:
                    self.pieces = self.pieces[::2]
                    self.every *= 2
            yield text

    def take(self, texts: Iterable[str]) -> None:
        """Sample texts without yielding them."""
        for _ in self.watched(texts):
            pass


def unknown_share(
    unknown: float, tokens: float, reads: str, most: float = TOO_MANY_UNKNOWN
) -> str:
    """Return a sentence about the share of unknown tokens; it is a warning if the share is above MOST_UNKNOWN.

    Raises UnusableText if the share is above `most`. `reads`: how the sentence begins, such as "tokenizer x reads y".
    """
    if tokens:
        share = unknown / tokens
    else:
        share = 0.0
    text = f"{reads} with {share:.2%} unknown tokens"
    if share > most:
        raise UnusableText(f"{text}, too many to learn from; {CURE}")
    if share > MOST_UNKNOWN:
        return f"warning: {text}; {CURE}"
    return text


def unknown_of(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> tuple[int, int]:
    """Return the count of unknown tokens in texts, and the count of all tokens."""
    encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    unknown = sum(encoding.ids.count(tokenizer.unk_token_id) for encoding in encodings)
    return unknown, sum(map(len, encodings))
