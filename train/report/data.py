"""Labelled data and best evaluation of a run: data.json and evaluation.json, and tables of them.

Both are optional: pretraining has none. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from train.config import InputError
from train.report.run import read_mapping
from train.report.texts import count, score, share
from train.storage.schema import BadContent, of_type, record

FIRST = ("train", "validation")  # of the splits; then the others by name
SCORES = ("precision", "recall", "f1", "support")  # columns of the table of labels
Numbers = dict[str, float]
Table = list[list[str]]  # the first row is the header


@dataclass(frozen=True)
class SplitFacts:
    """A prepared split, as training or evaluation uses it. None is unknown."""

    name: str
    rows: int | None = None  # for the model: windows, for question answering
    used_rows: int | None = None  # number of them that this run uses
    examples: int | None = None  # rows of the data from which they are made
    bad_rows: int = 0  # left out
    left_out: int = 0  # by data.label_map
    bad_examples: list[str] = field(default_factory=list)  # some bad rows: file, line and reason
    label_counts: Numbers = field(default_factory=dict)
    length_histogram: dict[str, list[float]] = field(default_factory=dict)
    padding_share: float | None = None  # of all tokens
    notes: Numbers = field(default_factory=dict)  # truncated, cut questions, ...

    def __post_init__(self) -> None:
        if len(self.up_to) != len(self.counts):
            raise BadContent(f"length_histogram has {len(self.counts)} counts up to {len(self.up_to)} lengths")

    @property
    def up_to(self) -> list[float]:
        """Bins of the lengths: counts[i] rows are longer than up_to[i - 1] and at most up_to[i] tokens."""
        return self.length_histogram.get("up_to", [])

    @property
    def counts(self) -> list[float]:
        return self.length_histogram.get("counts", [])


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a split."""

    name: str
    metrics: Numbers = field(default_factory=dict)  # and further numbers, such as the threshold that belongs to them
    labels: list[str] = field(default_factory=list)
    per_class: dict[str, Numbers] = field(default_factory=dict)  # of each label: precision, recall, f1, support
    confusion: list[list[float]] = field(default_factory=list)  # [true, predicted] examples

    def __post_init__(self) -> None:
        is_square = all(len(row) == len(self.confusion) for row in self.confusion)
        if not is_square or len(self.confusion) not in (0, len(self.labels)):
            raise BadContent(f"the confusion of {len(self.labels)} labels is no square")


Facts = TypeVar("Facts", SplitFacts, Evaluated)


@dataclass(frozen=True)
class Records:
    labels: list[str]
    lengths: list[float]  # that batches are padded to, in tokens
    splits: list[SplitFacts]
    step: int | None  # of the evaluation
    evaluated: list[Evaluated]


# ---- reading -------------------------------------------------------------------------------------------------------


def read_records(run: Path) -> Records | None:
    """data.json and evaluation.json of a run folder; None if it has neither. InputError, one line, for damaged ones."""
    path = run / "data.json"
    try:
        data = read_mapping(path, parse)
        labels = of_type(list[str], data.get("labels", []), "labels")
        lengths = of_type(list[float], data.get("lengths", []), "lengths")
        splits = parts(SplitFacts, tables_of(data))
        path = run / "evaluation.json"
        evaluation = read_mapping(path, parse)
        step = of_type(int | None, evaluation.get("step"), "step")
        tables = tables_of(evaluation)
        for name, table in tables.items():
            further = {key: value for key, value in table.items() if type(value) in (int, float)}
            metrics = of_type(dict[str, Any], table.get("metrics", {}), f"splits.{name}.metrics")
            table["metrics"] = metrics | further
        evaluated = parts(Evaluated, tables)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or run}: {error.strerror}") from error
    except BadContent as error:
        raise InputError(f"{path} is damaged: {error}") from error
    return Records(labels, lengths, splits, step, evaluated) if data or evaluation else None


def parse(content: bytes) -> Any:
    """The JSON of a file. What is unknown is left out: null, and NaN, of a run that diverged."""

    def drop_unknown(table: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in table.items() if value is not None}

    def finite(text: str) -> float | None:
        return float(text) if math.isfinite(float(text)) else None

    return json.loads(content, object_hook=drop_unknown, parse_float=finite, parse_constant=finite)


