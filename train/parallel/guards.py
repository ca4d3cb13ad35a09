"""Checks for faults that raise no error themselves, so that a run with such a fault would look healthy."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from train.config import InputError
from train.parallel.optim import parameters_of

if TYPE_CHECKING:
    from train.parallel.backend import Backend

NUM_WATCHED = 8  # number of parameters to compare
Tied = list[list[str]]  # groups of names that share a parameter


def tied_names(model: nn.Module) -> Tied:
    """Return the groups of names that share a parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, tied: Tied) -> None:
    """Make the names of each group share a parameter again: a move to XLA separates them (pytorch/xla issue 2719)."""
    for first, *others in tied:
        replace(model, dict.fromkeys(others, model.get_parameter(first)))


def replace(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Replace the parameters of a model that are in `parameters`, by name."""
    for name, parameter in parameters.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, parameter)


def check_tied(model: nn.Module, tied: Tied) -> None:
    """Raise RuntimeError if names that shared a parameter no longer do, so that each would be trained separately."""
    still_tied = tied_names(model)
    for group in tied:
        if not any(set(group) <= set(other) for other in still_tied):
            raise RuntimeError(
                f"{' and '.join(group)} no longer share a weight after the move to the device"
            )


def check_owned(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    """Raise RuntimeError unless the optimizer holds exactly the model's parameters, compared by identity.

    An optimizer built before the move to the device would update tensors that the model does not use,
    https://github.com/pytorch/xla/issues/6861.
    """
    held = set(map(id, parameters_of(optimizer)))
    wanted = set(map(id, parameters))
    if held != wanted:
        raise RuntimeError(
            f"the optimizer holds {len(held & wanted)} of the model's {len(wanted)} parameters and "
            f"{len(held - wanted)} that are not the model's; it must be built after the move to the device"
        )


def check_world(*, launched: int, device: int, group: int, ones: float) -> None:
    """Raise RuntimeError unless launcher, device runtime, process group and a sum of ones agree on the rank count.

    Otherwise each rank may train a separate model, https://github.com/pytorch/xla/issues/5438.
    """
    if not launched == device == group == ones:
        raise RuntimeError(
            f"the launcher started {launched} ranks, the device runtime sees {device}, the process group {group}, and "
            f"ones summed over the ranks give {ones:g}: they would train apart. Start the run with torchrun, one rank "
            "per core, and see baretrain doctor"
        )


def check_distinct_seeds(seeds: Sequence[int]) -> None:
    """Raise RuntimeError if two ranks would draw the same dropout masks."""
    # An XLA device has the same initial seed in every process, https://github.com/pytorch/xla/issues/2092.
    if len(set(seeds)) != len(seeds):
        raise RuntimeError(
            f"ranks share random states {sorted(seeds)[:8]}: their dropout would be the same"
        )


def smallest(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return a few parameters that are cheap to compare: biases and normalisation weights."""
    return sorted(parameters, key=lambda parameter: parameter.numel())[:NUM_WATCHED]


def check_same(backend: Backend, model: nn.Module, weights: list[nn.Parameter]) -> None:
    """Raise RuntimeError on rank 0 unless each of these weights is equal on all ranks that hold it."""
    names = {weight: name for name, weight in model.named_parameters()}
    copies = zip(weights, backend.to_host(weights), strict=True)
    sums = backend.world.gather(
        {names[weight]: float(copy.double().sum()) for weight, copy in copies}
    )
    for name in {name for own in sums for name in own}:
        first, *ranks = (rank for rank, own in enumerate(sums) if name in own)
        others = [rank for rank in ranks if sums[rank][name] != sums[first][name]]
        if others:
            raise RuntimeError(
                f"ranks {others[:8]} have different weights from rank {first} ({name}): they read different files at "
                "the start, or a reduction of gradients did not reach them"
            )


def check_changed(before: Sequence[Tensor], after: Iterable[Tensor], *, step: str) -> None:
    """Raise RuntimeError if no value changed: the update went to other tensors or was never run."""
    if all(torch.equal(old, new) for old, new in zip(before, after, strict=True)):
        raise RuntimeError(
            f"{step} changed no weights: the gradient is 0 everywhere, the learning rate is too small for the "
            "precision, or the update did not reach the model"
        )


def watch_masks(model: nn.Module) -> None:
    """Make a model reject attention masks that are not floats [batch, 1, 1 or S, S].

    The outermost modules that accept a mask check it. transformers reads the values of a [batch, S] mask in every
    forward pass, so the host waits for the device and each kind of batch needs another graph. Eager attention adds a
    4-D boolean mask to the scores as 0 and 1, which hides nothing.
    """
    for module in outermost(model, "attention_mask"):
        module.register_forward_pre_hook(reject_other_masks, with_kwargs=True)


def reject_other_masks(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    mask = (
        inspect.signature(module.forward)
        .bind_partial(*args, **kwargs)
        .arguments.get("attention_mask")
    )
    if mask is not None and not (mask.ndim == 4 and mask.is_floating_point()):
        raise InputError(
            f"{type(module).__name__} was given an attention mask {list(mask.shape)} of {mask.dtype}; on XLA it must "
            "be a float mask [batch, 1, 1, seq], 0 at tokens and -1e4 at padding"
        )


def outermost(model: nn.Module, argument: str) -> Iterator[nn.Module]:
    """Yield the modules whose forward has this argument, but not the modules inside them."""
    if argument in inspect.signature(model.forward).parameters:
        yield model
        return
    for child in model.children():
        yield from outermost(child, argument)
