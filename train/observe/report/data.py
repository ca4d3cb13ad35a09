"""Readers and tables of data.json (labelled data) and evaluation.json (of the exported weights), which are optional."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any

from train.config import InputError
from train.config.checks import LARGEST_FLOAT
from train.observe.report.texts import count, score, share
from train.storage.folders import Folder
from train.storage.schema import BadContent, of_type, read_json, record

FIRST = ("train", "validation")  # these splits come first, then the others by name
SCORES = ("precision", "recall", "f1", "support")  # columns of the table of labels
ROWS = (  # rows of the table of splits: label and field of SplitFacts
    ("Rows in the data", "examples"),
    ("Rows that the model sees", "rows"),
    ("Used by this run", "used_rows"),
    ("Bad rows, left out", "bad_rows"),
    ("Left out by data.label_map", "left_out"),
)
Numbers = dict[str, float]
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
    length_histogram: dict[str, list[float]] = field(default_factory=dict)
    padding_share: float | None = None  # share of padding in all tokens
    notes: Numbers = field(default_factory=dict)  # counts by name: truncated, cut questions, ...

    def __post_init__(self) -> None:
        grows = all(first < second for first, second in pairwise([0, *self.up_to]))
        if not grows or len(self.up_to) != len(self.counts) or min(self.counts, default=0) < 0:
            raise BadContent(
                "the length histogram does not have a count for each of its growing lengths"
            )

    @property
    def up_to(self) -> list[float]:
        """Upper bounds of the bins: counts[i] rows have more than up_to[i - 1] and at most up_to[i] tokens."""
        return self.length_histogram.get("up_to", [])

    @property
    def counts(self) -> list[float]:
        return self.length_histogram.get("counts", [])


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
    # (truth, prediction) of some rows, by target
    pairs: dict[str, list[list[float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sides = {len(self.labels), len(self.confusion), *map(len, self.confusion)}
        if self.confusion and len(sides) != 1:
            raise BadContent(
                f"the confusion matrix does not have {len(self.labels)} rows and columns, one per label"
            )
        if any(value < 0 for row in self.confusion for value in row):
            raise BadContent("the confusion matrix has a negative number of examples")
        if any(len(pair) != 2 for pairs in self.pairs.values() for pair in pairs):
            raise BadContent("a pair of truth and prediction is not two numbers")


@dataclass(frozen=True)
class Records:
    labels: list[str] = field(default_factory=list)
    # lengths to which batches are padded, in tokens
    lengths: list[float] = field(default_factory=list)
    splits: list[SplitFacts] = field(default_factory=list)
    note: str = ""  # a sentence about an architecture that reads padding
    step: int | None = None  # step of the evaluation
    evaluated: list[Evaluated] = field(default_factory=list)


# ---- reading -------------------------------------------------------------------------------------------------------


def read_mapping(
    folder: Folder, name: str, parse: Callable[[bytes], Any], convert: Callable[[Any], Any] = dict
) -> dict[str, Any]:
    """Return the mapping in a file, converted; {} if the file is missing. Raises InputError if it is damaged."""
    try:
        value = parse(folder.read(name))
        if not isinstance(value, dict):
            raise BadContent(f"expected a mapping, found {type(value).__name__}")
        converted: dict[str, Any] = convert({str(key): item for key, item in value.items()})
        return converted
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"{folder.location}/{name} is damaged: {error}") from error


def read_records(folder: Folder) -> Records | None:
    """Read data.json and evaluation.json; None if the folder has neither. Raises InputError if one is damaged."""
    data = read_mapping(folder, "data.json", parse, partial(fields_of, DATA, "splits", SplitFacts))
    evaluation = read_mapping(
        folder, "evaluation.json", parse, partial(fields_of, EVALUATION, "evaluated", Evaluated)
    )
    return Records(**data | evaluation) if data or evaluation else None


def parse(content: bytes) -> Any:
    """Parse the JSON of a file, leaving out unknown values: null, infinity, and NaN, which a diverged run writes."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(item) for key, item in value.items() if not is_unknown(item)}
        return [known(item) for item in value] if isinstance(value, list) else value

    return known(read_json(content))


