"""Predictions of a trained model for new rows, which are tokenized as in the evaluations of its run.

Rows come from `train.data.records.raw.read_texts`. Prediction runs in one process, on the CPU or a CUDA device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import torch
from datasets import Dataset, Features

from train.config import ModelConfig, TaskConfig, check
from train.data.batches.buckets import with_bucket
from train.models.heads import logits_of
from train.tasks.state import read_state
from train.tasks.table import TASKS, class_of, spec_of
from train.tasks.texts import Sizes, every_length

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from train.run_folder.samples import Sample
    from train.tasks.finetune import TextTask

# Rows; until tokens are in an Arrow table, they use ten times as much memory.
TOKENISED_TOGETHER = 500
CPU = torch.device("cpu")


def trained_task(source: str, seq_len: int | None, cfg: TaskConfig | None = None) -> TextTask:
    """Return the task of a trained model, without loading its weights. Raises InputError if no task suits the model.

    `source` is a folder in the format of transformers, or a Hub id. If `cfg` is None, the settings are those that the
    export of a run has, or else the defaults of a task with the model's head. If `seq_len` is None, it is that of
    training, or else the model's limit.
    """
    state = read_state(source)
    if state is not None:
        cfg = cfg or state.config
        seq_len = seq_len or state.seq_len
    sizes = Sizes.read(ModelConfig(pretrained=source, tokenizer=source), seq_len)
    if cfg is None:
        cfg = default_task(source, sizes.config)
    spec = spec_of(cfg)
    names = ", ".join(sizes.config.architectures)
    check(spec.head in names, f"{source}: the task is {cfg.kind}, but the model is a {names}")
    task: TextTask = class_of(spec)(cfg, sizes)
    task.labels = task.labels_of(source, sizes.config)
    task.featurizer.labels = task.labels
    return task


def default_task(source: str, config: PreTrainedConfig) -> TaskConfig:
    """Return the default settings of a task for a model without a run: the first task in TASKS that has its head.

    Tasks with the model's problem type are preferred. Raises InputError if no task has the head.
    """
    names = ", ".join(config.architectures or ["none"])
    problem_type = getattr(config, "problem_type", None)
    if problem_type is None and config.num_labels == 1:
        problem_type = "regression"  # transformers assumes this for one output
    specs = [spec for spec in TASKS.values() if spec.inputs]
    fitting = [spec for spec in specs if spec.head in names]
    heads = ", ".join(dict.fromkeys(spec.head for spec in specs))
    check(
        bool(fitting),
        f"{source} has no head for predictions (its config.json has the architecture {names}); give a model with one "
        f"of: {heads}",
    )
    fitting.sort(key=lambda spec: spec.problem_type != problem_type)
    return fitting[0].settings()


class Predictor:
    """A trained model with a head, ready to answer rows."""

    def __init__(
        self,
        task: TextTask,
        lengths: Any = "auto",
        *,
        device: torch.device = CPU,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Read the weights. `lengths` is data.lengths of the run that trained the model."""
        self.task, self.device, self.autocast = task, device, autocast
        model = task.build_model()
        source = task.sizes.model.pretrained
        new = ", ".join(sorted(model.new)[:3])
        check(not model.new, f"{source} has no weights for {new}: its head was not trained")
        self.model = model.to(device).eval()
        # The shortest length may limit what an answer is computed from, so it is not above that of the run.
        if lengths != "auto":
            task.shortest = min([task.shortest, *lengths])
        task.sizes = replace(task.sizes, lengths=lengths_of(task))

    def predict(
        self,
        rows: list[dict[str, Any]],
        *,
        batch_size: int,
        on_batch: Callable[[int], Any] = lambda _: None,
    ) -> list[dict[str, Any]]:
        """Return the model's answer to each row, in order. `on_batch` is called with each batch's sequence count."""
        features, tokens_cut = self.features(rows)
        statistics = self.statistics(features, batch_size, on_batch)
        source = self.task.sizes.model.pretrained
        check(
            bool(np.isfinite(statistics).all()),
            f"{source} computes NaN: its weights are damaged",
        )
        answers = list(self.task.predictions(rows, features, statistics))
        for answer, tokens in zip(answers, tokens_cut.tolist(), strict=True):
            if tokens:
                answer["tokens_cut"] = tokens
        return answers

    def features(self, rows: list[dict[str, Any]]) -> tuple[Dataset, np.ndarray]:
        """Return the features of rows, and the number of tokens cut from each row, [rows]."""
        featurizer = self.task.featurizer
        names = [name for name in spec_of(self.task.cfg).inputs if name in rows[0]]
        schema = Features(featurizer.types).arrow_schema
        parts = []
        tokens_cut = []
        for first in range(0, len(rows), TOKENISED_TOGETHER):
            part = rows[first : first + TOKENISED_TOGETHER]
            texts = {name: [row[name] for row in part] for name in names}
            indices = range(first, first + len(part))
            columns = featurizer.features(texts, list(indices), split="new")
            parts.append(pyarrow.Table.from_pydict(columns, schema=schema))
            tokens_cut.append(featurizer.tokens_cut)
        # A given fingerprint saves the time to compute one from the content.
        features = Dataset(pyarrow.concat_tables(parts), fingerprint="new")
        return features, np.concatenate(tokens_cut)

    @torch.inference_mode()
    def statistics(
        self, features: Dataset, batch_size: int, on_batch: Callable[[int], Any]
    ) -> np.ndarray:
        """Return the task's statistics [rows, n] float32.

        The longest rows come first, so that batches have little padding, and too large a batch_size fails immediately.
        """
        columns = {**self.task.columns, **self.task.eval_columns}
        table = self.task.token_rows(features, columns)
        order = np.argsort(-table.row_lengths, kind="stable")
        batches = []
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            bucket = int(table.bucket_of[rows[0]])
            items = with_bucket(rows, bucket)
            drawn = table.draw(items[None])["inputs"]
            inputs = {name: tensor[0].to(self.device) for name, tensor in drawn.items()}
            with self.autocast():
                logits = logits_of(self.model, inputs)
                statistics = self.task.statistics(logits, inputs)
            batches.append(statistics.cpu())
            on_batch(len(rows))
        gathered = torch.cat(batches).numpy()
        result = np.empty_like(gathered)
        result[order] = gathered
        return result


def lengths_of(task: TextTask) -> tuple[int, ...]:
    """Return the lengths in tokens to which rows to predict are padded."""
    seq_len = task.sizes.seq_len
    if task.sizes.has_one_length:
        return (seq_len,)
    return every_length(task.shortest, seq_len)


def samples_of(
    rows: list[dict[str, Any]], export: Path, *, seq_len: int | None, lengths: Any
) -> list[Sample]:
    """Return the exported model's answers to rows with known answers. `lengths` is data.lengths of its run.

    The model runs on the CPU, since the run's backend still uses the devices.
    """
    task = trained_task(str(export), seq_len)
    answers = Predictor(task, lengths).predict(rows, batch_size=8)
    return [task.sample(row, answer) for row, answer in zip(rows, answers, strict=True)]
