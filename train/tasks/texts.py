"""What the tasks that read texts share: the sizes of model and batches, and token ids from a fast tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from train.backend import compiles_each_length, is_cuda
from train.config import InputError, ModelConfig, RecordsConfig, TrainConfig, check
from train.data.records.table_facts import MOST_GRAPHS, STEP, best_lengths
from train.data.shards.cache import cache_dir
from train.data.text.coverage import drops, num_dropped
from train.models.encoder import fitting_config, model_config, most_positions
from train.models.source import resolved, task_tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import BatchEncoding, PreTrainedConfig, PreTrainedTokenizerFast

    from train.data.records.tables import Tables

MOST_TOKENS = 512  # of a sequence where seq_len is not set; attention over more costs much, and few texts need it
MOST_PADDING = 0.1  # share of the tokens computed that data.lengths=auto accepts
MOST_LENGTHS = 128  # different lengths of batches that are not compiled
EAGER_CPU_STEP = 8  # tokens; kernels of GPUs prefer multiples of STEP


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that is to be built, its tokenizer, and the lengths that batches are padded to."""

    model: ModelConfig  # its weights and tokenizer are on this machine or at the Hub
    tokenizer: PreTrainedTokenizerFast
    seq_len: int  # tokens after which texts are cut
    lengths: tuple[int, ...] = ()  # tokens, rising; known with the data

    @staticmethod
    def of(cfg: TrainConfig) -> Sizes:
        """Return the sizes of a run. Raises InputError if model, tokenizer and lengths do not go together."""
        assert isinstance(cfg.data, RecordsConfig)
        model = resolved(cfg.model, cfg.s3, cache_dir(cfg.data))
        sizes = Sizes.read(model, cfg.seq_len, most=MOST_TOKENS)
        fitting_config(model, **sizes.fit)
        if cfg.data.lengths != "auto":
            lengths_up_to(sizes.seq_len, cfg.data.lengths)
        return sizes

    @staticmethod
    def read(model: ModelConfig, seq_len: int | None, *, most: int | None = None) -> Sizes:
        """Return sizes without lengths, with `seq_len`, or else all that the model can read, up to `most`. Raises
        InputError for a bad tokenizer.
        """
        sizes = Sizes(model, task_tokenizer(model), 0)
        limits = [limit for limit in (most_positions(sizes.config), most) if limit]
        if not (seq_len or limits):
            raise InputError(f"{sizes.config.model_type} sets no longest sequence: set seq_len")
        return replace(sizes, seq_len=seq_len or min(limits))

    @property
    def config(self) -> PreTrainedConfig:
        """transformers' configuration of the encoder. InputError if there is none."""
        return model_config(self.model, vocab_size=len(self.tokenizer), pad_id=self.tokenizer.pad_token_id)

    @property
    def fit(self) -> dict[str, int]:
        """The arguments of the functions of train.models.heads."""
        return {"vocab_size": len(self.tokenizer), "pad_id": self.tokenizer.pad_token_id, "seq_len": self.seq_len}


def resolved_lengths(cfg: TrainConfig, tables: Tables, *, seq_len: int, shortest: int) -> tuple[int, ...]:
    """Return the lengths that the batches of a run are padded to: a function of its data, settings and kind of device.

    `seq_len`: tokens after which texts are cut. `shortest`: the least that batches may have.
    """
    assert isinstance(cfg.data, RecordsConfig)
    is_compiled = compiles_each_length(cfg.backend, cfg.instance)
    step = STEP if is_compiled or is_cuda(cfg.backend, cfg.instance) else EAGER_CPU_STEP
    longest = max(int(tables.lengths(split).max(initial=shortest)) for split in tables.facts["splits"])
    longest = min(-(-longest // step) * step, seq_len)
    if cfg.data.lengths != "auto":
        return lengths_up_to(cfg.seq_len or max([longest, *cfg.data.lengths]), cfg.data.lengths)
    if not is_compiled:
        step = max(step, -(-longest // MOST_LENGTHS))
    most = MOST_GRAPHS if is_compiled else MOST_LENGTHS
    rows = tables.lengths("train")
    return tuple(best_lengths(rows, longest, most, step=step, shortest=shortest, enough=MOST_PADDING))


def lengths_up_to(seq_len: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return `lengths` and seq_len as the last one. Raises InputError if one is longer."""
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
        self.dropping: Tokenizer | None = None  # a copy that cuts no text, if it drops what it does not know
        if drops(tokenizer.backend_tokenizer):
            self.dropping = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self.dropping.no_truncation()
        self.missed = np.zeros(2, np.int64)  # characters that it dropped of whole texts, and these with the tokens left
        self.tokens_cut = np.zeros(0, np.int64)  # of the rows that were read last: tokens behind seq_len

    def encode(self, *texts: list[str] | None, **options: Any) -> BatchEncoding:
        for part in texts if self.dropping else ():
            assert self.dropping is not None
            whole = [each if isinstance(each, str) else " ".join(each) for each in part or ()]  # a text, or its words
            encodings = self.dropping.encode_batch(whole, add_special_tokens=False)
            missing = num_dropped(whole, encodings)
            self.missed += missing, missing + sum(map(len, encodings))
        return self.tokenizer(
            *texts, max_length=self.settings["seq_len"], split_special_tokens=True, verbose=False, **options
        )

    def count_cut(self, split: str, encodings: Sequence[Encoding], *texts: list[str] | None) -> None:
        """Count the rows that were cut and the tokens they lost. `encodings` are of `texts`, one list for each part."""
        cut = [number for number, encoding in enumerate(encodings) if encoding.overflowing]
        self.tokens_cut = np.zeros(len(encodings), np.int64)
        if cut:
            parts = [[part[number] for number in cut] for part in texts if part is not None]
            whole = self.tokenizer(*parts, split_special_tokens=True, verbose=False).encodings
            lost = [len(one.ids) - len(encodings[number].ids) for number, one in zip(cut, whole, strict=True)]
            self.tokens_cut[cut] = lost
        self.count(split, truncated=len(cut), tokens_cut=int(self.tokens_cut.sum()))

    def columns(self, split: str, encodings: Sequence[Encoding], rows: Sequence[int]) -> dict[str, list]:
        """TOKENS, of encodings that were made of these rows. Unknown tokens are counted."""
        unknown = sum(encoding.ids.count(self.tokenizer.unk_token_id) for encoding in encodings)
        text_tokens = sum(len(encoding.ids) - sum(encoding.special_tokens_mask) for encoding in encodings)
        if self.dropping is not None:
            unknown, text_tokens = self.missed.tolist()
            self.missed[:] = 0
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
