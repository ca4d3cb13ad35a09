"""The door between a task and its prepared data: raw rows in, rows of tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NUMBER, NUMBERS = datasets.Value("int32"), datasets.List(datasets.Value("int32"))
COLUMNS = {
    "input_ids": NUMBERS,  # with special tokens, without padding, at most seq_len
    "second_at": NUMBER,  # the first token of segment 1; the length where there is none
    "length": NUMBER,
    "row": NUMBER,  # the raw row's number
}
FEATURES = {
    "classify": {**COLUMNS, "label": datasets.Value("int64")},
    "qa": {
        **COLUMNS,
        "start": NUMBER,  # tokens that the answer begins and ends with; 0, which is [CLS], where this window has none
        "end": NUMBER,
        "context_first": NUMBER,  # the context's tokens in this window: from here
        "context_end": NUMBER,  # to before here
        "offsets": NUMBERS,  # of each of them: where it begins and ends, in characters of the context
    },
}


class Featurizer(Protocol):
    """What a task makes of raw rows. `settings` is all that decides it: seq_len, and whatever else, JSON's types."""

    kind: str  # of FEATURES
    settings: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast

    def features(self, rows: dict[str, list], indices: list[int], *, split: str) -> dict[str, list]:
        """The columns FEATURES[kind] of a batch of raw rows with these numbers; more or fewer rows than it got."""

    def notes(self, split: str) -> dict[str, float]:
        """What `features` counted: truncated, ..."""
