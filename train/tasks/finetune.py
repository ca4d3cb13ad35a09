"""Code shared by the tasks that learn from records: batches of fixed shapes from prepared tables, and evaluations.

An evaluation covers all validation splits, one after another.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import concatenate_datasets
from torch import Tensor, nn

from train.config import RecordsConfig, TrainConfig
from train.data.batches.buckets import Buckets
from train.data.random_bits import EVAL_STREAM, hash_uniform
from train.data.records.featurizer import Featurizer
from train.data.records.sources import NO_ROWS
from train.data.records.table_facts import column, cut_words, padding_share
from train.data.records.tables import Facts, open_tables
from train.data.records.token_rows import TokenRows
from train.data.shards.order import spread
from train.data.text.coverage import unknown_share
from train.machine.console import visible_json
from train.models.heads import (
    PaddedEncoder,
    build_with_head,
    check_labels,
    default_names,
    logits_of,
)
from train.parallel.backends import compiles_each_length
from train.run_folder.samples import Sample
from train.storage.folders import Folder, canonical_json
from train.tasks import spec_of
from train.tasks.predictor import Predictor
from train.tasks.spec import Task
from train.tasks.state import TaskState, files_beside
from train.tasks.texts import Sizes, resolved_lengths

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

Entry = dict[str, Any]  # an input row by column, or a prediction
# files for predictions/ and more entries for evaluation.json
Results = tuple[dict[str, bytes], dict[str, Any]]
CANDIDATES = 4  # examples that the model answers per sample shown
MOST_CHARS_READ = 20_000  # maximum number of characters in all these examples, to limit the time


def json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return rows as lines of JSON. Unprintable characters are escaped, since a terminal may show the lines."""
    return "".join(
        visible_json(json.dumps(row, ensure_ascii=False)) + "\n" for row in rows
    ).encode()


def mean_loss(statistics: np.ndarray) -> float:
    """Return the mean loss of statistics [rows, n] whose first column is the loss."""
    return float(statistics[:, 0].mean(dtype=np.float64))


