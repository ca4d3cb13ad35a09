"""A bare encoder with its training step, compiled as one graph: the upper bound in `benchmarks.gpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 64  # width of an attention head
POSITIONS = 512


class Norm(nn.LayerNorm):
    """A norm that computes in fp32 and returns bf16, so that sums with its results are bf16 too."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            normed = F.layer_norm(
                input.float(), self.normalized_shape, self.weight, self.bias, self.eps
            )
        return normed.bfloat16()


class Layer(nn.Module):
    """A layer of BERT without dropout, with one matrix product for queries, keys and values."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // HEAD)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)
        self.norm = Norm(hidden)
        self.last_norm = Norm(hidden)

    def forward(self, states: Tensor) -> Tensor:
        """Return the layer's output [B, S, H] for hidden states [B, S, H]."""
        qkv = self.qkv(states).unflatten(-1, (3, self.heads, -1))
        qkv = qkv.permute(2, 0, 3, 1, 4)  # [3, B, heads, S, HEAD]
        attended = F.scaled_dot_product_attention(*qkv.unbind())
        attended = attended.transpose(1, 2).flatten(2)
        states = self.norm(states + self.out(attended))
        wide = F.gelu(self.up(states), approximate="tanh")
        return self.last_norm(states + self.down(wide))


class BareEncoder(nn.Module):
    """A masked language model built from `Layer`; with `shares`, all depths use one layer, as in ALBERT."""

    def __init__(
        self, *, vocab_size: int, hidden: int, embedding: int, layers: int, shares: bool
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, embedding)
        self.places = nn.Embedding(POSITIONS, embedding)
        self.norm = Norm(embedding)
        self.project = nn.Linear(embedding, hidden)
        shared = Layer(hidden)
        self.layers = nn.ModuleList([shared if shares else Layer(hidden) for _ in range(layers)])
        self.back = nn.Linear(hidden, embedding)
        self.last_norm = Norm(embedding)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of `labels` [B, P] at `positions` [B, P] of sequences `ids` [B, S]."""
        embedded = self.words(ids) + self.places.weight[: ids.size(1)]
        states = self.project(self.norm(embedded))
        for layer in self.layers:
            states = layer(states)
        chosen = positions[..., None].expand(-1, -1, states.size(-1))
        states = states.gather(1, chosen)
        states = self.last_norm(F.gelu(self.back(states), approximate="tanh"))
        logits = F.linear(states, self.words.weight, self.bias)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def bare_step(
    model: BareEncoder, batches: list[tuple[Tensor, ...]], *, compiler: str
) -> Callable[[], Tensor]:
    """Return a function that takes a training step in bf16 on the next batch. Batches must be on the device."""
    device = batches[0][0].device.type
    compiled: Any = torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    taken = iter(range(1 << 62))

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss: Tensor = compiled(*batches[next(taken) % len(batches)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
