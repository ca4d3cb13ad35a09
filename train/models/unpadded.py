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
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

# T is a multiple of this: oneDNN prepares its kernels anew for each number of rows, and keeps about 1,000 of them
MULTIPLE = 32
# So many pairs of tokens, of which one is padding, take as long as one more group: 2**12 to 2**17 were tried
# (benchmarks/notes.md).
GROUP_PAIRS = 2**15
STEP = 8  # tokens; with multiples of this, products are faster
PREFIX = "unpadded_"
ATTENTION = {"eager": eager_attention_forward, "sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"]}


class Padding:
    """The places of a batch's tokens among its padding.

    `real` [B, S] is 1 at tokens and 0 at padding, which follows a row's tokens.
    """

    def __init__(self, real: Tensor) -> None:
        self.shape = real.shape
        self.lengths = real.sum(1)  # [B] int64
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
        lengths = padding.lengths
        _, most = padding.shape
        starts = lengths.cumsum(0) - lengths  # of each row, among the tokens
        order = lengths.argsort(stable=True)
        self.rows = order.split(similar_rows(lengths[order].tolist()))
        self.shapes = []  # of each group: its rows, and the tokens of each
        read = []
        is_token = []
        for rows in self.rows:
            longest = int(lengths[rows[-1]])
            size = min(-(-max(longest, 1) // STEP) * STEP, most)
            self.shapes.append((len(rows), size))
            position = torch.arange(size)
            read.append((starts[rows, None] + position).flatten())
            is_token.append((position < lengths[rows, None]).flatten())
        # [P]: the token at each place; padding has any token, for a mask hides it
        self.read = torch.cat(read).clamp_(max=len(padding.places) - 1)
        found = torch.cat(is_token).nonzero().flatten()
        # [T]: the place of each token
        self.place = torch.empty_like(padding.read)
        self.place[self.read[found]] = found
        self.place[len(padding.places) :] = self.place[0]

    def of(self, tokens: Tensor) -> list[Tensor]:
        """Return for each group [rows, heads, tokens, head size] of `tokens` [1, heads, T, head size]."""
        padded = tokens[0].transpose(0, 1).index_select(0, self.read)
        parts = padded.split([rows * size for rows, size in self.shapes])
        return [
            part.unflatten(0, shape).transpose(1, 2)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def masks(self, mask: Tensor) -> list[Tensor]:
        """Return the mask of each group, of the rows' `mask` [B, 1, 1, S]."""
        groups = zip(self.rows, self.shapes, strict=True)
        return [mask[rows, ..., :size] for rows, (_, size) in groups]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [1, T, heads, head size] of each group's [rows, tokens, heads, head size]."""
        padded = torch.cat([part.flatten(0, 1) for part in parts])
        return padded.index_select(0, self.place)[None]


def similar_rows(lengths: Sequence[int]) -> list[int]:
    """Return of how many rows each group consists, for ascending `lengths`.

    The numbers are powers of two, so that products have few different shapes.
    """
    pairs = [length**2 for length in lengths]
    groups: list[int] = []
    stop = len(lengths)
    while stop:
        rows = 1
        while 2 * rows <= stop:
            added = pairs[stop - 2 * rows : stop]
            if len(added) * added[-1] - sum(added) > GROUP_PAIRS:
                break
            rows *= 2
        groups.insert(0, rows)
        stop -= rows
    return groups


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

    `query`, `key` and `value` are [1, heads, T, head size], `mask` [B, 1, 1, S].
    """
    if padding is None:
        return attention(module, query, key, value, mask, **options)
    assert mask is not None
    groups = padding.groups
    inputs = (groups.of(query), groups.of(key), groups.of(value), groups.masks(mask))
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
