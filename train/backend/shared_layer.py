"""A layer that is applied many times, as a loop on the device: it is compiled once instead of for each application.

ALBERT shares one layer over its whole depth. Unrolled, its graph and the time to compile it grow with the depth; as a
loop they do not. Only the input of each application is kept, from which the backward loop computes the layer again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Scan = Callable[..., Any]  # scan(body, carry, xs, reverse=False) -> (carry, ys); body(carry, x) -> (carry, y)


def scanned(layer: nn.Module, depth: int, scan: Scan, *, device_type: str) -> Callable[[Tensor, Tensor | None], Tensor]:
    """A function (hidden [B, S, H], float mask or None) -> hidden that applies `layer` `depth` times.

    The layer must not draw random numbers: the backward loop would draw others.
    """
    names = [name for name, _ in layer.named_parameters()]

    def apply_layer(weights: list[Tensor], hidden: Tensor, mask: Tensor | None) -> Tensor:
        output: Tensor = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (hidden, mask))
        return output

    class Repeated(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device_type)
        def forward(ctx: Any, hidden: Tensor, mask: Tensor | None, *parameters: Tensor) -> Tensor:
            weights, counter = as_values(parameters), torch.zeros(depth, device=hidden.device)

            def body(carry: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                return apply_layer(weights, carry, mask) + x.to(carry.dtype), carry

            output, inputs = scan(body, hidden, counter)
            ctx.save_for_backward(inputs, mask, *parameters)
            result: Tensor = output
            return result

        @staticmethod
        @torch.amp.custom_bwd(device_type=device_type)
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
            inputs, mask, *parameters = ctx.saved_tensors
            weights = as_values(parameters)

            def body(carry: Any, hidden: Tensor) -> tuple[Any, None]:
                grad, sums = carry
                with torch.enable_grad():
                    hidden = hidden.detach().requires_grad_()
                    leaves = [weight.detach().requires_grad_() for weight in weights]
                    own = torch.autograd.grad(apply_layer(leaves, hidden, mask), [hidden, *leaves], grad)
                return (own[0], [a + b for a, b in zip(sums, own[1:], strict=True)]), None

            start = (grads[0], [torch.zeros_like(parameter) for parameter in parameters])
            (grad, sums), _ = scan(body, start, inputs, reverse=True)
            return grad, None, *sums

    def run(hidden: Tensor, mask: Tensor | None) -> Tensor:
        if torch.is_autocast_enabled(device_type):
            hidden = hidden.float()  # as the layer's output is under autocast: the carry of a loop keeps its type
        output: Tensor = Repeated.apply(hidden, mask, *layer.parameters())
        return output

    return run


def as_values(parameters: Any) -> list[Tensor]:
    """The weights as results of an operation that the compiler removes. If the weights themselves were passed, the
    loop's first graph would differ from all later ones, which hold transposes of updated weights, and everything would
    be compiled twice.
    """
    return [parameter.detach() * 1 for parameter in parameters]
