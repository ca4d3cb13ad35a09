"""The differences of two checkpoints: settings, progress, and the tensors one by one, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from train.checkpoints.loader import fitting, read_optimizer, read_weights
from train.checkpoints.manifest import Manifest
from train.checkpoints.staging import State, named
from train.config import flatten
from train.run_folder.folder import differences

CONTENTS: dict[str, Callable[[Path, Manifest], Any]] = {"weights": read_weights, "moments": read_optimizer}


@dataclass(frozen=True)
class Difference:
    name: str
    largest: float  # absolute difference; NaN if either number is NaN
    relative: float  # norm of the difference / norm of the first
    is_equal: bool  # bit by bit
    fault: str = ""  # why they cannot be compared

    @property
    def order(self) -> float:
        return -math.inf if self.fault or math.isnan(self.relative) else -self.relative

    def __str__(self) -> str:
        if self.fault or self.is_equal:
            return f"  {self.name}: {self.fault or 'equal'}"
        return f"  {self.name}: relative {self.relative:.3g}, largest {self.largest:.3g}"


def compare(manifests: Sequence[Manifest], folders: Sequence[Path], *, limit: int | None) -> Iterator[str]:
    """Lines on two verified steps, the second against the first. `limit`: tensors of each file; None: all of them."""
    one, other = manifests
    yield f"step {one.step} -> step {other.step}"
    for name in ("identity", "settings", "progress", "versions"):
        before, now = (dict(flatten(getattr(manifest, name))) for manifest in manifests)
        yield from section(name, differences(before, now))
    written = [
        {"ranks": manifest.world_size, "backend": manifest.backend, "lease": manifest.fence} for manifest in manifests
    ]
    yield from section("written by", differences(*written))
    num_different = 0
    for content, read in CONTENTS.items():
        states = []
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


def section(name: str, lines: list[str]) -> Iterator[str]:
    yield f"{name}: {'differs' if lines else 'the same'}"
    yield from (f"  {line}" for line in lines)


def differences_of(one: State, other: State) -> list[Difference]:
    """The differences of all tensors in two states, the largest relative ones first. Holds both in memory."""
    first, second = (dict(named(state)) for state in (one, other))
    compared = [difference(name, first.get(name), second.get(name)) for name in {**first, **second}]
    return sorted(compared, key=lambda each: (each.is_equal, each.order))


def difference(name: str, one: Tensor | None, other: Tensor | None) -> Difference:
    if one is None or other is None:
        return Difference(name, math.nan, math.nan, False, f"only in the {'first' if other is None else 'second'}")
    if one.shape != other.shape or one.dtype != other.dtype:
        kinds = [f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.") for tensor in (one, other)]
        return Difference(name, math.nan, math.nan, False, " -> ".join(kinds))
    if torch.equal(bits(one), bits(other)):
        return Difference(name, 0.0, 0.0, True)
    gap, norm = other.double() - one.double(), float(one.double().norm())
    size = float(gap.norm())
    return Difference(name, float(gap.abs().max()), size / norm if norm else math.inf if size else 0.0, False)


def bits(tensor: Tensor) -> Tensor:
    """NaN is equal to itself, and -0.0 is not 0.0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
