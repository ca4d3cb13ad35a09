"""An encoder's layers as a chain that pipelines cut into parts. A part is a range of consecutive layers.

The forward pass of transformers runs unchanged, including masks, positions and heads. Layers outside the current part
return their input, and an exception ends the pass after the part's last layer. No architecture needs special code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from train.config import check
from train.models.network import ADDING, CHOOSING, PROJECTIONS, Network, repeated_layers

# architectures whose parts are compared with the whole network in tests
KNOWN = (*ADDING, *CHOOSING, "modernbert")


class Reached(Exception):
    """An exception that ends the forward pass after a part's last layer and carries the hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class Chain:
    """The layers of a network in the order in which they run, and the modules before and after them."""

    def __init__(self, model: Network) -> None:
        """Find the layers. Raises InputError if the architecture is not in KNOWN or has a convolution in a layer."""
        self.network = network = model.network
        base, config = network.base_model, network.config
        check(
            config.model_type in KNOWN,
            f"parallel=pipeline supports {', '.join(KNOWN)}, but not {config.model_type}; set parallel=data",
        )
        width = getattr(config, "conv_kernel_size", 0)
        check(
            not width,
            f"parallel=pipeline cannot cut a {config.model_type} with conv_kernel_size={width}: the convolution runs "
            "in parallel with the first layer; set parallel=data",
        )
        # Layers return (hidden states, attention weights).
        self.gives_pairs = config.model_type in CHOOSING
        groups = repeated_layers(base)
        # ALBERT applies each of its groups several times
        is_shared = hasattr(config, "num_hidden_groups")
        if is_shared:
            depth = config.num_hidden_layers
        else:
            depth = len(groups)
        self.layers = [groups[index * len(groups) // depth] for index in range(depth)]
        projections = [
            module for name, module in base.named_modules() if name.split(".")[-1] in PROJECTIONS
        ]
        self.before: list[nn.Module] = [base.embeddings, *projections]
        heads = [module for module in network.children() if module is not base]
        self.after: list[nn.Module] = [
            module for module in (*heads, getattr(base, "pooler", None)) if module
        ]
        # With legacy=False, DeBERTa's head reads the token embedding.
        if not getattr(config, "legacy", True):
            self.after.append(base.get_input_embeddings())
        self.head_share = model.head_share
        self.part, self.position = range(depth), 0
        self.received: Tensor | None = None

    # ---- parameters and cost of a part -----------------------------------------------------------------------------

    def users(self, parts: Sequence[range]) -> dict[nn.Parameter, set[int]]:
        """Return, for each parameter of the network, the indices of the parts that use it."""
        last = len(parts) - 1
        users: dict[nn.Parameter, set[int]] = {}
        pieces = [
            (self.before, 0),
            *((self.layers[part.start : part.stop], i) for i, part in enumerate(parts)),
        ]
        for modules, number in [*pieces, (self.after, last)]:
            for parameter in (
                parameter for module in modules for parameter in module.parameters()
            ):
                users.setdefault(parameter, set()).add(number)
        # Parameters outside all modules above (relative positions, norms after the last layer) are in every part.
        everywhere = {parameter: set(range(len(parts))) for parameter in self.network.parameters()}
        return everywhere | users

    def cut(self, num_parts: int) -> list[range]:
        """Cut the layers into `num_parts` non-empty parts so that the most expensive part costs as little as possible.

        The cost is the number of multiplications per token, except attention's, which is the same in each layer.
        """
        before, after = products(self.before), products(self.after) * self.head_share
        costs = [products([layer]) for layer in self.layers]
        costs[0], costs[-1] = costs[0] + before, costs[-1] + after
        depth = len(costs)
        # best[n]: cost of the most expensive part of the first n layers, and the parts' ends
        best = {0: (0.0, [0])}
        for number in range(1, num_parts + 1):
            best = {
                end: min(
                    (max(most, sum(costs[start:end])), [*ends, end])
                    for start, (most, ends) in best.items()
                    if start < end
                )
                for end in range(number, depth - num_parts + number + 1)
            }
        ends = best[depth][1]
        return [range(start, end) for start, end in pairwise(ends)]

    # ---- forward passes --------------------------------------------------------------------------------------------

    def divide(self) -> None:
        """Make the network run only the layers of the part given to `run`. Call this after the move to the device."""
        for module in self.before:
            module.forward = self._before(module.forward)
        for layer in dict.fromkeys(self.layers):
            layer.forward = self._layer(layer.forward)

    def run(self, part: range, received: Tensor | None, call: Callable[[], Tensor]) -> Tensor:
        """Run `part`; `call` must call the model. Return the hidden states [B, S, H] after the part's last layer.

        If the part contains the network's last layer, return the result of `call` instead. `received` is the input of
        the part's first layer, or None if that is the network's first layer.
        """
        self.part, self.received, self.position = part, received, 0
        try:
            return call()
        except Reached as reached:
            return reached.hidden
        finally:
            self.received = None

    def _before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.received is None:
                return forward(*args, **kwargs)
            return self.received  # This rank does not hold the embeddings.

        return run

    def _layer(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            position = self.position
            self.position += 1
            if position < self.part.start:
                if self.gives_pairs:
                    return (hidden, None)
                return hidden
            if position == self.part.start and self.received is not None:
                hidden = self.received
            output = forward(hidden, *args, **kwargs)
            if position + 1 == self.part.stop < len(self.layers):
                raise Reached(output[0] if self.gives_pairs else output)
            return output

        return run


def products(modules: Sequence[nn.Module]) -> float:
    """Return the number of multiplications per token: one per element of a matrix, none for an embedding table."""
    inner = (
        module
        for outer in modules
        for module in outer.modules()
        if not isinstance(module, nn.Embedding)
    )
    return float(
        sum(
            weight.numel()
            for module in inner
            for weight in module.parameters(recurse=False)
            if weight.ndim > 1
        )
    )
