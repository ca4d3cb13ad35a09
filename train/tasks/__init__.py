"""What is learnt: the door between the loop and a task, and the table of tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from train.config import TrainConfig, check_choice

if TYPE_CHECKING:
    from train.data.batches import Drawable
    from train.data.order import ShardSampler, Windows
    from train.data.prepared import Supply


class Task(Protocol):
    """Batches, the loss as a sum, and what an evaluation adds up."""

    shard_rows: Sequence[int]  # training examples in each shard; data that is not sharded is one
    train_rows: int  # their sum
    eval_rows: int
    seq_len: int  # tokens
    data_id: str  # identifies the training data; a checkpoint resumes on the same only
    facts: dict[str, float]  # of the data, for metrics and report

    def verify_data(self) -> None:
        """Compare the data with its checksums; InputError names what is damaged."""

    def windows(self) -> Windows:
        """How many shards to shuffle together. InputError if this machine cannot hold them."""

    def supply(self, order: ShardSampler, *, is_first_on_machine: bool) -> Supply:
        """Begin to bring what `order` will ask for to this machine. InputError if it cannot be."""

    def build_model(self) -> nn.Module: ...

    def train_data(self) -> Drawable: ...

    def eval_data(self) -> Drawable: ...

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Loss summed over the labels of a micro batch (a scalar); the loop divides by the global count."""

    def eval_sums(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """[n] float32 statistics of a batch that may be added over batches and ranks."""

    def eval_metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """Metrics by their usual names out of the added statistics; "loss" is the one that early stopping watches."""

    def flops_per_example(self, model: nn.Module) -> float | None: ...

    def export(self, model: nn.Module, folder: Path) -> None: ...


def build_task(cfg: TrainConfig) -> Task:
    """The task of a run, its data opened and checked. Raises InputError for data that will not do."""
    from train.tasks import mlm  # here, so that a task's imports are paid by its own runs

    table: dict[str, Any] = {"mlm": mlm.build}
    check_choice("task.kind", cfg.task.kind, tuple(table))
    task: Task = table[cfg.task.kind](cfg)
    return task
