"""What the tasks that read texts share: the sizes of model and batches, and token ids from a fast tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from train.config import InputError, ModelConfig, RecordsConfig, TrainConfig, check
from train.data.shards.cache import cache_dir
from train.models.encoder import fitting_config, model_config, most_positions
from train.models.source import resolved, task_tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedConfig, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that is to be built, its tokenizer, and the lengths that batches are padded to."""

    model: ModelConfig  # its weights and tokenizer are on this machine or at the Hub
    tokenizer: PreTrainedTokenizerFast
    lengths: tuple[int, ...]  # tokens, rising

    @staticmethod
    def of(cfg: TrainConfig) -> Sizes:
        """InputError if model, tokenizer and lengths do not go together."""
        assert isinstance(cfg.data, RecordsConfig)
        model = resolved(cfg.model, cfg.s3, cache_dir(cfg.data))
        sizes = Sizes.read(model, cfg.seq_len)
        fitting_config(model, **sizes.fit)
        return replace(sizes, lengths=lengths_up_to(sizes.seq_len, cfg.data.lengths))

    @staticmethod
    def read(model: ModelConfig, seq_len: int | None) -> Sizes:
        """Sizes with one length: `seq_len`, or all that the model can read. InputError for a bad tokenizer."""
        sizes = Sizes(model, task_tokenizer(model), ())
        longest = seq_len or most_positions(sizes.config)
        if not longest:
            raise InputError(f"{sizes.config.model_type} sets no longest sequence: set seq_len")
        return replace(sizes, lengths=(longest,))

    @property
    def seq_len(self) -> int:
        return self.lengths[-1]

    @property
    def config(self) -> PreTrainedConfig:
        """transformers' configuration of the encoder. InputError if there is none."""
        return model_config(self.model, vocab_size=len(self.tokenizer), pad_id=self.tokenizer.pad_token_id)

    @property
    def fit(self) -> dict[str, int]:
        """The arguments of the functions of train.models.heads."""
        return {"vocab_size": len(self.tokenizer), "pad_id": self.tokenizer.pad_token_id, "seq_len": self.seq_len}


def lengths_up_to(seq_len: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """`lengths` and seq_len as the last one. InputError if one is longer."""
    longest = max(lengths, default=0)
    check(longest <= seq_len, f"data.lengths has {longest}, which is more than seq_len={seq_len}")
    return (*(length for length in lengths if length < seq_len), seq_len)


# ---- tokens --------------------------------------------------------------------------------------------------------


class TextFeaturizer:
    """Token ids from the encodings of a fast tokenizer, and counts of what was done to the texts of each split.

    "[SEP]" in a text is text. If the vocabulary has such a piece nevertheless, it becomes the unknown token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, seq_len: int, **settings: Any) -> None:
        self.tokenizer = tokenizer
        self.settings: dict[str, Any] = {"version": 1, "seq_len": seq_len, **settings}
        names = ("cls", "sep", "pad", "mask")
        reserved = {getattr(tokenizer, f"{name}_token_id") for name in names} - {None}
        unknown = tokenizer.unk_token_id
        self.stand_ins: dict[int, int] = {} if unknown is None else dict.fromkeys(reserved, unknown)
        self._notes: dict[str, Counter[str]] = {}

    def encode(self, *texts: list[str] | None, **options: Any) -> BatchEncoding:
        return self.tokenizer(
            *texts, max_length=self.settings["seq_len"], split_special_tokens=True, verbose=False, **options
        )

    def columns(self, split: str, encodings: Sequence[Encoding], rows: Sequence[int]) -> dict[str, list]:
        """TOKENS, of encodings that were made of these rows. Unknown tokens are counted."""
        unknown = sum(encoding.ids.count(self.tokenizer.unk_token_id) for encoding in encodings)
        text_tokens = sum(len(encoding.ids) - sum(encoding.special_tokens_mask) for encoding in encodings)
        self.count(split, unknown_tokens=unknown, text_tokens=text_tokens)
        return {
            "input_ids": [self.ids(encoding) for encoding in encodings],
            "second_at": [second_at(encoding) for encoding in encodings],
            "length": [len(encoding.ids) for encoding in encodings],
            "row": list(rows),
        }

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
