"""A measure of how well a tokenizer fits a text: the share of unknown tokens."""

from __future__ import annotations

from train.config import InputError

MOST_UNKNOWN = 0.01  # share of unknown tokens above which to warn
TOO_MANY_UNKNOWN = 0.3  # share of unknown tokens above which to reject
CURE = (
    "choose a tokenizer that knows the text's characters, or, if the text itself contains its unknown token, such as "
    "<unk>, replace that in the text"
)


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
