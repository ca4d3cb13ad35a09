"""Tables of data.json (labelled data) and evaluation.json (of the exported weights), which are optional.

Values of the wrong type are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from train.config import InputError
from train.config.checks import LARGEST_FLOAT, shortlist
from train.observe.report.texts import as_text, count, score, share
from train.storage.folders import Folder
from train.storage.schema import BadContent, read_json

READ = (
    "examples",
    "bad_rows",
    "left_out",
)  # the keys in data.json that add up to the rows of the files
ROWS = (  # rows of the table of splits: label, and key in data.json
    ("Bad rows, left out", "bad_rows"),
    ("Left out by data.label_map", "left_out"),
    ("Rows that the model sees", "rows"),
    ("Used by this run", "used_rows"),
)
# columns of the table of labels
SCORES = {"Precision": "precision", "Recall": "recall", "F1": "f1"}
Values = Mapping[str, Any]
Table = list[list[str]]  # the first row is the header


@dataclass(frozen=True)
class Records:
    data: Values = field(default_factory=dict)
    evaluation: Values = field(default_factory=dict)

    @property
    def labels(self) -> list[str]:
        return texts(self.data, "labels")

    @property
    def note(self) -> str:
        """A sentence about an architecture that reads padding."""
        return as_text(self.data.get("note", ""))

    @property
    def step(self) -> float | None:
        """The step of the evaluation."""
        return number(self.evaluation, "step")


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
    data = read_mapping(folder, "data.json", read_json)
    evaluation = read_mapping(folder, "evaluation.json", read_json)
    if not data and not evaluation:
        return None
    return Records(data, evaluation)


def number(values: Values, key: str) -> float | None:
    """Return the value of a key if it is a finite number, else None."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST_FLOAT else None


def numbers(values: Values) -> dict[str, float]:
    """Return the finite numbers among the values."""
    found = {key: number(values, key) for key in values}
    return {key: value for key, value in found.items() if value is not None}


def mapping(values: Values, key: str) -> dict[str, Any]:
    found = values.get(key)
    if isinstance(found, dict):
        return found
    return {}


def texts(values: Values, key: str) -> list[str]:
    found = values.get(key)
    if isinstance(found, list):
        return [as_text(each) for each in found]
    return []


def splits_of(content: Values) -> dict[str, dict[str, Any]]:
    """Return the splits in a file: train and validation first, then the others by name."""
    splits = mapping(content, "splits")
    usual = [name for name in ("train", "validation") if name in splits]
    others = sorted(splits.keys() - {*usual})
    return {name: mapping(splits, name) for name in [*usual, *others]}


# ---- tables --------------------------------------------------------------------------------------------------------


def table_of(corner: str, columns: dict[str, dict[str, str]], missing: str = "unknown") -> Table:
    """Return a table with a row for each key of the columns; [] if there is none. The first row is the header."""
    labels = {label: None for column in columns.values() for label in column}
    if not labels:
        return []
    table = [[corner, *columns]]
    for label in labels:
        values = [column.get(label, missing) for column in columns.values()]
        table.append([label, *values])
    return table


def splits_table(records: Records) -> Table:
    """Return a table with a column per split: the rows of the files, and how many are used, left out or cut."""
    columns = {}
    for name, split in splits_of(records.data).items():
        read = sum(number(split, key) or 0 for key in READ)
        column = {"Rows of the files": count(read)}
        for label, key in ROWS:
            column[label] = count(number(split, key))
        for note, value in numbers(mapping(split, "notes")).items():
            label = note.replace("_", " ").capitalize()
            column[label] = count(value)
        columns[name] = column
    return table_of("", columns)


def remarks(records: Records) -> Iterator[str]:
    """Yield a remark for each split of an evaluation that has classes which the model never finds."""
    for name, split in splits_of(records.evaluation).items():
        missed = []
        for label, _, recall, _, support in classes_table(split)[1:]:
            if recall in ("0", "0.0000") and support not in ("0", "unknown"):
                missed.append(f"{label} (0 of {support})")
        if missed:
            yield f"{name}: the model never finds {shortlist(missed)}: recall 0"


def labels_table(records: Records) -> Table:
    """Return a table with a row per label: its count in each split, and its share of the split's labels."""
    columns = {}
    for name, split in splits_of(records.data).items():
        counts = dict.fromkeys(records.labels, 0.0)
        counts |= numbers(mapping(split, "label_counts"))
        total = sum(counts.values())
        if not total:
            continue
        column = {}
        for label, value in counts.items():
            column[label] = f"{count(value)} ({share(value / total)})"
        columns[name] = column
    return table_of("Label", columns, missing="0 (0.0%)")


def metrics_table(records: Records) -> Table:
    """Return a table of an evaluation with a row per metric, or related number, and a column per split."""
    columns = {}
    for name, split in splits_of(records.evaluation).items():
        column = {}
        for values in (mapping(split, "metrics"), split):
            for key, value in numbers(values).items():
                column[key.replace("_", " ")] = score(value)
        columns[name] = column
    return table_of("", columns)


def classes_table(split: Values) -> Table:
    """Return a table with a row per label: precision, recall, F1 and the number of examples with the label."""
    known = mapping(split, "per_class")
    if not known:
        return []
    table = [["Label", *SCORES, "Support"]]
    for label in known:
        values = mapping(known, label)
        scores = [score(number(values, key)) for key in SCORES.values()]
        table.append([label, *scores, count(number(values, "support"))])
    return table


def confusion_table(split: Values) -> Table:
    """Return the confusion matrix: a row per true label, a column per predicted one; [] without a matrix."""
    labels = texts(split, "labels")
    rows = split.get("confusion")
    if not rows or not isinstance(rows, list) or len(rows) != len(labels):
        return []
    table = [["true, by predicted", *labels]]
    for label, row in zip(labels, rows, strict=True):
        counts = []
        if isinstance(row, list):
            counts = [as_text(each) for each in row]
        table.append([label, *counts])
    return table