def table_of(names: Sequence[str], scores: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and support by name, from the arrays of scikit-learn or seqeval."""
    rows = zip(names, *(kind.tolist() for kind in scores), strict=True)
    return {
        name: dict(zip(("precision", "recall", "f1", "support"), values, strict=True))
        for name, *values in rows
    }


@dataclass(frozen=True)
class Split:
    """A split of the validation data, or the part of it that is used."""

    # the name of its tables
    name: str
    # the prefix of its metrics; "" for "validation"
    prefix: str
    features: Dataset
    # index of the first row in the statistics of an evaluation
    first: int

    def of(self, rows: np.ndarray) -> np.ndarray:
        return rows[self.first : self.first + len(self.features)]


class TextTask(Task):
    """The base class of tasks on rows of texts, for runs and for baretrain predict."""

    # the feature column of each batch input
    columns: Mapping[str, str]
    # the same for inputs that only `statistics` needs
    eval_columns: Mapping[str, str] = {}
    # the metrics of one split
    metric_names: tuple[str, ...]
    # the columns of predictions in a CSV file
    csv_columns: list[str]
    featurizer: Featurizer
    # the shortest length of a batch, in tokens
    shortest: int = 8
    lengths: tuple[int, ...]

    def __init__(self, cfg: Any, sizes: Sizes) -> None:
        self.cfg, self.sizes = cfg, sizes
        self.labels: list[str] = []  # the labels of the run or of the trained model, by index

    @property
    def outputs(self) -> Sequence[str]:
        """Return the names of the head's outputs in order."""
        return self.labels

    def build_model(self) -> PaddedEncoder:
        spec, model, names = spec_of(self.cfg), self.sizes.model, self.outputs
        return build_with_head(
            spec.head, model, labels=names, problem_type=spec.problem_type, **self.sizes.fit
        )

    def token_rows(self, features: Dataset, columns: Mapping[str, str]) -> TokenRows:
        """Return features as rows for batches. `columns` maps further batch inputs to feature columns."""
        rows = TokenRows(features, columns=columns, **self.sizes.of_rows)
        rows.check_ids(self.sizes.config.vocab_size)
        return rows

    # ---- learning: methods that each task defines ------------------------------------------------------------------

    def begin(self, train_table: TokenRows) -> None:
        """Compute what the loss needs from the training data, such as class weights."""
        return

    @abstractmethod
    def loss_of(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the loss summed over the labels of a batch."""

    @abstractmethod
    def statistics(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return [B, n] float32: what metrics and predictions need from each row of a batch."""

    @abstractmethod
    def evaluate(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, float]:
        """Return the metrics in `metric_names` of a split's features."""

    @abstractmethod
    def results(
        self, split: str, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> Results:
        """Return what an evaluation writes in addition to its metrics."""

    # ---- predictions: methods that each task defines ---------------------------------------------------------------

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        """Return the labels of a trained model. Raises InputError if the task cannot use them."""
        return []

    def settings_of_outputs(self) -> dict[str, Any]:
        """Return the settings that name a trained model's outputs. `labels_of`, which reads them, must run first."""
        return (
            {} if self.labels == default_names(len(self.labels)) else {"data.labels": self.labels}
        )

    def use(self, data: RecordsConfig, options: Mapping[str, Any]) -> None:
        """Prepare for predictions: `data` says how to read rows, and `options` are the values of flags."""
        return

    def row_of(self, texts: dict[str, str]) -> dict[str, Any]:
        """Return a row with the texts given as flags, by column."""
        return dict(texts)

    @abstractmethod
    def predictions(
        self, rows: list[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        """Yield the prediction for each row, which becomes a line of output."""

    @abstractmethod
    def known(self, row: Entry, prediction: Entry) -> tuple[Any, Any] | None:
        """Return a row's right answer and the model's answer; None if the row has no right answer."""

    @abstractmethod
    def score(self, truth: Sequence[Any], predicted: Sequence[Any]) -> dict[str, float]:
        """Return metrics, computed from the right and the predicted answers that `known` returned."""

    @abstractmethod
    def sample(self, row: Entry, prediction: Entry) -> Sample:
        """Return a sample for the report from a row, whose right answer must be known, and its prediction."""

    # ---- a run -----------------------------------------------------------------------------------------------------

    @classmethod
    def of_run(cls, cfg: TrainConfig) -> Task:
        task = cls(cfg.task, Sizes.of(cfg))
        task.open(cfg)
        return task

    def open(self, cfg: TrainConfig) -> None:
        """Open the data of a run. Raises InputError if it cannot be used."""
        assert isinstance(cfg.data, RecordsConfig)
        self.run_cfg, self.data, self.tables = cfg, cfg.data, open_tables(cfg, self.featurizer)
        self.sizes = replace(
            self.sizes,
            lengths=resolved_lengths(cfg, self.tables, self.sizes, shortest=self.shortest),
        )
        self.lengths = self.sizes.lengths
        self.seq_len = self.lengths[-1]
        self.labels = self.tables.facts["labels"]
        self.remarks = [
            *remarks(self.sizes.tokenizer, self.tables.facts),
            *filter(None, [self.sizes.note()]),
        ]
        if self.outputs:
            check_labels(self.sizes.model, self.sizes.config, self.outputs)
        self.splits: list[Split] = []
        self.eval_rows = 0
        for name in ("validation", *cfg.data.more_validation):
            features = self.tables.features(name)
            if cfg.eval_examples is not None and cfg.eval_examples < len(features):
                features = features.select(
                    drawn(features, cfg.eval_examples, cfg.seed, len(self.splits))
                )
            self.splits.append(
                Split(name, "" if name == "validation" else f"{name}_", features, self.eval_rows)
            )
            self.eval_rows += len(features)
        learnt = "validation" if cfg.data.train == NO_ROWS else "train"
        self.train_table = self.token_rows(self.tables.features(learnt), self.columns)
        every = concatenate_datasets([split.features for split in self.splits])
        self.eval_table = self.token_rows(every, {**self.columns, **self.eval_columns})
        if len(self.lengths) > 1:  # a single length needs no buckets
            is_mixed = self.data.lengths == "auto" and not compiles_each_length(
                cfg.backend, cfg.instance
            )
            of_rows = self.train_table.bucket_of, self.eval_table.bucket_of
            self.buckets = Buckets(self.lengths, *of_rows, is_mixed=is_mixed)
        self.metrics = tuple(
            f"{split.prefix}{name}" for split in self.splits for name in self.metric_names
        )
        self.train_rows, self.data_id = len(self.train_table), self.tables.id
        self.shard_rows = [self.train_rows]
        self.details = self._details({learnt: self.train_table.row_lengths})
        self.facts = shares(self.details["splits"][learnt])
        if learnt == "train":
            self.begin(self.train_table)

    def _details(self, learnt: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return facts about the data and its padding; `learnt` has the token counts of the training rows, by split."""
        used = learnt | {
            split.name: split.of(self.eval_table.row_lengths) for split in self.splits
        }
        splits = {}
        for name, lengths in used.items():
            share = padding_share(lengths, self.lengths)
            splits[name] = {
                **self.tables.facts["splits"][name],
                "used_rows": len(lengths),
                "padding_share": share,
            }
        sizes = {"lengths": list(self.lengths), "note": self.sizes.note()}
        return {
            "kind": self.tables.facts["kind"],
            "labels": list(self.outputs),
            "splits": splits,
            **sizes,
        }

    def summary(self) -> str:
        lengths = " or ".join(
            filter(None, [", ".join(map(str, self.lengths[:-1])), str(self.seq_len)])
        )
        line = f"batches of {lengths} tokens (data.lengths={self.data.lengths}); in training "
        return "; ".join(
            [
                f"{line}{self.facts['padding_share']:.1%} of the tokens are padding",
                *self.cut_rows(),
            ]
        )

    def cut_rows(self) -> Iterator[str]:
        """Yield a line for each split that has truncated rows."""
        for name, facts in self.details["splits"].items():
            of_split = {key: facts[key] for key in ("rows", "tokens", "notes")}
            if words := cut_words(**of_split, seq_len=self.sizes.seq_len):
                yield f"{name}: {words}"

    def only_evaluates(self) -> None:
        self.remarks = [*self.remarks, *self.cut_rows()]

    def train_data(self) -> TokenRows:
        return self.train_table

    def eval_data(self) -> TokenRows:
        return self.eval_table

    def flops_per_example(self, model: nn.Module, seq_len: int) -> float | None:
        assert isinstance(model, PaddedEncoder)
        return model.train_flops(self.cfg.head_size(seq_len, len(self.outputs)), seq_len)

    def loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return self.loss_of(logits_of(model, inputs), inputs)

    def eval_statistics(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        return self.statistics(logits_of(model, inputs), inputs)

    def metrics_of(self, split: Split, rows: np.ndarray) -> dict[str, float]:
        """Return the metrics of a split, from the statistics of all splits."""
        return self.evaluate(self.tables.examples(split.name), split.features, split.of(rows))

    def eval_metrics(self, rows: np.ndarray) -> dict[str, float]:
        values = ((split, self.metrics_of(split, rows).items()) for split in self.splits)
        return {f"{split.prefix}{name}": value for split, items in values for name, value in items}

    def write_evaluation(self, rows: np.ndarray, folder: Folder, *, step: int) -> None:
        splits = {}
        for split in self.splits:
            examples = self.tables.examples(split.name)
            files, tables = self.results(split.name, examples, split.features, split.of(rows))
            for name, content in files.items():
                folder.write(f"predictions/{name}", content)
            splits[split.name] = {**self.metrics_of(split, rows), **tables}
        folder.write("evaluation.json", canonical_json({"step": step, "splits": splits}))

    def files_beside(self, model: PaddedEncoder) -> dict[str, bytes]:
        """Return the files of an export beside its weights and configuration, by name."""
        state = TaskState.of(
            self.cfg, seq_len=self.sizes.seq_len, seed=self.run_cfg.seed, scale=model.scale
        )
        state = state.choosing(self.chosen)
        return files_beside(self.tables.folder / "tokenizer", inputs=model.inputs, state=state)

    def describe_model(self, model: nn.Module, folder: Folder) -> None:
        assert isinstance(model, PaddedEncoder)
        model.describe(folder, self.files_beside(model))

    def export(self, model: nn.Module, folder: Path) -> None:
        assert isinstance(model, PaddedEncoder)
        model.export(folder)
        for name, content in self.files_beside(model).items():
            (folder / name).write_bytes(content)

    def samples(self, export: Path, run: Folder, most: int) -> list[Sample]:
        # The model answers the examples as in `baretrain predict`.
        predictor = Predictor(
            str(export), self.data, run=(self.run_cfg, run), seq_len=self.run_cfg.seq_len
        )
        examples, target = self.tables.examples("validation"), self.featurizer.kind.target
        rows = list(candidates(examples, most, target=target, labels=self.labels))
        if not rows:
            return []
        predictor.load()  # on the CPU in float32: the run's backend still uses the devices
        pairs = zip(rows, predictor.predict(rows, batch_size=8), strict=True)
        return mixed([predictor.task.sample(*pair) for pair in pairs], most)


def shares(facts: Mapping[str, Any]) -> dict[str, float]:
    """Return padding and counts of a split, as shares of its examples or tokens."""
    notes = dict(facts["notes"])
    tokens = {
        "unknown_tokens": notes.pop("text_tokens", 0),
        "tokens_cut": facts["tokens"] + notes.get("tokens_cut", 0),
    }
    of = {name: tokens.get(name, facts["examples"]) or 1 for name in notes}
    return {"padding_share": facts["padding_share"]} | {
        f"{name}_share": n / of[name] for name, n in notes.items()
    }


def remarks(tokenizer: PreTrainedTokenizerFast, facts: Facts) -> Iterator[str]:
    """Yield remarks on how well the tokenizer reads the texts. Raises InputError if it cannot read them."""
    for split, entry in facts["splits"].items():
        unknown, tokens = (
            entry["notes"].get(name, 0) for name in ("unknown_tokens", "text_tokens")
        )
        yield unknown_share(
            unknown, tokens, f"{split}: tokenizer {tokenizer.name_or_path} reads the texts"
        )


def examples_of(examples: Dataset, features: Dataset) -> Dataset:
    """Return the example of each feature."""
    return examples.select(column(features, "row"))


def drawn(features: Dataset, most: int, seed: int, split: int) -> np.ndarray:
    """Draw examples with the seed and return their rows in `features`, ascending: at most `most` rows."""
    # At least one example is drawn, even if it alone has more than `most` rows. `split` is the index of the split.
    owners = column(features, "row")
    examples, owner_of, counts = np.unique(owners, return_inverse=True, return_counts=True)
    order = np.argsort(
        hash_uniform(seed, EVAL_STREAM, split, np.arange(len(examples))), kind="stable"
    )
    num_drawn = int(np.searchsorted(counts[order].cumsum(), most, side="right"))
    return np.flatnonzero(np.isin(owner_of, order[: max(1, num_drawn)]))


# ---- which validation examples become samples ----------------------------------------------------------------------


def candidates(
    examples: Dataset, most: int, *, target: str, labels: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield rows spread over the table, in the form that `read_texts` returns: at most MOST_CHARS_READ characters."""
    num_chars = 0
    for row in examples.select(spread(len(examples), CANDIDATES * most)):
        chars = sum(len(str(value)) for value in row.values() if isinstance(value, str | list))
        if num_chars + chars <= MOST_CHARS_READ:
            num_chars += chars
            value = row[target]
            if labels:
                value = (
                    [labels[each] for each in value] if isinstance(value, list) else labels[value]
                )
            yield {**row, target: value}


def mixed(answered: Sequence[Sample], most: int) -> list[Sample]:
    """Return at most `most` samples in order, half of them with wrong answers if there are enough of each kind."""
    is_right = np.array([sample.answers[0].score == 1 for sample in answered], bool)
    num_wrong = min((~is_right).sum(), max(most // 2, most - is_right.sum()))
    chosen = [
        *np.flatnonzero(~is_right)[:num_wrong],
        *np.flatnonzero(is_right)[: most - num_wrong],
    ]
    return [answered[number] for number in sorted(chosen)]