def tables_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The splits of a file by name."""
    tables: dict[str, dict[str, Any]] = of_type(dict[str, dict[str, Any]], content.get("splits", {}), "splits")
    return tables


def parts(kind: type[Facts], tables: dict[str, dict[str, Any]]) -> list[Facts]:
    """Make each split: training and validation first, the others by name. Fields that `kind` lacks are dropped."""
    names = sorted(tables, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
    known = {item.name for item in fields(kind)}
    return [
        record(kind, {key: tables[name][key] for key in known & tables[name].keys()} | {"name": name}, f"splits.{name}")
        for name in names
    ]


# ---- tables --------------------------------------------------------------------------------------------------------


def splits_table(records: Records) -> Table:
    """A column for each split: its rows, what was left out or cut, its share of padding."""
    splits = records.splits
    if not splits:
        return []
    rows: list[tuple[str, list[float | None]]] = [
        ("Rows of the data", [split.examples for split in splits]),
        ("Rows for the model", [split.rows for split in splits]),
        ("Used by this run", [split.used_rows for split in splits]),
        ("Bad rows, left out", [split.bad_rows for split in splits]),
        ("Left out by data.label_map", [split.left_out for split in splits]),
    ]
    for note in {note: None for split in splits for note in split.notes}:
        rows.append((note.replace("_", " ").capitalize(), [split.notes.get(note) for split in splits]))
    table = [["", *(split.name for split in splits)], *([label, *map(count, values)] for label, values in rows)]
    return [*table, ["Padding, of all tokens", *(share(split.padding_share) for split in splits)]]


def labels_table(records: Records) -> Table:
    """A row for each label: the number and share of the rows of each split that have it."""
    splits = [split for split in records.splits if split.label_counts]
    rows = []
    for label in label_names(records):
        counts = [split.label_counts.get(label, 0) for split in splits]
        shares = [value / (sum(split.label_counts.values()) or 1) for value, split in zip(counts, splits, strict=True)]
        cells = (f"{count(value)} ({share(part)})" for value, part in zip(counts, shares, strict=True))
        rows.append([label, *cells])
    return [["Label", *(split.name for split in splits)], *rows] if splits else []


def label_names(records: Records) -> list[str]:
    """Labels in the order of their numbers; those that occur only in the counts come last."""
    counted = [label for split in records.splits for label in split.label_counts]
    return list(dict.fromkeys([*records.labels, *counted]))


def metrics_table(records: Records) -> Table:
    """A row for each metric of the best evaluation, a column for each split."""
    names = {name: None for split in records.evaluated for name in split.metrics}
    rows = [
        [name.replace("_", " "), *(score(split.metrics.get(name)) for split in records.evaluated)] for name in names
    ]
    return [["", *(split.name for split in records.evaluated)], *rows] if rows else []


def classes_table(evaluated: Evaluated) -> Table:
    """A row for each label: precision, recall, F1 and the number of examples that have it."""
    known = [label for label in evaluated.labels if label in evaluated.per_class]
    labels = list(dict.fromkeys([*known, *evaluated.per_class]))
    rows = []
    for label in labels:
        scores = evaluated.per_class[label]
        rows.append([label, *(score(scores.get(name)) for name in SCORES[:-1]), count(scores.get("support"))])
    return [["Label", "Precision", "Recall", "F1", "Support"], *rows] if rows else []


def f1_comparison(runs: Sequence[Records | None], names: Sequence[str]) -> Table:
    """A row for each split and label, a column for each run: F1 at its best evaluation."""
    columns = [
        {(split.name, label): scores.get("f1") for split in run.evaluated for label, scores in split.per_class.items()}
        if run is not None
        else {}
        for run in runs
    ]
    keys = {key: None for column in columns for key in column}
    rows = [[f"{split}: {label}", *(score(column.get((split, label))) for column in columns)] for split, label in keys]
    return [["F1 at the best evaluation", *names], *rows] if rows else []


def bad_rows(records: Records | None) -> list[tuple[str, str]]:
    """(split, description) of the bad rows that the run has named."""
    splits = records.splits if records is not None else []
    return [(split.name, text) for split in splits for text in split.bad_examples]
