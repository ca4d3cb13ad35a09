"""Settings that all tasks share. Those of a task stand in its package, train/tasks/<kind>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from train.config.data import DataConfig, RecordsConfig


@dataclass(kw_only=True)
class TaskConfig:
    """What the settings of every task extend."""

    learns_from: ClassVar[type[DataConfig]] = RecordsConfig
    kind: str = MISSING  # of the table train.tasks.TASKS
