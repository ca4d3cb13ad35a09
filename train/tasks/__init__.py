"""What is learnt: the door between the loop and a task, and the table of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor, nn

from train.config import TrainConfig, check, check_choice

if TYPE_CHECKING:
    from train.data.batches import Drawable
    from train.data.buckets import Buckets
    from train.data.order import ShardSampler, Windows
    from train.data.prepared import Supply
    from train.models.encoder import Network
    from train.storage import Folder


TASKS = ("mlm", "classify", "qa")  # modules of this folder


class Task(Protocol):
    """Batches, the loss as a sum, and what an evaluation finds."""

    shard_rows: Sequence[int]  # training examples in each shard; data that is not sharded is one
    train_rows: int  # their sum
    eval_rows: int
    buckets: Buckets | None  # the lengths of batches, where there are several
    metrics: tuple[str, ...]  # names that eval_metrics gives; "loss" is among them
    data_id: str  # identifies the training data; a checkpoint resumes on the same only
    facts: dict[str, float]  # of the data, for metrics and report
    details: dict[str, Any]  # of the data, for run_dir/data.json; empty: there is none

    def verify_data(self) -> None:
        """Compare the data with its checksums; InputError names what is damaged."""

    def windows(self) -> Windows:
        """How many shards to shuffle together. InputError if this machine cannot hold them."""

    def supply(self, order: ShardSampler, *, is_first_on_machine: bool) -> Supply:
        """Begin to bring what `order` will ask for to this machine. InputError if it cannot be."""

    def build_model(self) -> Network: ...

    def train_data(self) -> Drawable: ...

    def eval_data(self) -> Drawable: ...

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Loss summed over the labels of a micro batch (a scalar); the loop divides by the global count."""

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """[B, n] float32 of each example of a batch."""

    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        """Metrics by their usual names out of the statistics [eval_rows, n], in the order of the data."""

    def write_evaluation(self, rows: np.ndarray, folder: Folder, *, step: int) -> None:
        """Leave predictions and tables of an evaluation that is better than all before; rank 0."""

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        """To train on one of `seq_len` tokens, padding included."""

    def describe_model(self, model: nn.Module, folder: Folder) -> None:
        """Leave in the run folder what its checkpoints need to be exported without the data; rank 0."""

    def export(self, model: nn.Module, folder: Path) -> None: ...


def build_task(cfg: TrainConfig) -> Task:
    """The task of a run, its data opened and checked. Raises InputError for data that will not do."""
    check_choice("task.kind", cfg.task.kind, TASKS)
    task: Task = import_module(f"train.tasks.{cfg.task.kind}").build(cfg)  # a task's imports are paid by its own runs
    check(
        cfg.best.metric in task.metrics,
        f"best.metric={cfg.best.metric} is none of this task's: {', '.join(task.metrics)}",
    )
    return task
