"""The declaration of a task, which can be read without torch (TaskSpec), and the task in a training loop (Task)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config import TaskConfig, TrainConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from train.data.batches.buckets import Buckets
    from train.data.batches.loader import Drawable
    from train.data.shards.order import ShardSampler
    from train.data.shards.prefetch import Prefetcher
    from train.models.network import Network
    from train.run_folder.samples import Sample
    from train.storage.folders import Folder


@dataclass(frozen=True)
class Metric:
    """A metric of an evaluation, declared by the task that computes it."""

    name: str
    # None: unknown, so no value is called the best
    higher_is_better: bool | None = True
    # the metric's id on the Hub; "": the same as `name`
    hub_name: str = ""

    @property
    def sign(self) -> int:
        """Return 1 if higher values are better, -1 if lower values are, 0 if this is unknown."""
        return {
            True: 1,
            False: -1,
            None: 0,
        }[self.higher_is_better]

    @property
    def title(self) -> str:
        return self.name.replace("_", " ")


LOSS = Metric("loss", higher_is_better=False)


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task's entry in `train.tasks.TASKS`, which can be read without torch."""

    # The class of its settings; `learns_from` says which data the task reads.
    settings: type[TaskConfig]
    # The task's class, as module:Class; it needs torch.
    module: str
    # transformers loads an export as AutoModelFor<head>.
    head: str
    # transformers' name of the objective, for a SequenceClassification head.
    problem_type: str = "single_label_classification"
    # The metrics of evaluations; a report's headline is the first one that the run has.
    metrics: tuple[Metric, ...]

    # The following fields are for model cards.
    # transformers' pipeline that runs an export.
    pipeline: str
    # A sentence on what the model does; {labels} is the number of labels, {names} their names.
    sentence: str
    # The arguments of the pipeline, as Python code.
    example: str
    # Python code that runs an export {model}, if transformers has no such pipeline.
    code: str = ""
    # A sentence on what a caller must do to get the answers of `baretrain predict`.
    note: str = ""
    # The names and keys of task settings that the card lists.
    card_settings: tuple[tuple[str, str], ...] = ()

    # The following fields are for `baretrain predict`, whose rows have the same columns as the run's data.
    # Fields of ColumnsConfig that the model reads, with the help texts of their flags; {}: it cannot predict.
    inputs: Mapping[str, str] = field(default_factory=dict)
    # The inputs that only some models read.
    optional: tuple[str, ...] = ()
    # The field of ColumnsConfig with what is learnt.
    target: str = "label"


class Task(ABC):
    """The task of a run: its batches, the loss as a sum, and the metrics of an evaluation."""

    # The training examples in each shard; data without shards counts as one shard.
    shard_rows: Sequence[int]
    # the sum of shard_rows
    train_rows: int
    eval_rows: int
    # the length of the longest batches, in tokens
    seq_len: int
    # the lengths of batches in tokens, ascending; None: seq_len is the only one
    lengths: Sequence[int] | None = None
    # The lengths by example, if there are several.
    buckets: Buckets | None = None
    # the names of eval_metrics; "loss" is among them
    metrics: tuple[str, ...]
    # identifies the training data; a checkpoint resumes only on the same data
    data_id: str
    # facts about the data, for metrics and report
    facts: dict[str, float]
    # remarks on the data, for the log
    remarks: Sequence[str] = ()
    # the settings that the evaluation of the weights to be exported has chosen
    chosen: Mapping[str, Any] = {}
    # Details of the data, for run_dir/data.json; empty: the file is not written.
    details: dict[str, Any] = {}

    @classmethod
    def of_run(cls, cfg: TrainConfig) -> Task:
        """Return a run's task after opening and checking its data. Raises InputError if the data is unsuitable."""
        return cls(cfg)  # type: ignore[call-arg]  # a task that inherits this is built from the run's settings

    def summary(self) -> str:
        """Return a line for the log that says how the data is batched, or ""."""
        return ""

    def micro_batches(self, share: int, replicas: int) -> int:
        """Return into how many micro batches a step's `share` of each of the `replicas` is best cut."""
        return 1

    def verify_data(self) -> None:
        """Compare the data with its checksums, if this is still to be done. An InputError names damaged files."""
        return

    def only_evaluates(self) -> None:
        """Prepare to evaluate a trained model. Raises InputError if the state of its task is damaged."""
        return

    def window_shards(self, order: ShardSampler) -> int:
        """Return how many shards of each lane to shuffle together. Raises InputError if the disk cannot hold them."""
        return order.window_shards

    def eval_shards(self, ranks: Sequence[int], world_size: int) -> list[int]:
        """Return the validation shards that the machine with these data ranks reads; [] if the data has no shards."""
        return []

    def prefetcher(self, order: ShardSampler, *, is_first_on_machine: bool) -> Prefetcher | None:
        """Start to prefetch the shards of `order`; None if this rank need not. Raises InputError if this fails."""
        return None

    @abstractmethod
    def build_model(self) -> Network:
        """Return the model with the initial weights of training."""

    @abstractmethod
    def train_data(self) -> Drawable:
        """Return the training examples."""

    @abstractmethod
    def eval_data(self) -> Drawable:
        """Return the validation examples, followed by the examples of further splits."""

    @abstractmethod
    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss [] summed over the labels of a micro batch; the engine divides by the global count."""

    def compile_loss(
        self, compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]
    ) -> None:
        """Replace the function that maps logits to the loss by its `compiled` form, if the logits are large."""
        return

    @abstractmethod
    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        """Return [B, n] float32: what the metrics need from each example of a batch."""

    @abstractmethod
    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        """Return metrics by name, computed from the statistics [eval_rows, n], whose order is that of the data."""

    def choose(self, rows: np.ndarray, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return settings that are best for these weights, from the statistics and metrics of their evaluation."""
        return {}

    def adopt(self, chosen: Mapping[str, Any]) -> None:
        """Keep what `choose` returned for the weights that will be exported."""
        self.chosen = chosen

    def write_evaluation(self, rows: np.ndarray, folder: Folder, *, step: int) -> None:
        """Write the predictions and tables, if any, of an evaluation. Only rank 0 calls this."""
        return

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        """Return the FLOPs to train on one example of `seq_len` tokens, padding included; None: unknown."""
        return None

    def files_beside(self, model: Any) -> dict[str, bytes]:
        """Return the files of an export beside the weights and configuration of a Network, by name."""
        return {}

    def describe_model(self, model: Any, folder: Folder) -> None:
        """Write the files that allow checkpoints to be exported without the data. Only rank 0 calls this."""
        model.describe(folder, self.files_beside(model))

    def export(self, model: Any, folder: Path) -> None:
        """Write the model and its tokenizer, for transformers' from_pretrained(folder)."""
        model.export(folder, self.files_beside(model))

    def sampled_rows(self, most: int) -> Iterable[dict[str, Any]]:
        """Return up to `most` validation rows that `baretrain predict` can answer, for the report. Only for rank 0."""
        return []

    def samples(self, export: Path, most: int) -> list[Sample]:
        """Return up to `most` validation examples with the exported model's answers. Only rank 0 calls this."""
        return []
