"""The proof of a CUDA graph: from the same state, its replay leaves what the plain step leaves.

A plain step runs first. Then everything that it changed is restored, the step is recorded, and its graph is replayed.
So a step whose graph is wrong can be run again, and no proof changes what is learnt. The copies for this are on the
device if it has ample memory, otherwise on the host. They are needed until the replay has been compared, and are made
before the recording begins, so they are in no graph's memory.

While a step is recorded, its learning rate and its number of labels have other values: a graph that keeps such a
number, instead of reading it in each replay, differs from the plain step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import proxy

import torch
from torch import Tensor, nn

from train.parallel.backend import spare_device_bytes
from train.parallel.grad_sync import gradients_of
from train.parallel.nonfinite import changed_by, copies
from train.parallel.optim import set_learning_rate

if TYPE_CHECKING:
    from train.parallel.backend import State

# Largest relative differences between a replay and a plain step. Kernels add in varying order, and cuBLAS may choose
# other ones for a recording. They were not measured on a GPU.
EXACT = 1e-5  # of the loss and the norm in fp32
ROUNDED = 1e-3  # in other precisions
# Of the changes of weights and moments: AdamW divides small gradients by their size.
OF_CHANGES = 0.05
NUM_WATCHED = 9  # weights that are compared
# Larger weights are not compared, because copies of them are in host memory three times.
MOST_NUMBERS = 2**20
MOST_OF_SPARE = 0.25  # the share of the device's spare memory that copies of the state may take

# "loss", "norm", and the watched tensors by kind, in host memory
Results = dict[str, list[Tensor]]


class Before(NamedTuple):
    """The state before a step. The random state and the results are in host memory."""

    tensors: list[Tensor]
    copies: list[Tensor]
    rng: State
    loss: Tensor
    results: Results


class Proof:
    """Compares replays of an engine's graphs with plain steps."""

    def __init__(self, engine: Any) -> None:
        """Compare the steps of `engine`, a `Captured` of train/parallel/data.py, which imports this file."""
        # Without a cycle of references, device memory is freed as soon as the engine is.
        self.engine: Any = proxy(engine)
        small = [each for each in engine.parameters if each.numel() <= MOST_NUMBERS]
        candidates = small or engine.parameters
        self.watched = candidates[:: -(-len(candidates) // NUM_WATCHED)]
        limit = EXACT if engine.backend.precision == "fp32" else ROUNDED
        self.limits = {"loss": limit, "norm": limit}
        self.worst: dict[str, float] = {}  # the largest differences of graphs that were kept

    def begin(self) -> Before:
        """Return a copy of everything that a step changes. The loss begins at 0: its sum would hide differences."""
        engine = self.engine
        tensors = [*changed_by(engine.optimizer), *gradients_of(engine.parameters)]
        tensors += [engine.loss_sum, engine.norm]
        tensors += [engine.backend.skips.total, engine.backend.skips.streak]
        rng = engine.backend.rng_state()
        loss = engine.loss_sum.clone()
        before = Before(tensors, copied(tensors), rng, loss, self.results())
        engine.loss_sum.zero_()
        return before

    @torch.no_grad()
    def rewind(self, before: Before) -> None:
        """Restore the state `before`, but begin the loss at 0."""
        for tensor, copy in zip(before.tensors, before.copies, strict=True):
            tensor.copy_(copy)
        self.engine.backend.set_rng_state(before.rng)
        self.engine.loss_sum.zero_()

    def end(self, before: Before) -> None:
        """Add the losses of earlier steps to that of the proof."""
        self.engine.loss_sum += before.loss

    @contextmanager
    def other_numbers(self) -> Iterator[None]:
        """Give the step another rate and number of labels."""
        engine = self.engine
        count = engine.sync.count.clone()
        engine.sync.count += 1
        set_learning_rate(engine.optimizer, engine.lr / 2)
        try:
            yield
        finally:
            engine.sync.count.copy_(count)
            set_learning_rate(engine.optimizer, engine.lr)

    def results(self) -> Results:
        """Return what the last step left. Waits for the device."""
        engine = self.engine
        norms = [engine.norm]
        gradients = gradients_of(engine.parameters)
        if gradients:
            norms.append(nn.utils.get_total_norm(gradients))
        results = {
            "loss": on_host([engine.loss_sum]),
            "norm": on_host(norms),
            "weights": on_host(self.watched),
            "gradients": on_host(gradients_of(self.watched)),
        }
        for parameter in self.watched:
            for name, value in engine.optimizer.state[parameter].items():
                results.setdefault(name, []).extend(on_host([value]))
        return results

    def fault(self, before: Before, plain: Results) -> str:
        """Return how the replay that ran last differs from a plain step; "" if they are equal."""
        replayed = self.results()
        found: dict[str, float] = {}
        for kind, values in plain.items():
            began = before.results[kind]
            if kind in self.limits:
                began = [torch.zeros(())] * len(values)
            found[kind] = apart(replayed[kind], values, began)
        if not all(value <= self.limits.get(kind, OF_CHANGES) for kind, value in found.items()):
            return f"its replay differs from a plain step ({listed(found)})"
        self.worst = {kind: max(value, self.worst.get(kind, 0.0)) for kind, value in found.items()}
        return ""


def are_finite(results: Results) -> bool:
    return all(bool(value.isfinite()) for value in results["loss"] + results["norm"])


def listed(differences: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {value:.0e}" for kind, value in differences.items())


def copied(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies on the device if it has ample memory for them, otherwise on the host."""
    needed = sum(tensor.nbytes for tensor in tensors)
    if needed <= MOST_OF_SPARE * spare_device_bytes():
        return copies(tensors)
    return on_host(tensors)


def on_host(tensors: Sequence[Any]) -> list[Tensor]:
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


def apart(replayed: list[Tensor], plain: list[Tensor], before: list[Tensor]) -> float:
    """Return the norm of `replayed` - `plain`, relative to that of `plain` - `before`."""
    if all(map(torch.equal, replayed, plain)):
        return 0.0
    return float(distance(replayed, plain) / distance(plain, before))


def distance(some: list[Tensor], others: list[Tensor]) -> Tensor:
    parts = [(one.double() - other).norm() for one, other in zip(some, others, strict=True)]
    return torch.stack(parts).norm()
