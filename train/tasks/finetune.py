"""Code shared by the tasks that learn from records: batches of fixed shapes from prepared tables, and evaluations.

An evaluation covers all validation splits, one after another.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import concatenate_datasets
from torch import Tensor, nn

from train.config import (
    DataParallelConfig,
    EvaluatedConfig,
    RecordsConfig,
    TrainConfig,
    shortlist,
)
from train.data.batches.buckets import Buckets
from train.data.random_bits import EVAL_STREAM, hash_uniform
from train.data.records.featurizer import Featurizer
from train.data.records.table_facts import column, cut_words, padding_share
from train.data.records.tables import open_tables
from train.data.records.token_rows import TokenRows
from train.data.shards.order import evenly_spaced
from train.data.text.coverage import unknown_share
from train.machine.console import visible_json
from train.models.heads import (
    PaddedEncoder,
    build_with_head,
    check_labels,
    default_names,
    logits_of,
)
from train.run_folder.samples import Answer, Guess, Sample, excerpt
from train.storage.folders import Folder, canonical_json
from train.tasks.spec import Task
from train.tasks.state import TaskState, files_beside
from train.tasks.table import spec_of
from train.tasks.texts import CPU_TOKENS, Sizes, pass_cost, reads_no_padding, resolved_lengths

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedConfig

Entry = dict[str, Any]  # an input row by column, or a prediction
# The files for predictions/, and more entries for evaluation.json.
Results = tuple[dict[str, bytes], dict[str, Any]]
MOST_CHARS_READ = 20_000  # maximum number of characters in all sampled rows, to limit the time


def json_lines(rows: Iterable[dict[str, Any]]) -> bytes:
    """Return rows as lines of JSON, in which dates are texts. Unprintable characters are escaped, for terminals."""
    lines = [visible_json(json.dumps(row, ensure_ascii=False, default=str)) for row in rows]
    return "".join(f"{line}\n" for line in lines).encode()


def known(row: Entry, *names: str) -> Entry:
    """Return those of the named values that a row has."""
    return {name: row[name] for name in names if row.get(name) is not None}


def mean_loss(statistics: np.ndarray) -> float:
    """Return the mean loss of statistics [rows, n] whose first column is the loss."""
    return float(statistics[:, 0].mean(dtype=np.float64))


def table_of(names: Sequence[str], scores: Sequence[np.ndarray]) -> dict[str, dict[str, float]]:
    """Return precision, recall, F1 and support by name, from the arrays of scikit-learn or seqeval."""
    keys = ("precision", "recall", "f1", "support")
    rows = zip(*(kind.tolist() for kind in scores), strict=True)
    return {
        name: dict(zip(keys, values, strict=True))
        for name, values in zip(names, rows, strict=True)
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
    """The base class of tasks on rows of texts, for runs and for predictions."""

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
        spec = spec_of(self.cfg)
        return build_with_head(
            spec.head,
            self.sizes.model,
            labels=self.outputs,
            problem_type=spec.problem_type,
            **self.sizes.fit,
        )

    def token_rows(self, features: Dataset, columns: Mapping[str, str]) -> TokenRows:
        """Return features as rows for batches. `columns` maps further batch inputs to feature columns."""
        pad_id = self.sizes.tokenizer.pad_token_id
        lengths = self.sizes.lengths
        rows = TokenRows(
            features,
            pad_id=pad_id,
            lengths=lengths,
            columns=columns,
        )
        rows.check_ids(self.sizes.config.vocab_size)
        return rows

    # ---- methods that each task defines ----------------------------------------------------------------------------

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

    def scores_by_name(
        self, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> dict[str, Any]:
        """Return what evaluation.json has of a split in addition to the metrics."""
        return {}

    @abstractmethod
    def predictions(
        self, rows: Iterable[Entry], features: Dataset, statistics: np.ndarray
    ) -> Iterator[Entry]:
        """Yield the prediction for each row, which becomes a line of output."""

    def labels_of(self, source: str, config: PreTrainedConfig) -> list[str]:
        """Return the labels of a trained model. Raises InputError if the task cannot use them."""
        return []

    def settings_of_outputs(self) -> dict[str, Any]:
        """Return the settings that name a trained model's outputs. `labels_of`, which reads them, must run first."""
        if self.labels == default_names(len(self.labels)):
            return {}
        return {"data.labels": self.labels}

    def row_of(self, texts: dict[str, str]) -> dict[str, Any]:
        """Return a row with the texts given as flags, by column."""
        return dict(texts)

    def in_words(self, row: Entry, answer: Any) -> str:
        """Return a right or predicted answer to a row as text, for the report."""
        if isinstance(answer, float):
            return f"{answer:.4g}"
        return str(answer)

    # ---- a run -----------------------------------------------------------------------------------------------------

    @classmethod
    def of_run(cls, cfg: TrainConfig) -> Task:
        task = cls(cfg.task, Sizes.of(cfg))
        task.open(cfg)
        return task

    def open(self, cfg: TrainConfig) -> None:
        """Open the data of a run. Raises InputError if it cannot be used."""
        assert isinstance(cfg.data, RecordsConfig)
        self.run_cfg = cfg
        self.data = cfg.data
        self.tables = open_tables(cfg, self.featurizer)
        self.labels = self.tables.facts["labels"]
        self.lengths = resolved_lengths(cfg, self.tables, self.sizes, shortest=self.shortest)
        self.sizes = replace(self.sizes, lengths=self.lengths)
        self.seq_len = self.lengths[-1]
        self.remarks = list(self._remarks())
        if self.outputs:
            check_labels(self.sizes.model, self.sizes.config, self.outputs)
        self.splits = list(self._splits(cfg))
        self.eval_rows = sum(len(split.features) for split in self.splits)
        learnt = "train"
        if isinstance(cfg.data, EvaluatedConfig):
            learnt = "validation"
        self.train_table = self.token_rows(self.tables.features(learnt), self.columns)
        every = concatenate_datasets([split.features for split in self.splits])
        self.eval_table = self.token_rows(every, {**self.columns, **self.eval_columns})
        if len(self.lengths) > 1:  # a single length needs no buckets
            self.buckets = Buckets(
                self.lengths, self.train_table.bucket_of, self.eval_table.bucket_of
            )
        metrics: list[str] = []
        for split in self.splits:
            metrics += [f"{split.prefix}{name}" for name in self.metric_names]
        self.metrics = tuple(metrics)
        self.train_rows = len(self.train_table)
        self.data_id = self.tables.id
        self.shard_rows = [self.train_rows]
        self.details = self._details({learnt: self.train_table.row_lengths})
        described = self.details["splits"][learnt]
        self.facts = {"padding_share": described["padding_share"]}
        if learnt == "train":
            self.begin(self.train_table)

    def _remarks(self) -> Iterator[str]:
        """Yield remarks on how well the tokenizer reads the texts. Raises InputError if it cannot read them."""
        name = self.sizes.tokenizer.name_or_path
        for split, entry in self.tables.facts["splits"].items():
            unknown = entry["notes"].get("unknown_tokens", 0)
            tokens = entry["notes"].get("text_tokens", 0)
            yield unknown_share(unknown, tokens, f"{split}: tokenizer {name} reads the texts")
        note = self.sizes.note()
        if note:
            yield note

    def _splits(self, cfg: TrainConfig) -> Iterator[Split]:
        """Yield the validation splits, or the rows of each that eval_examples leaves."""
        assert isinstance(cfg.data, RecordsConfig)
        first = 0
        for number, name in enumerate(("validation", *cfg.data.more_validation)):
            features = self.tables.features(name)
            if cfg.eval_examples is not None and cfg.eval_examples < len(features):
                features = features.select(drawn(features, cfg.eval_examples, cfg.seed, number))
            prefix = f"{name}_" if number else ""  # "validation" has none
            yield Split(name, prefix, features, first)
            first += len(features)

    def _details(self, learnt: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return facts about the data and its padding; `learnt` has the token counts of the training rows, by split."""
        evaluated = {split.name: split.of(self.eval_table.row_lengths) for split in self.splits}
        splits = {}
        for name, lengths in {**learnt, **evaluated}.items():
            splits[name] = {
                **self.tables.facts["splits"][name],
                "used_rows": len(lengths),
                "padding_share": padding_share(lengths, self.lengths),
            }
        return {
            "kind": self.tables.facts["kind"],
            "labels": list(self.outputs),
            "splits": splits,
            "lengths": list(self.lengths),
            "note": self.sizes.note(),
        }

    def summary(self) -> str:
        lengths = ", ".join(map(str, self.lengths))
        share = self.facts["padding_share"]
        padding = f"in training at least {share:.1%} of the tokens are padding"
        line = f"batches of {lengths} tokens (data.lengths={self.data.lengths}); {padding}"
        if self.labels:
            line = f"{len(self.labels)} classes: {shortlist(self.labels)}; {line}"
        return "; ".join([line, *self.cut_rows()])

    def cut_rows(self) -> Iterator[str]:
        """Yield a line for each split that has truncated rows."""
        for name, facts in self.details["splits"].items():
            words = cut_words(
                rows=facts["rows"],
                tokens=facts["tokens"],
                notes=facts["notes"],
                seq_len=self.sizes.seq_len,
            )
            if words:
                yield f"{name}: {words}"

    def micro_batches(self, share: int, replicas: int) -> int:
        parallel = self.run_cfg.parallel
        if self.buckets is None or not isinstance(parallel, DataParallelConfig):
            return 1
        if reads_no_padding(self.run_cfg, self.sizes):
            return self.buckets.fewest_cut(share, most=CPU_TOKENS)
        return self.buckets.best_cut(share, replicas, cost=pass_cost(self.run_cfg))

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
        metrics: dict[str, float] = {}
        for split in self.splits:
            found = self.metrics_of(split, rows)
            metrics |= {split.prefix + name: value for name, value in found.items()}
        return metrics

    def write_evaluation(self, rows: np.ndarray, folder: Folder, *, step: int) -> None:
        splits = {}
        for split in self.splits:
            examples = self.tables.examples(split.name)
            statistics = split.of(rows)
            files, more = self.results(split.name, examples, split.features, statistics)
            for name, content in files.items():
                folder.write(f"predictions/{name}", content)
            metrics = self.metrics_of(split, rows)
            splits[split.name] = {**metrics, **more}
        folder.write("evaluation.json", canonical_json({"step": step, "splits": splits}))

    def results(
        self, split: str, examples: Dataset, features: Dataset, statistics: np.ndarray
    ) -> Results:
        """Return what an evaluation writes in addition to its metrics: here a prediction for each example."""
        rows = map(self.named_row, examples_of(examples, features))
        lines = json_lines(self.predictions(rows, features, statistics))
        return {f"{split}.jsonl": lines}, self.scores_by_name(examples, features, statistics)

    def named_row(self, row: Entry) -> Entry:
        """Return a row of a table in the form of rows to predict, in which labels are names."""
        target = self.featurizer.kind.target
        value = row[target]
        if not self.labels:
            return row
        if isinstance(value, list):
            return {**row, target: [self.labels[number] for number in value]}
        return {**row, target: self.labels[value]}

    def files_beside(self, model: PaddedEncoder) -> dict[str, bytes]:
        seed, seq_len = self.run_cfg.seed, self.sizes.seq_len
        state = TaskState.of(
            self.cfg,
            seq_len=seq_len,
            seed=seed,
            scale=model.scale,
        )
        tokenizer = self.tables.folder / "tokenizer"
        return files_beside(tokenizer, inputs=model.inputs, state=state.choosing(self.chosen))

    # ---- samples ---------------------------------------------------------------------------------------------------

    def sampled_rows(self, most: int) -> Iterator[Entry]:
        """Yield rows spread over the validation table: at most MOST_CHARS_READ characters."""
        examples = self.tables.examples("validation")
        num_chars = 0
        for row in examples.select(evenly_spaced(len(examples), most)):
            chars = sum(len(str(value)) for value in row.values())
            if num_chars + chars <= MOST_CHARS_READ:
                num_chars += chars
                yield self.named_row(row)

    def sample(self, row: Entry, prediction: Entry) -> Sample:
        """Return a sample for the report from a row, whose right answer must be known, and its prediction."""
        first, *others = spec_of(self.cfg).inputs
        text = row[first]
        if not isinstance(text, str):
            text = " ".join(text)
        context = " ".join(row.get(name) or "" for name in others)
        truth = self.in_words(row, prediction[self.featurizer.kind.target])
        given = self.in_words(row, prediction["prediction"])
        probability = prediction.get("probabilities", {}).get(given)
        score = float(truth == given)
        if isinstance(prediction["prediction"], float):
            score = 0.5  # a number is neither right nor wrong
        answer = Answer(excerpt(truth), [Guess(excerpt(given), probability)], score)
        return Sample(excerpt(text), [answer], excerpt(context))


def examples_of(examples: Dataset, features: Dataset) -> Dataset:
    """Return the example of each feature."""
    return examples.select(column(features, "row"))


def drawn(features: Dataset, most: int, seed: int, split: int) -> np.ndarray:
    """Draw examples with the seed and return their rows in `features`, ascending: at most `most` rows."""
    # At least one example is drawn, even if it alone has more than `most` rows. `split` is the index of the split.
    owners = column(features, "row")
    examples, owner_of, counts = np.unique(owners, return_inverse=True, return_counts=True)
    numbers = hash_uniform(seed, EVAL_STREAM, split, np.arange(len(examples)))
    order = np.argsort(numbers, kind="stable")
    rows_until = counts[order].cumsum()
    num_drawn = max(1, int(np.searchsorted(rows_until, most, side="right")))
    is_drawn = np.isin(owner_of, order[:num_drawn])
    return np.flatnonzero(is_drawn)
