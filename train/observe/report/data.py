"""Readers and tables of data.json (labelled data) and evaluation.json (of the exported weights), which are optional."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from train.config import InputError
from train.config.checks import LARGEST_FLOAT
from train.observe.report.texts import count, score, share
from train.storage.folders import Folder
from train.storage.schema import BadContent, of_type, read_json, record

ROWS = (  # rows of the table of splits: label and field of SplitFacts
    ("Rows in the data", "examples"),
    ("Rows that the model sees", "rows"),
    ("Used by this run", "used_rows"),
    ("Bad rows, left out", "bad_rows"),
    ("Left out by data.label_map", "left_out"),
)
# columns of the table of labels
SCORES = {
    "Precision": "precision",
    "Recall": "recall",
    "F1": "f1",
}
Numbers = dict[str, float]
T = TypeVar("T")
Table = list[list[str]]  # the first row is the header


@dataclass(frozen=True)
class SplitFacts:
    """A prepared split, as training or evaluation uses it. None means unknown."""

    name: str
    rows: int | None = None  # rows that the model sees; for question answering, windows
    used_rows: int | None = None  # rows that this run uses
    examples: int | None = None  # rows of the data from which `rows` are made
    bad_rows: int = 0  # rows left out because they are bad
    left_out: int = 0  # rows left out by data.label_map
    bad_examples: list[str] = field(default_factory=list)  # some bad rows: file, line and reason
    label_counts: Numbers = field(default_factory=dict)
    padding_share: float | None = None  # share of padding in all tokens
    notes: Numbers = field(default_factory=dict)  # counts by name: truncated, cut questions, ...


@dataclass(frozen=True)
class Evaluated:
    """The evaluation of a split."""

    name: str
    metrics: Numbers = field(default_factory=dict)  # includes related numbers, such as a threshold
    labels: list[str] = field(default_factory=list)
    # precision, recall, f1 and support by label
    per_class: dict[str, Numbers] = field(default_factory=dict)
    # numbers of examples [true, predicted]
    confusion: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        sides = {len(self.labels), len(self.confusion), *map(len, self.confusion)}
        if self.confusion and len(sides) != 1:
            raise BadContent(
                f"the confusion matrix does not have {len(self.labels)} rows and columns, one per label"
            )
        if any(value < 0 for row in self.confusion for value in row):
            raise BadContent("the confusion matrix has a negative number of examples")


@dataclass(frozen=True)
class Records:
    labels: list[str] = field(default_factory=list)
    splits: list[SplitFacts] = field(default_factory=list)
    note: str = ""  # a sentence about an architecture that reads padding
    step: int | None = None  # step of the evaluation
    evaluated: list[Evaluated] = field(default_factory=list)


# ---- reading -------------------------------------------------------------------------------------------------------


@contextmanager
def reading(folder: Folder, name: str) -> Iterator[None]:
    """Raise InputError, which names the file, if the block finds that it is damaged."""
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise InputError(f"{folder.location}/{name} is damaged: {error}") from error


def read_mapping(folder: Folder, name: str, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    """Return the mapping in a file; {} if the file is missing. Raises InputError if it is damaged."""
    with reading(folder, name):
        try:
            value = parse(folder.read(name))
        except FileNotFoundError:
            return {}
        if not isinstance(value, dict):
            raise BadContent(f"expected a mapping, found {type(value).__name__}")
        return {str(key): item for key, item in value.items()}


def read_records(folder: Folder) -> Records | None:
    """Read data.json and evaluation.json; None if the folder has neither. Raises InputError if one is damaged."""
    data = read_mapping(folder, "data.json", parse)
    evaluation = read_mapping(folder, "evaluation.json", parse)
    if not data and not evaluation:
        return None
    with reading(folder, "data.json"):
        records = Records(
            labels=of_type(list[str], data.get("labels", []), "labels"),
            note=of_type(str, data.get("note", ""), "note"),
            splits=splits_of(data, SplitFacts),
        )
    with reading(folder, "evaluation.json"):
        splits = of_type(dict[str, dict[str, Any]], evaluation.get("splits", {}), "splits")
        for (
            split
        ) in splits.values():  # related numbers, such as a threshold, are listed as metrics
            metrics = of_type(dict[str, Any], split.get("metrics", {}), "metrics")
            others = {key: value for key, value in split.items() if type(value) in (int, float)}
            split["metrics"] = metrics | others
        step = of_type(int | None, evaluation.get("step"), "step")
        return replace(records, step=step, evaluated=splits_of({"splits": splits}, Evaluated))


def splits_of(content: dict[str, Any], kind: type[T]) -> list[T]:
    """Return the splits as `kind`: train and validation first, then the others by name. Unknown keys are ignored."""
    splits = of_type(dict[str, dict[str, Any]], content.get("splits", {}), "splits")
    wanted = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    result = []
    for name in sorted(splits, key=lambda name: (name != "train", name != "validation", name)):
        values = {key: value for key, value in splits[name].items() if key in wanted}
        result.append(record(kind, values | {"name": name}, f"splits.{name}"))
    return result


def parse(content: bytes) -> Any:
    """Parse the JSON of a file, leaving out unknown values: null, infinity, and NaN, which a diverged run writes."""
    return without_unknown(read_json(content))


def without_unknown(value: Any) -> Any:
    if isinstance(value, dict):
        known = {key: item for key, item in value.items() if not is_unknown(item)}
        return {key: without_unknown(item) for key, item in known.items()}
    if isinstance(value, list):
        return [without_unknown(item) for item in value]
    return value


def is_unknown(value: object) -> bool:
    return value is None or (isinstance(value, float) and not abs(value) < LARGEST_FLOAT)


# ---- tables --------------------------------------------------------------------------------------------------------


def table_of(corner: str, columns: dict[str, dict[str, str]], missing: str = "unknown") -> Table:
    """Return a table with a row for each key of the columns; [] if there is none. The first row is the header."""
    labels = {label: None for column in columns.values() for label in column}
    rows = [[label, *(each.get(label, missing) for each in columns.values())] for label in labels]
    if not rows:
        return []
    return [[corner, *columns], *rows]


def splits_table(records: Records) -> Table:
    """Return a table with a column per split: the numbers of rows used, left out or cut, and the share of padding."""
    columns = {}
    for split in records.splits:
        column = {label: count(getattr(split, key)) for label, key in ROWS}
        for note, value in split.notes.items():
            column[note.replace("_", " ").capitalize()] = count(value)
        column["Padding (share of all tokens, at least)"] = share(split.padding_share)
        columns[split.name] = column
    return table_of("", columns)


def labels_table(records: Records) -> Table:
    """Return a table with a row per label: its count in each split, and its share of the split's labels."""
    columns = {}
    for split in records.splits:
        counts = dict.fromkeys(records.labels, 0.0) | split.label_counts
        total = sum(counts.values())
        if total:
            columns[split.name] = {
                label: f"{count(value)} ({share(value / total)})"
                for label, value in counts.items()
            }
    return table_of("Label", columns, missing="0 (0.0%)")


def metrics_table(records: Records) -> Table:
    """Return a table of an evaluation with a row per metric and a column per split."""
    columns = {}
    for split in records.evaluated:
        columns[split.name] = {
            name.replace("_", " "): score(value) for name, value in split.metrics.items()
        }
    return table_of("", columns)


def classes_table(evaluated: Evaluated) -> Table:
    """Return a table with a row per label: precision, recall, F1 and the number of examples with the label."""
    known: dict[str, Numbers] = {}
    for label in [*evaluated.labels, *evaluated.per_class]:
        if label in evaluated.per_class:
            known[label] = evaluated.per_class[label]
    columns = {}
    for title, name in SCORES.items():
        columns[title] = {label: score(values.get(name)) for label, values in known.items()}
    columns["Support"] = {label: count(values.get("support")) for label, values in known.items()}
    return table_of("Label", columns)


def confusion_table(evaluated: Evaluated) -> Table:
    """Return the confusion matrix: a row per true label, a column per predicted one; [] without a matrix."""
    if not evaluated.confusion:
        return []
    rows = []
    for label, numbers in zip(evaluated.labels, evaluated.confusion, strict=True):
        rows.append([label, *map(count, numbers)])
    return [["true, by predicted", *evaluated.labels], *rows]
