"""Encoders whose layers read the tokens of a batch without its padding. In them, only attention reads padded rows.

All other operations of a layer treat each token by itself, so that padding would only take time. ModernBERT is trained
like this (https://arxiv.org/abs/2412.13663, section 2.1.2). Attention reads rows in groups of similar lengths, each
padded to its longest row.

Shapes: B sequences, S tokens with padding, T tokens of a batch without padding, P tokens of all padded groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

from train.models.network import ADDING, HIDDEN

# T is a multiple of this: oneDNN prepares its kernels anew for each number of rows, and keeps about 1,000 of them
MULTIPLE = 32
# So many pairs of tokens, of which one is padding, take as long as one more group. With MiniLM, 2**13 and 2**17 were no
# faster (benchmarks/notes.md).
GROUP_PAIRS = 2**15
STEP = 8  # tokens; with multiples of this, products are faster
PREFIX = "unpadded_"
ATTENTION = {"eager": eager_attention_forward, "sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"]}


class Padding:
    """The places of a batch's tokens among its padding.

    `real` [B, S] is 1 at tokens and 0 at padding. `dtype` is that of the masks that hide padding.
    """

    def __init__(self, real: Tensor, dtype: torch.dtype) -> None:
        self.shape = real.shape
        self.dtype = dtype
        self.lengths = real.count_nonzero(1)  # [B] int64
        self.places = real.flatten().nonzero().flatten()  # int64
        extra = -len(self.places) % MULTIPLE
        # the first is read again, so that T is a multiple
        self.read = torch.cat([self.places, self.places[:1].expand(extra)])

    @property
    def is_worth_it(self) -> bool:
        """True if the layers have fewer tokens to read without padding."""
        return 0 < len(self.read) < self.shape.numel()

    @cached_property
    def groups(self) -> Groups:
        """The groups in which attention reads the rows. All layers share them."""
        return Groups(self)

    def left_out(self, rows: Tensor) -> Tensor:
        """Return [1, T, ...], the tokens of `rows` [B, S, ...]."""
        return rows.flatten(0, 1).index_select(0, self.read)[None]

    def put_back(self, tokens: Tensor) -> Tensor:
        """Return rows [B, S, ...] of `tokens` [1, T, ...], with zeros as padding."""
        tokens = tokens[0, : len(self.places)]
        rows = tokens.new_zeros(self.shape.numel(), *tokens.shape[1:])
        return rows.index_copy(0, self.places, tokens).unflatten(0, self.shape)


class Groups:
    """The rows of a batch, sorted by length, in groups that are padded to their longest row."""

    def __init__(self, padding: Padding) -> None:
        lengths, order = padding.lengths.sort(stable=True)
        first_tokens = (padding.lengths.cumsum(0) - padding.lengths)[order]
        sizes = similar_rows(lengths.tolist())
        self.shapes = []  # of each group: its rows, and the tokens of each
        self.masks = []  # of each group, [rows, 1, 1, tokens]: added to the scores of attention
        tokens = []
        is_token = []
        for group, firsts in zip(lengths.split(sizes), first_tokens.split(sizes), strict=True):
            longest = max(int(group[-1]), 1)
            position = torch.arange(-(-longest // STEP) * STEP)
            is_real = position < group[:, None]
            self.shapes.append(is_real.shape)
            self.masks.append((~is_real * HIDDEN).to(padding.dtype)[:, None, None])
            tokens.append((firsts[:, None] + position).flatten())
            is_token.append(is_real.flatten())
        # [P]; padding has the number of any token, for the mask hides it
        self.token_of_place = torch.cat(tokens).clamp_(max=len(padding.places) - 1)
        filled = torch.cat(is_token).nonzero().flatten()
        self.place_of_token = torch.empty_like(padding.read)  # [T]
        self.place_of_token[self.token_of_place[filled]] = filled
        self.place_of_token[len(padding.places) :] = self.place_of_token[0]

    def of(self, tokens: Tensor) -> list[Tensor]:
        """Return for each group [rows, heads, tokens, head size] of `tokens` [1, heads, T, head size]."""
        padded = tokens[0].transpose(0, 1).index_select(0, self.token_of_place)
        parts = padded.split([shape.numel() for shape in self.shapes])
        return [
            part.unflatten(0, shape).transpose(1, 2)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [1, T, heads, head size] of each group's [rows, tokens, heads, head size]."""
        padded = torch.cat([part.flatten(0, 1) for part in parts])
        return padded.index_select(0, self.place_of_token)[None]


def similar_rows(lengths: Sequence[int]) -> list[int]:
    """Return of how many rows each group consists, for ascending `lengths`.

    The numbers are powers of two, but for the first, so that products have few different shapes.
    """
    pairs = [length**2 for length in lengths]
    groups: list[int] = []
    stop = len(lengths)
    while stop:
        rows = 1
        while rows < stop:
            start = max(stop - 2 * rows, 0)
            needed = pairs[start:stop]
            if len(needed) * needed[-1] - sum(needed) > GROUP_PAIRS:
                break
            rows = len(needed)
        groups.insert(0, rows)
        stop -= rows
    return groups


def can_leave_out_padding(config: PreTrainedConfig) -> bool:
    """Return whether transformers' layers of this configuration can read a batch without padding."""
    # chunks have a length that may not divide T
    in_chunks = getattr(config, "chunk_size_feed_forward", 0)
    return config.model_type in ADDING and not in_chunks


def leave_out_padding(network: PreTrainedModel, encoder: nn.Module) -> None:
    """Let `network` take a `padding` argument: that of a batch that the layers in `encoder` read without it.

    All layers must hand this argument on to attention, which must be one of ATTENTION.
    """
    kind = network.config._attn_implementation.removeprefix(PREFIX)
    name = PREFIX + kind
    ALL_ATTENTION_FUNCTIONS.register(name, partial(attend, ATTENTION[kind]))
    network.set_attn_implementation(name)
    encoder.register_forward_pre_hook(_enter, with_kwargs=True)
    encoder.register_forward_hook(_leave, with_kwargs=True)


def attend(
    attention: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    padding: Padding | None = None,
    **options: Any,
) -> Any:
    """Call `attention` of transformers with each group of rows.

    `query`, `key` and `value` are [1, heads, T, head size].
    """
    if padding is None:
        return attention(module, query, key, value, mask, **options)
    groups = padding.groups
    inputs = (groups.of(query), groups.of(key), groups.of(value), groups.masks)
    outputs = [attention(module, *group, **options)[0] for group in zip(*inputs, strict=True)]
    return groups.joined(outputs), None


def _enter(_encoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Replace the hidden states [B, S, H] that the layers are given by those of tokens, [1, T, H]."""
    padding = options.get("padding")
    if padding is None:
        return None
    if not args:  # DistilBERT's are named
        hidden = padding.left_out(options["hidden_states"])
        return (), {**options, "hidden_states": hidden}
    hidden, *others = args
    return (padding.left_out(hidden), *others), options


def _leave(_encoder: nn.Module, _args: Any, options: Mapping[str, Any], output: Any) -> Any:
    """Replace the hidden states [1, T, H] that the layers return by those of rows, [B, S, H]."""
    padding = options.get("padding")
    if padding is not None:
        output["last_hidden_state"] = padding.put_back(output.last_hidden_state)
    return output
