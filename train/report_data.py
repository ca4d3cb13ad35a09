"""What a run tells of its labelled data and of its best evaluation: data.json and evaluation.json, read and tabled.

Both are optional: pretraining, and runs of older versions, have none. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from train.config import InputError, check
from train.report_run import read_mapping

Value = TypeVar("Value")
FIRST = ("train", "validation")  # of the splits; then the others by name
SCORES = ("precision", "recall", "f1", "support")  # columns of the table of labels
Numbers = dict[str, float]
Table = list[list[str]]  # the first row is the header


@dataclass(frozen=True)
class Split:
    """A prepared split, as training or evaluation meets it."""

    name: str
    rows: int | None  # that the model is given: windows, for question answering
    used_rows: int | None  # of them, by this run
    examples: int | None  # rows of the data that they come from
    bad_rows: int  # left out
    left_out: int  # by data.label_map
    bad_examples: list[str]  # some of them: place and reason
    label_counts: Numbers
    up_to: list[float]  # length histogram: counts[i] rows are longer than up_to[i - 1] and at most up_to[i] tokens
    counts: list[float]
    padding_share: float | None  # of all tokens
    notes: Numbers  # truncated, cut questions, ...


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a split."""

    name: str
    metrics: Numbers  # and further numbers, as the threshold that they go with
    labels: list[str]
    per_class: dict[str, Numbers]  # of each label: precision, recall, f1, support
    confusion: list[list[float]]  # [true, predicted] examples


@dataclass(frozen=True)
class Records:
    kind: str | None  # classify | qa
    labels: list[str]
    lengths: list[float]  # that batches are padded to, in tokens
    splits: list[Split]
    step: int | None  # of the evaluation
    evaluated: list[Evaluated]


# ---- reading -------------------------------------------------------------------------------------------------------


def read_records(run: Path) -> Records | None:
    """data.json and evaluation.json of a run folder; None if it has neither. InputError, one line, for damaged ones."""
    places = (run / "data.json", run / "evaluation.json")
    try:
        data, evaluation = (read_mapping(place, json.loads) for place in places)
    except OSError as error:
        raise InputError(f"cannot read {error.filename or run}: {error.strerror}") from error
    if not data and not evaluation:
        return None
    told, judged = Reader(places[0], data), Reader(places[1], evaluation)
    return Records(
        kind=told.optional("kind", str),
        labels=told.items("labels", str),
        lengths=told.items("lengths", float),
        splits=[read_split(name, split) for name, split in told.parts("splits")],
        step=judged.optional("step", int),
        evaluated=[read_evaluated(name, split) for name, split in judged.parts("splits")],
    )


def read_split(name: str, found: Reader) -> Split:
    lengths = Reader(found.path, found.optional("length_histogram", dict) or {})
    up_to, counts = lengths.items("up_to", float), lengths.items("counts", float)
    found.check(len(up_to) == len(counts), f"length_histogram has {len(counts)} counts up to {len(up_to)} lengths")
    return Split(
        name=name,
        rows=found.optional("rows", int),
        used_rows=found.optional("used_rows", int),
        examples=found.optional("examples", int),
        bad_rows=found.optional("bad_rows", int) or 0,
        left_out=found.optional("left_out", int) or 0,
        bad_examples=found.items("bad_examples", str),
        label_counts=found.numbers("label_counts"),
        up_to=up_to,
        counts=counts,
        padding_share=found.optional("padding_share", float),
        notes=found.numbers("notes"),
    )


def read_evaluated(name: str, found: Reader) -> Evaluated:
    labels = found.items("labels", str)
    classes = Reader(found.path, found.optional("per_class", dict) or {})
    confusion = [found.all_of("confusion", row, float) for row in found.items("confusion", list)]
    square = all(len(row) == len(confusion) for row in confusion)
    found.check(square and len(confusion) in (0, len(labels)), f"the confusion of {len(labels)} labels is no square")
    return Evaluated(
        name=name,
        metrics=found.numbers("metrics") | {key: value for key, value in found.found.items() if is_finite(value)},
        labels=labels,
        per_class={label: classes.numbers(label) for label in classes.found},
        confusion=confusion,
    )


