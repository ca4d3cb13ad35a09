"""Encoders whose layers read the tokens of a batch without its padding. In them, only attention reads padded rows.

All other operations of a layer treat each token by itself, so that padding would only take time. ModernBERT is trained
like this (https://arxiv.org/abs/2412.13663, section 2.1.2).

Shapes: B sequences, S tokens with padding, T tokens of a batch without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

# T is a multiple of this: oneDNN prepares its kernels anew for each number of rows, and keeps about 1,000 of them
MULTIPLE = 32
PREFIX = "unpadded_"
ATTENTION = {"eager": eager_attention_forward, "sdpa": ALL_ATTENTION_FUNCTIONS["sdpa"]}


class Padding:
    """The places of a batch's tokens among its padding. `real` [B, S] is 1 at tokens and 0 at padding."""

    def __init__(self, real: Tensor) -> None:
        self.shape = real.shape
        self.places = real.flatten().nonzero().flatten()  # int64
        extra = -len(self.places) % MULTIPLE
        # the first is read again, so that T is a multiple
        self.read = torch.cat([self.places, self.places[:1].expand(extra)])

    @property
    def is_worth_it(self) -> bool:
        """True if the layers have fewer tokens to read without padding."""
        return 0 < len(self.read) < self.shape.numel()

    def left_out(self, rows: Tensor) -> Tensor:
        """Return [1, T, ...], the tokens of `rows` [B, S, ...]."""
        return rows.flatten(0, 1).index_select(0, self.read)[None]

    def put_back(self, tokens: Tensor) -> Tensor:
        """Return rows [B, S, ...] of `tokens` [1, T, ...], with zeros as padding."""
        tokens = tokens[0, : len(self.places)]
        rows = tokens.new_zeros(self.shape.numel(), *tokens.shape[1:])
        return rows.index_copy(0, self.places, tokens).unflatten(0, self.shape)


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
    """Call `attention` of transformers with padded rows. `query`, `key` and `value` are [1, heads, T, head size]."""
    if padding is None:
        return attention(module, query, key, value, mask, **options)
    rows = []
    for tokens in (query, key, value):
        rows.append(padding.put_back(tokens.transpose(1, 2)).transpose(1, 2))
    output, scores = attention(module, *rows, mask, **options)
    return padding.left_out(output), scores


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
