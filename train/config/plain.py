"""Configurations as plain tables, for config.yaml, fingerprints and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from train.config.prepare import PrepareConfig
from train.config.train import TrainConfig


def to_dict(config: TrainConfig | PrepareConfig) -> dict[str, Any]:
    """The configuration in plain containers, for config.yaml and fingerprints."""
    return asdict(config)


def flat(config: TrainConfig) -> dict[str, Any]:
    """All settings in one table, with keys such as "optim.lr"."""
    return dict(flatten(to_dict(config)))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested tables under keys joined by dots; empty tables stay as they are."""
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
