"""The differences between two checkpoints: settings, progress and each tensor, compared on the host."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.checkpoints.loader import fitting, read_optimizer, read_weights
from train.checkpoints.manifest import Manifest
from train.checkpoints.staging import named
from train.config import flatten
from train.system.identity import differences


class Difference(NamedTuple):
    name: str
    is_equal: bool  # whether all bits are equal
    largest: float = 0.0  # the largest absolute difference; NaN if either number is NaN
    relative: float = 0.0  # norm of the difference / norm of the first tensor; infinite if they cannot be compared
    fault: str = ""  # why the tensors cannot be compared

    def __str__(self) -> str:
        text = f"relative {self.relative:.3g}, largest {self.largest:.3g}"
        return f"  {self.name}: {'equal' if self.is_equal else self.fault or text}"


def compare(manifests: Sequence[Manifest], folders: Sequence[Path], *, limit: int | None) -> Iterator[str]:
    """Yield lines that compare two verified steps. `limit` is the number of tensors shown per file; None shows all."""
    yield f"step {manifests[0].step} -> step {manifests[1].step}"
    names = ("identity", "settings", "progress", "versions")
    tables = {name: [vars(manifest)[name] for manifest in manifests] for name in names}
    tables["written by"] = [
        {"ranks": each.world_size, "backend": each.backend, "lease": each.fence} for each in manifests
    ]
    for name, (before, now) in tables.items():
        lines = differences(dict(flatten(before)), dict(flatten(now)))
        yield f"{name}: {'differs' if lines else 'the same'}"
        yield from (f"  {line}" for line in lines)
    num_different = 0
    for content, read in (("weights", read_weights), ("moments", read_optimizer)):
        states: list[Mapping[str, Any]] = []
        for folder, manifest in zip(folders, manifests, strict=True):
            with fitting(folder):
                states.append(read(folder, manifest))
        tensors = differences_of(*states)
        different = [each for each in tensors if not each.is_equal]
        num_different += len(different)
        yield f"{content}: {len(different)} of {len(tensors)} tensors differ"
        shown = tensors if limit is None else different[:limit]
        yield from map(str, shown)
        if len(different) > len(shown):
            yield f"  and {len(different) - len(shown)} more (--all)"
    yield "weights and moments differ" if num_different else "weights and moments are bit-equal"


def differences_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return the differences between all tensors of two states, largest first. Both states are held in memory."""
    first, second = (dict(named(state)) for state in (one, other))
    compared = [difference(name, first.get(name), second.get(name)) for name in {**first, **second}]
    return sorted(compared, key=lambda each: (each.is_equal, not math.isnan(each.relative), -each.relative))


def difference(name: str, one: Tensor | None, other: Tensor | None) -> Difference:
    if one is None or other is None:
        fault = f"only in the {'first' if other is None else 'second'}"
        return Difference(name, False, relative=math.inf, fault=fault)
    if one.shape != other.shape or one.dtype != other.dtype:
        kinds = [f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in (one, other)]
        return Difference(name, False, relative=math.inf, fault=" -> ".join(kinds))
    if torch.equal(bits(one), bits(other)):
        return Difference(name, True)
    gap, norm = other.double() - one.double(), float(one.double().norm())
    size = float(gap.norm())
    return Difference(name, False, float(gap.abs().max()), size / norm if norm else math.inf if size else 0.0)


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, in which NaN equals NaN and -0.0 differs from 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
