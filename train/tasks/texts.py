"""The sizes of the model and of the batches, for tasks that read texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from train.config import InputError, ModelConfig, RecordsConfig, TrainConfig, check
from train.data.records.table_facts import MOST_GRAPHS, STEP, best_lengths
from train.data.shards.cache import cache_dir
from train.models.encoder import fitting_config, model_config, most_positions
from train.models.network import READING_PADDING
from train.models.source import resolved, task_tokenizer
from train.models.unpadded import can_leave_out_padding
from train.parallel.backends import compiles_each_length, is_cuda, name_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

    from train.data.records.tables import Tables

MOST_TOKENS = 512  # tokens; the limit if seq_len is not set: few texts are longer, and attention over them is slow
MOST_PADDING = 0.1  # the share of padding in a batch's tokens that data.lengths=auto accepts
MOST_LENGTHS = 128  # the limit on the number of batch lengths without compilation
# The tokens that take as long as what each further pass costs, where layers read padding: on CPUs measured
# (benchmarks/notes.md), on other devices estimated from launching kernels, and not run on hardware.
CPU_PASS, DEVICE_PASS = 150, 2048
# Where layers read no padding, a micro batch has about so many tokens at most. It bounds the memory that they keep for
# the backward pass; more passes than needed for that would only take time.
CPU_TOKENS = 4096
EAGER_STEP = 8  # tokens; without compilation, lengths are multiples of this: on CPUs, bf16 is slower with others


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model to be built, its tokenizer, and the lengths that batches are padded to."""

    # its weights and tokenizer are on this machine or on the Hub
    model: ModelConfig
    tokenizer: PreTrainedTokenizerFast
    # tokens; longer texts are cut
    seq_len: int
    # tokens, ascending; set when the data is opened
    lengths: tuple[int, ...] = ()

    @staticmethod
    def of(cfg: TrainConfig) -> Sizes:
        """Return the sizes of a run. Raises InputError if model, tokenizer and lengths contradict one another."""
        assert isinstance(cfg.data, RecordsConfig)
        model = resolved(cfg.model, cfg.s3, cache_dir(cfg.data))
        sizes = Sizes.read(model, cfg.seq_len, most=MOST_TOKENS)
        fitting_config(model, **sizes.fit)
        if cfg.data.lengths != "auto":
            lengths_up_to(sizes.seq_len, cfg.data.lengths)
        return sizes

    @staticmethod
    def read(model: ModelConfig, seq_len: int | None, *, most: int | None = None) -> Sizes:
        """Return sizes without lengths. If `seq_len` is None, the smaller of `most` and the model's limit is used.

        Raises InputError if the tokenizer is unusable.
        """
        sizes = Sizes(model, task_tokenizer(model), 0)
        limits = [limit for limit in (most_positions(sizes.config), most) if limit]
        if not (seq_len or limits):
            raise InputError(
                f"{sizes.config.model_type} does not limit the sequence length: set seq_len"
            )
        return replace(sizes, seq_len=seq_len or min(limits))

    @property
    def config(self) -> PreTrainedConfig:
        """Return transformers' configuration of the encoder. Raises InputError if there is none."""
        return model_config(
            self.model, vocab_size=len(self.tokenizer), pad_id=self.tokenizer.pad_token_id
        )

    @property
    def has_one_length(self) -> bool:
        """True if all rows are padded to `seq_len`, because the architecture reads padding."""
        return self.config.model_type in READING_PADDING

    def note(self) -> str:
        """Return a sentence about an architecture whose answer to a row could depend on other rows, else ""."""
        if not self.has_one_length:
            return ""
        return (
            f"{self.config.model_type} reads padding, so every row is padded to seq_len={self.seq_len} (data.lengths "
            'is not used), in predictions too; in transformers, use padding="max_length" and '
            f"max_length={self.seq_len}"
        )

    @property
    def fit(self) -> dict[str, int]:
        """The size arguments of the functions in train.models.heads."""
        return {
            "vocab_size": len(self.tokenizer),
            "pad_id": self.tokenizer.pad_token_id,
            "seq_len": self.seq_len,
        }


def resolved_lengths(
    cfg: TrainConfig, tables: Tables, sizes: Sizes, *, shortest: int
) -> tuple[int, ...]:
    """Return the lengths in tokens, from `shortest` to that of `sizes`, to which a run pads its batches."""
    assert isinstance(cfg.data, RecordsConfig)
    seq_len = sizes.seq_len
    if sizes.has_one_length:
        return (seq_len,)
    is_compiled = compiles_each_length(cfg.backend, cfg.instance)
    longest = max(
        int(tables.lengths(split).max(initial=shortest)) for split in tables.facts["splits"]
    )
    step = eager_step(longest)
    most = MOST_LENGTHS
    if is_compiled:
        step = STEP
        most = MOST_GRAPHS
    longest = min(-(-longest // step) * step, seq_len)
    if cfg.data.lengths == [] and not is_compiled:
        return every_length(shortest, longest)
    if cfg.data.lengths != "auto":
        return lengths_up_to(cfg.seq_len or max([longest, *cfg.data.lengths]), cfg.data.lengths)
    rows = tables.lengths(next(iter(tables.facts["splits"])))  # training rows, if there are any
    return tuple(
        best_lengths(
            rows,
            longest,
            most,
            step=step,
            shortest=shortest,
            enough=MOST_PADDING,
        )
    )


def every_length(shortest: int, longest: int) -> tuple[int, ...]:
    """Return the multiples of `eager_step` from `shortest`, up to `longest`, which is the last length."""
    step = eager_step(longest)
    return (*range(-(-min(shortest, longest) // step) * step, longest, step), longest)


def reads_no_padding(cfg: TrainConfig, sizes: Sizes) -> bool:
    """Return whether the layers of a run's model read batches without padding (train.models.unpadded)."""
    place = cfg.backend, cfg.instance
    is_eager_cpu = not is_cuda(*place) and not compiles_each_length(*place)
    return is_eager_cpu and can_leave_out_padding(sizes.config)


def pass_cost(cfg: TrainConfig) -> int:
    """Return how many tokens take as long as what one more micro batch costs on this run's device."""
    place = cfg.backend, cfg.instance
    if name_of(*place) == "ddp" and not is_cuda(*place):
        return CPU_PASS
    return DEVICE_PASS


def eager_step(longest: int) -> int:
    """Return the tokens between lengths without compilation, so that there are at most MOST_LENGTHS up to `longest`."""
    return EAGER_STEP * max(1, -(-longest // (EAGER_STEP * MOST_LENGTHS)))


def lengths_up_to(seq_len: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return `lengths` with seq_len as the last length. Raises InputError if a length is above seq_len."""
    longest = max(lengths, default=0)
    check(longest <= seq_len, f"data.lengths has {longest}, which is more than seq_len={seq_len}")
    return (*(length for length in lengths if length < seq_len), seq_len)