class Reader:
    """The values of a JSON object, each of the type that it should have; InputError names the file and the key."""

    def __init__(self, path: Path, found: dict[str, Any]) -> None:
        self.path, self.found = path, found

    def check(self, ok: bool, message: str) -> None:
        check(ok, f"{self.path} is damaged: {message}")

    def of_type(self, key: str, value: object, kind: type[Value]) -> Value:
        """Numbers may be of either kind, as JSON has but one, and are finite."""
        ok = is_finite(value) if kind in (int, float) else isinstance(value, kind)
        self.check(ok, f"{key} holds {json.dumps(value)[:60]}, not {kind.__name__}")
        return value  # type: ignore[return-value]

    def optional(self, key: str, kind: type[Value]) -> Value | None:
        value = self.found.get(key)
        return None if value is None else self.of_type(key, value, kind)

    def all_of(self, key: str, values: Sequence[object], kind: type[Value]) -> list[Value]:
        return [self.of_type(key, value, kind) for value in values]

    def items(self, key: str, kind: type[Value]) -> list[Value]:
        return self.all_of(key, self.optional(key, list) or [], kind)

    def numbers(self, key: str) -> Numbers:
        """A table of numbers; what is unknown (null) or no number (NaN, of a run that diverged) is left out."""
        table = self.optional(key, dict) or {}
        known = {name: value for name, value in table.items() if value is not None and not is_no_number(value)}
        return {name: self.of_type(f"{key}.{name}", value, float) for name, value in known.items()}

    def parts(self, key: str) -> list[tuple[str, Reader]]:
        """The objects in an object: training and validation first, then by name."""
        table = self.optional(key, dict) or {}
        names = sorted(table, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
        return [(name, Reader(self.path, self.of_type(f"{key}.{name}", table[name], dict))) for name in names]


def is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


# ---- tables --------------------------------------------------------------------------------------------------------


def splits_table(records: Records) -> Table:
    """A column for each split: what it holds, what was left out or cut, how much of it is padding."""
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
    """A row for each label: how many rows of each split have it, and their share."""
    splits = [split for split in records.splits if split.label_counts]
    rows = []
    for label in label_names(records):
        counts = [split.label_counts.get(label, 0) for split in splits]
        shares = [value / (sum(split.label_counts.values()) or 1) for value, split in zip(counts, splits, strict=True)]
        cells = (f"{count(value)} ({share(part)})" for value, part in zip(counts, shares, strict=True))
        rows.append([label, *cells])
    return [["Label", *(split.name for split in splits)], *rows] if splits else []


def label_names(records: Records) -> list[str]:
    """In the order of their numbers; what only the counts know of comes last."""
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
    """A row for each label: precision, recall, F1 and how many examples have it."""
    known = [label for label in evaluated.labels if label in evaluated.per_class]
    labels = list(dict.fromkeys([*known, *evaluated.per_class]))
    rows = []
    for label in labels:
        found = evaluated.per_class[label]
        rows.append([label, *(score(found.get(name)) for name in SCORES[:-1]), count(found.get("support"))])
    return [["Label", "Precision", "Recall", "F1", "Support"], *rows] if rows else []


def f1_comparison(runs: Sequence[Records | None], names: Sequence[str]) -> Table:
    """A row for each split and label, a column for each run: F1 at its best evaluation."""
    columns = [
        {(split.name, label): found.get("f1") for split in run.evaluated for label, found in split.per_class.items()}
        if run is not None
        else {}
        for run in runs
    ]
    keys = {key: None for column in columns for key in column}
    rows = [[f"{split}: {label}", *(score(column.get((split, label))) for column in columns)] for split, label in keys]
    return [["F1 at the best evaluation", *names], *rows] if rows else []


def bad_rows(records: Records | None) -> list[tuple[str, str]]:
    """(split, what is wrong) of the bad rows that were named."""
    splits = records.splits if records is not None else []
    return [(split.name, text) for split in splits for text in split.bad_examples]


def count(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def score(value: float | None) -> str:
    return count(value) if value is None or isinstance(value, int) else f"{value:.4f}"
