"""Predictions of a trained model for new rows, which are tokenized as in the evaluations of its run.

Rows come from `train.data.records.raw.read_texts`. Prediction runs in one process, on the CPU or a CUDA device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import Dataset, Features, concatenate_datasets

from train.config import ModelConfig, RecordsConfig, TaskConfig, TrainConfig, check, shortlist
from train.data.batches.buckets import BUCKET_SHIFT
from train.data.records.table_facts import column, cut_words
from train.models.heads import logits_of
from train.tasks import TASKS, class_of, spec_of
from train.tasks.state import NAME, read_state
from train.tasks.texts import Sizes, eager_step

if TYPE_CHECKING:
    from train.storage.folders import Folder
    from train.tasks.finetune import TextTask

# rows; until tokens are in an Arrow table, they use ten times as much memory
TOKENISED_TOGETHER = 500
CPU = torch.device("cpu")


class Predictor:
    """A trained model with a head, and its task."""

    def __init__(
        self,
        source: str,
        data: RecordsConfig,
        *,
        run: tuple[TrainConfig, Folder] | None,
        seq_len: int | None,
    ) -> None:
        """Read all but the weights. Raises InputError if no task suits the model.

        `source` is a folder in the format of transformers, or a Hub id. `data` says how rows are read. `run` is the
        run that trained the model, if any. If `seq_len` is None, it is that of training, or else the model's limit.
        """
        self.source, self.data, self.run = source, data, run
        task, state = None, read_state(source)
        if state is not None:
            task, seq_len = state.config, seq_len or state.seq_len
        check(
            state is not None or run is None,
            f"{source} has no {NAME}: an earlier version wrote it; export it again",
        )
        sizes = Sizes.read(ModelConfig(pretrained=source, tokenizer=source), seq_len)
        names = ", ".join(sizes.config.architectures or ["none"])
        # transformers assumes this for one output
        only_number = "regression" if sizes.config.num_labels == 1 else None
        task = task or default_task(
            source, names, getattr(sizes.config, "problem_type", None) or only_number
        )
        self.spec = spec = spec_of(task)
        check(spec.head in names, f"{source}: the task is {task.kind}, but the model is a {names}")
        self.task: TextTask = class_of(spec)(task, sizes)
        self.task.labels = self.task.featurizer.labels = self.task.labels_of(source, sizes.config)
        self.num_rows, self.has_target = 0, False
        # tokens read; counts of truncated rows and cut tokens
        self.num_tokens, self.cut = (
            0,
            Counter[str](),
        )
        self.known: list[tuple[Any, Any]] = []  # right and predicted answers

    def load(
        self,
        options: Mapping[str, Any] | None = None,
        device: torch.device = CPU,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Read the weights. `options` are the values of the flags in the task's TaskSpec.options."""
        task, seq_len = self.task, self.task.sizes.seq_len
        task.use(self.data, options or dict.fromkeys(self.spec.options))
        model = task.build_model()
        new = ", ".join(sorted(model.new)[:3])
        check(not model.new, f"{self.source} has no weights for {new}: its head was not trained")
        self.model, self.device, self.autocast = model.to(device).eval(), device, autocast
        step = eager_step(seq_len)
        shorter = range(-(-min(task.shortest, seq_len) // step) * step, seq_len, step)
        task.sizes = replace(
            task.sizes, lengths=(*(() if task.sizes.has_one_length else shorter), seq_len)
        )

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
        check(
            bool(np.isfinite(statistics).all()),
            f"{self.source} computes NaN: its weights are damaged",
        )
        answers = list(self.task.predictions(rows, features, statistics))
        pairs = (self.task.known(row, answer) for row, answer in zip(rows, answers, strict=True))
        self.known += [pair for pair in pairs if pair is not None]
        self.num_rows += len(rows)
        self.has_target |= any(self.task.featurizer.kind.target in row for row in rows)
        self.num_tokens += int(column(features, "length").sum())
        self.cut.update(truncated=int((tokens_cut > 0).sum()), tokens_cut=int(tokens_cut.sum()))
        lost = zip(answers, tokens_cut.tolist(), strict=True)
        return [{**answer, "tokens_cut": tokens} if tokens else answer for answer, tokens in lost]

    def features(self, rows: list[dict[str, Any]]) -> tuple[Dataset, np.ndarray]:
        """Return the features of rows, and the number of tokens cut from each row, [rows]."""
        featurizer, parts, tokens_cut = self.task.featurizer, [], []
        for first in range(0, len(rows), TOKENISED_TOGETHER):
            part = rows[first : first + TOKENISED_TOGETHER]
            texts = {key: [row[key] for row in part] for key in self.spec.inputs if key in part[0]}
            columns = featurizer.features(texts, [*range(first, first + len(part))], split="new")
            parts.append(Dataset.from_dict(columns, features=Features(featurizer.types)))
            tokens_cut.append(featurizer.tokens_cut)
        return concatenate_datasets(parts), np.concatenate(tokens_cut)

    @torch.inference_mode()
    def statistics(
        self, features: Dataset, batch_size: int, on_batch: Callable[[int], Any]
    ) -> np.ndarray:
        """Return the task's statistics [rows, n] float32.

        The longest rows come first, so that batches have little padding, and too large a batch_size fails immediately.
        """
        table = self.task.token_rows(features, {**self.task.columns, **self.task.eval_columns})
        order = np.argsort(-table.row_lengths, kind="stable")
        batches = []
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            bucket = int(table.bucket_of[rows[0]])
            drawn = table.draw((rows + (bucket << BUCKET_SHIFT))[None])["inputs"]
            inputs = {name: tensor[0].to(self.device) for name, tensor in drawn.items()}
            with self.autocast():
                batches.append(self.task.statistics(logits_of(self.model, inputs), inputs).cpu())
            on_batch(len(rows))
        gathered = torch.cat(batches).numpy()
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    def cut_rows(self) -> str:
        """Return a line on the rows that were truncated so far; "" if there are none."""
        seq_len = self.task.sizes.seq_len
        return cut_words(
            rows=self.num_rows, tokens=self.num_tokens, notes=self.cut, seq_len=seq_len
        )

    def metrics(self) -> str:
        """Return a line with the metrics of all rows so far that have a right answer; "" if there are none."""
        if self.known:
            values = self.task.score(*zip(*self.known, strict=True))
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            return f"{numbers} on the {len(self.known):,} rows with a known answer (of {self.num_rows:,})"
        labels = self.task.labels
        if not (self.has_target and labels):
            return ""
        return f"no row has a label that the model knows: {shortlist(labels)}"


def default_task(source: str, architectures: str, problem_type: str | None) -> TaskConfig:
    """Return the default settings of a task for a model without a run: the first task in TASKS that has its head.

    Tasks with the model's problem type are preferred. Raises InputError if no task has the head.
    """
    specs = [spec for spec in TASKS.values() if spec.inputs]
    fitting = [spec for spec in specs if spec.head in architectures]
    fitting.sort(key=lambda spec: spec.problem_type != problem_type)
    heads = ", ".join(dict.fromkeys(spec.head for spec in specs))
    check(
        bool(fitting),
        f"{source} has no head for predictions (its config.json has the architecture {architectures}); give a model "
        f"with one of: {heads}",
    )
    return fitting[0].settings()
