"""Settings of all tasks. Those of a task stand in its package, train/tasks/<kind>."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from omegaconf import MISSING

from train.config.data import DataConfig, RecordsConfig


@dataclass(frozen=True)
class HeadSize:
    """What a task's head computes for a sequence: all that its FLOPs, parameters and memory follow from."""

    predictions: int = 0  # positions at which every token of the vocabulary is scored
    labels: int = 0  # scores of the sequence, by a dense layer and a classifier on one token
    token_labels: int = 0  # scores of each token


@dataclass(kw_only=True)
class TaskConfig:
    """What the settings of every task extend."""

    learns_from: ClassVar[type[DataConfig]] = RecordsConfig
    kind: str = MISSING  # of the table train.tasks.TASKS

    def head_size(self, seq_len: int, labels: int = 0) -> HeadSize:
        """The size of the head for sequences of `seq_len` tokens; `labels` is 0 before the data is read."""
        raise NotImplementedError