def is_unknown(value: object) -> bool:
    return value is None or (isinstance(value, float) and not abs(value) < LARGEST_FLOAT)


DATA: dict[str, Any] = {"labels": list[str], "lengths": list[float], "note": str}
EVALUATION: dict[str, Any] = {"step": int | None}


def fields_of(
    hints: dict[str, Any], name: str, kind: type[SplitFacts | Evaluated], content: dict[str, Any]
) -> dict[str, Any]:
    """Return fields of Records: those in `hints`, and in `name` the splits as `kind`. Unknown keys are ignored."""
    result = {
        key: of_type(hint, content[key], key) for key, hint in hints.items() if key in content
    }
    splits: dict[str, dict[str, Any]] = of_type(
        dict[str, dict[str, Any]], content.get("splits", {}), "splits"
    )
    result[name], known = [], {item.name for item in fields(kind)}
    for split in sorted(
        splits, key=lambda each: (FIRST.index(each) if each in FIRST else len(FIRST), each)
    ):
        values = {key: value for key, value in splits[split].items() if key in known}
        if kind is Evaluated:
            metrics = of_type(dict[str, Any], values.get("metrics", {}), f"splits.{split}.metrics")
            others = {
                key: value for key, value in splits[split].items() if type(value) in (int, float)
            }
            values["metrics"] = metrics | others
        result[name].append(record(kind, values | {"name": split}, f"splits.{split}"))
    return result


# ---- tables --------------------------------------------------------------------------------------------------------


def with_header(corner: str, columns: Iterable[str], rows: Table) -> Table:
    header = [corner, *columns]
    return [header, *rows] if rows and len(header) > 1 else []


def splits_table(records: Records) -> Table:
    """Return a table with a column per split: the numbers of rows used, left out or cut, and the share of padding."""
    splits = records.splits
    rows = [[label, *(count(getattr(split, key)) for split in splits)] for label, key in ROWS]
    for note in {note: None for split in splits for note in split.notes}:
        rows.append(
            [
                note.replace("_", " ").capitalize(),
                *(count(split.notes.get(note)) for split in splits),
            ]
        )
    rows.append(
        ["Padding (share of all tokens)", *(share(split.padding_share) for split in splits)]
    )
    return with_header("", (split.name for split in splits), rows)


def labels_table(records: Records) -> Table:
    """Return a table with a row per label: its count in each split, and its share of the split's labels."""
    columns = {split.name: split.label_counts for split in records.splits if split.label_counts}
    counted = [label for counts in columns.values() for label in counts]
    rows = []
    for label in dict.fromkeys([*records.labels, *counted]):
        shares = ((counts.get(label, 0), sum(counts.values()) or 1) for counts in columns.values())
        rows.append(
            [label, *(f"{count(value)} ({share(value / total)})" for value, total in shares)]
        )
    return with_header("Label", columns, rows)


def metrics_table(records: Records) -> Table:
    """Return a table of an evaluation with a row per metric and a column per split."""
    columns = {split.name: split.metrics for split in records.evaluated}
    names = {name: None for metrics in columns.values() for name in metrics}
    rows = [
        [name.replace("_", " "), *(score(each.get(name)) for each in columns.values())]
        for name in names
    ]
    return with_header("", columns, rows)


def classes_table(evaluated: Evaluated) -> Table:
    """Return a table with a row per label: precision, recall, F1 and the number of examples with the label."""
    known = [label for label in evaluated.labels if label in evaluated.per_class]
    rows = []
    for label in dict.fromkeys([*known, *evaluated.per_class]):
        scores = evaluated.per_class[label]
        rows.append(
            [
                label,
                *(score(scores.get(name)) for name in SCORES[:-1]),
                count(scores.get("support")),
            ]
        )
    return with_header("Label", ("Precision", "Recall", "F1", "Support"), rows)
