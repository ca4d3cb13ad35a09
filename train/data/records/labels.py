"""The labels of rows: their values in the data become names, and the names are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train.config import InputError, RecordsConfig, shortlist
from train.data.files.errors import BadRow
from train.data.records.content_checks import BITS, PLAIN_NUMBER, TRUTHS, TableFacts, items_of
from train.data.records.row import Row, names_in, plain, plain_label

if TYPE_CHECKING:
    from train.data.records.kinds import RowKind

MOST_LABELS = 20_000  # distinct labels; more are texts or ids, and would fill the memory


class LabelNames:
    """The mapping from labels in the data to their names. `known`: the only valid names; if empty, all are valid."""

    def __init__(
        self, cfg: RecordsConfig, kind: RowKind, column: str = "", known: Sequence[str] = ()
    ) -> None:
        self.facts = TableFacts(column, kind.target, kind.takes_lists, kind.takes_words)
        self.map = {plain_label(value): name for value, name in cfg.label_map.items()}
        self.is_mapped = any(cfg.label_map.values())
        self.known = list(known or cfg.labels)
        self.separator = cfg.label_separator
        self.spellings = {plain_label(name): name for name in self.known}

    def look_up(self, value: Any, names: Sequence[str] | None) -> tuple[str, str | None]:
        """Return a value's name in the data, and the label that data.label_map maps it to (None: leave the row out).

        `names`: the names that numbers in the data stand for, if any.
        """
        key = plain_label(value)
        if names is not None and type(value) is int and 0 <= value < len(names):
            is_by_number = key in self.map and plain_label(names[value]) not in self.map
            if not is_by_number:
                key = names[value]
        return key, self.map.get(plain_label(key), key)

    def of(self, value: Any, names: Sequence[str] | None) -> str | None:
        """Return the label for a value; None if the row is left out. `names`: see `look_up`.

        Raises BadRow if the label is unknown, and InputError if too many distinct labels have been seen.
        """
        key, name = self.look_up(value, names)
        if name is None:
            return None
        if name == "":
            raise BadRow("an empty label")
        if self.known:
            name = self.spellings.get(plain_label(name), name)
            if name not in self.known:
                labels = shortlist(self.known)
                raise BadRow(f"unknown label {key[:40]}; the labels are {labels}")
        counts = self.facts.counts
        counts[name] += 1
        if self.is_mapped and plain_label(key) not in self.map:
            self.facts.unmapped.add(name)
        if len(counts) > max(MOST_LABELS, len(self.known)):
            many = f"more than {MOST_LABELS:,} different labels, such as {name[:40]}"
            raise InputError(f"the data has {many}; is data.columns right?")
        return name

    def in_order(self) -> list[str]:
        """Return the names seen so far, in order.

        Numbers come in their order, and the names in data.label_map in that of the map; others are alphabetical.
        """
        names = sorted(self.facts.counts)
        if all(map(PLAIN_NUMBER.fullmatch, names)):
            return sorted(names, key=float)
        mapped = dict.fromkeys(name for name in self.map.values() if name in names)
        return list(dict.fromkeys([*mapped, *names]))


def label_of_row(row: Row, example: dict[str, Any], kind: RowKind, labels: LabelNames) -> Any:
    """Return the label of a row, or its list of labels; None if data.label_map leaves the row out.

    Raises BadRow if it has none.
    """
    value, column = row.value(kind.target), ", ".join(names_in(row.columns[kind.target]))
    if kind.takes_words:
        return labels_of_each(row, value, example[kind.split_by], kind, labels)
    if kind.takes_lists:
        if isinstance(row.columns[kind.target], tuple):
            value = columns_with(value, row.names or ())
        return labels_of_list(value, column, labels, row.names)
    if isinstance(value, list | dict | bytes):
        inside = f"data.columns.{kind.target}={column}.NAME reads a value inside an object"
        lists = f"task=multilabel learns lists of labels, and {inside}"
        raise BadRow(f"{column} holds {value!r:.40}, not a label: {lists}")
    return labels.of(value, row.names)


def columns_with(values: Sequence[Any], names: Sequence[str]) -> list[int]:
    """Return the indices of the columns that hold 1 or true. Raises BadRow unless the others hold 0 or false."""
    found = [plain_label(value) for value in values]
    for name, value, text in zip(names, values, found, strict=True):
        if text not in TRUTHS | BITS:
            raise BadRow(f"{name} holds {value!r:.40}, not 0 or 1")
    return [number for number, text in enumerate(found) if text in ("1", "true")]


def labels_of_list(
    value: Any, column: str, labels: LabelNames, names: Sequence[str] | None
) -> list[str]:
    """Return the distinct labels of a row, without those that data.label_map maps to null."""
    if isinstance(value, str):
        value = split_labels(value, column, labels.separator)
    if not isinstance(value, list) or any(isinstance(each, list | dict) for each in value):
        raise BadRow(f"{column} holds {value!r:.40}, not a list of labels")
    labels.facts.widths.add(len(value))
    if names is None and is_multi_hot(value, labels.known):
        value = [labels.known[number] for number in columns_with(value, labels.known)]
    found = dict.fromkeys(labels.of(each, names) for each in value)
    return [name for name in found if name is not None]


def split_labels(text: str, column: str, separator: str | None) -> list[str]:
    """Return the labels in a text: a list such as ['a', 'b'], or the parts between separators."""
    items = items_of(text)
    if items is not None:
        return items
    if separator is None:
        cure = "data.label_separator splits a text into labels"
        raise BadRow(f"{column} holds {text!r:.40}, not a list; {cure}")
    return [label for label in text.split(separator) if label.strip()]


def is_multi_hot(values: Sequence[Any], known: Sequence[str]) -> bool:
    """Return whether a list has a 0 or a 1 for each of the known labels, none of which has such a name."""
    bits = TRUTHS | BITS
    is_for_each = len(values) == len(known) > 1 and not bits & {*known}
    return is_for_each and {*map(plain_label, values)} <= bits


def labels_of_each(
    row: Row, values: Any, items: Sequence[str], kind: RowKind, labels: LabelNames
) -> list[str] | None:
    """Return the labels of all `items` of a row; None if data.label_map maps one of them to null."""
    if not isinstance(values, list) or len(values) != len(items):
        raise BadRow(f"{len(items)} words need a list of {len(items)} tags, not {values!r:.40}")
    labels.facts.add_words(items)
    found: list[str] = []
    for number, (item, value) in enumerate(zip(items, values, strict=True), 1):
        try:
            label = labels.of(checked_tag(value, kind), row.names)
            if label is None:
                return None
            assert kind.check_each is not None
            kind.check_each(label)
        except BadRow as bad:
            raise BadRow(f"word {number}, {item!r:.40}: {bad}") from None
        found.append(label)
    return found


def checked_tag(value: Any, kind: RowKind) -> Any:
    if isinstance(value, list | dict):
        one = f"task={kind.name} learns one for each word"
        raise BadRow(f"{value!r:.40} instead of a tag: {one}")
    if not plain(value).isprintable():
        raise BadRow(f"the tag {value!r:.40} has control characters")
    return value
