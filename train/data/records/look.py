"""A look at labelled rows: which task they are for and which columns it reads, by their names and their content.

Only what has one reading is decided here. Where two are possible, an InputError names the setting that decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from train.config import InputError, check, plural, shortlist
from train.data.records.columns import TAG_PREFIX, Column
from train.data.records.content_checks import BITS, PLAIN_NUMBER, TRUTHS, WHOLE, items_of
from train.data.records.examples import hint_on
from train.data.records.row import plain_label
from train.data.records.spans import type_of

LABEL_NAMES = ("label", "labels")  # these win over all other names
LABEL_ENDS = (
    *LABEL_NAMES,
    *("class", "classes", "category", "categories", "target", "targets", "sentiment", "emotion"),
    *("intent", "topic", "stars", "rating", "score", "similarity", "tags", "genre", "polarity"),
)
TEXT_ENDS = (
    *("text", "sentence", "tweet", "content", "review", "body", "comment", "message", "question"),
    *("utterance", "headline", "title", "document", "description", "abstract", "post"),
)
PAIRS = (
    ("premise", "hypothesis"),
    ("text", "text_pair"),
    ("question", "sentence"),
    ("query", "passage"),
    ("query", "document"),
)
PAIR_ENDS = (("1", "2"), ("_a", "_b"), ("a", "b"))
WORD_NAMES = ("tokens", "words")
TAG_NAMES = ("ner_tags", "tags", "labels", "ner", "label")
ANSWER_NAMES = ("answers", "answer")
SEPARATORS = ("|", ";", ",")
SEPARATED_SHARE = 0.05  # rows with a separator, at least, in a column of several labels
UNLABELLED = "-1"  # data sets on the Hub mark rows without a label so
MOST_WHOLE_CLASSES = 12  # different whole numbers; more may be classes or an amount


@dataclass(frozen=True)
class Reading:
    """A task, and the settings with which it reads the rows, by key."""

    task: str
    settings: dict[str, Any]
    unread: list[str] = field(default_factory=list)  # further columns of texts
    seen: str = ""  # what the column of labels holds


def reading_of(
    columns: Sequence[Column], typed: Mapping[str, Any], task: str | None = None
) -> Reading:
    """Return how rows are read. `typed`: settings that the user gave, by key; they hold.

    Raises InputError if the task or a column cannot be told, with the setting that tells it.
    """
    by_name = {column.name: column for column in columns}
    if task == "qa" or (task is None and {"question", "context"} <= by_name.keys()):
        return questions(by_name)
    spans = next((column.name for column in columns if column.holds_spans), None)
    words = first_of(WORD_NAMES, by_name)
    are_words = words is not None and by_name[words].holds_lists
    if task == "ner" or (task is None and (spans or are_words)):
        return entities(by_name, words, spans)
    return labelled_texts(by_name, typed, task)


def labelled_texts(
    by_name: Mapping[str, Column], typed: Mapping[str, Any], task: str | None
) -> Reading:
    """Return how rows of texts with labels are read."""
    columns = list(by_name.values())
    lower = {name.lower() for name in by_name}
    check(
        not {"word", "tag"} <= lower,
        "each row holds one word: write a row for each sentence, such as JSON lines with lists tokens and tags",
    )
    texts = [column.name for column in columns if column.is_text]
    every = shortlist([column.name for column in columns])
    first = {column.name: column.values[0] for column in columns if column.values}
    check(
        bool(texts) or "data.columns.text" in typed,
        f"no column holds texts of several words; the columns are: {every}; say which to read: data.columns.text=NAME"
        f"{hint_on(first, {})}",
    )
    targets = targets_of(columns, typed)
    found: dict[str, Any] = {"data.columns.label": targets}
    if len(targets) == 1:
        found["data.columns.label"] = targets[0]
    texts = [name for name in texts if name not in targets]
    read = texts_of(texts, typed)
    labels = [by_name[name] for name in targets if name in by_name]
    for column in labels:
        check(
            bool(column.values),
            f"no row has a value in {column.name}: name another data.columns.label",
        )
        check_flat(column)
    if task is None:
        task = task_of(labels)
    found |= read
    if len(labels) == 1:
        found |= details_of(labels[0], task)
    unread = [name for name in texts if name not in read.values()]
    if "data.columns.text" in typed:
        unread = []
    return Reading(task, found, unread, seen_in(labels, task))


def check_flat(label: Column) -> None:
    """Raise InputError if all values are objects, or lists that hold lists or objects."""
    if not all(map(is_nested, label.values)):
        return
    first = label.values[0]
    cure = ""
    if isinstance(first, dict):
        cure = f"; data.columns.label={label.name}.NAME reads a value inside an object"
    raise InputError(f"{label.name} holds {first!r:.40}, not a label or a list of labels{cure}")


def is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, list | dict) for item in value)
    return isinstance(value, dict)


def details_of(label: Column, task: str) -> dict[str, Any]:
    """Return the settings for the form of labels: the mark between several, and -1 for rows without a label."""
    separator = separator_of(label)
    if task == "multilabel" and separator is not None:
        return {"data.label_separator": separator}
    if task == "classify" and {"-1", "0", "1"} <= label.distinct:
        return {"data.label_map": {UNLABELLED: None}}
    return {}


def seen_in(labels: Sequence[Column], task: str) -> str:
    """Return in words what the columns of the labels hold."""
    if not labels:
        return ""
    if task == "multilabel":
        return counted(several_in(labels), "label", "labels")
    if len(labels) != 1 or labels[0].holds_lists:
        return ""
    names = sorted(labels[0].distinct)
    if UNLABELLED in details_of(labels[0], task).get("data.label_map", {}):
        names.remove(UNLABELLED)
    if labels[0].label_names and task == "classify":
        names = [*labels[0].label_names]
    if task == "classify":
        return counted(names, "class", "classes")
    if task == "regress" and all(map(PLAIN_NUMBER.fullmatch, names)):
        numbers = [float(name) for name in names]
        return f"numbers from {min(numbers):g} to {max(numbers):g}"
    return ""


def counted(names: Sequence[str], one: str, several: str) -> str:
    """Return the number of names and the first of them; "" if there are none."""
    if not names:
        return ""
    return f"{plural(len(names), one, several)} ({shortlist(names)})"


def several_in(labels: Sequence[Column]) -> list[str]:
    """Return the labels of rows that have several each; [] if the rows do not name them."""
    if len(labels) > 1:
        return [column.name for column in labels]
    (label,) = labels
    separator = separator_of(label)
    found = set[str]()
    for value in label.values:
        items = items_in(value)
        if separator is not None:
            items = value.split(separator)
        found.update(plain_label(str(item).strip()) for item in items)
    if found <= BITS | TRUTHS:  # one for each label
        return []
    return sorted(found - {""})


def items_in(value: Any) -> list[Any]:
    """Return the items of a list, which may be written as text; [] of other values."""
    if isinstance(value, str):
        return items_of(value) or []
    return value if isinstance(value, list) else []


def types_in(tags: Column) -> str:
    """Return in words which types of entities a column of tags or spans holds, or which plain tags."""
    if tags.holds_spans:
        types = {type_of(span) for value in tags.values for span in items_in(value)}
        return counted(sorted(types - {""}), "type of entities", "types of entities")
    found = tags.label_names or [tag for value in tags.values for tag in items_in(value)]
    names = {tag for tag in found if isinstance(tag, str) and tag != "O"}
    if tags.holds_plain_tags:
        return counted(sorted(names), "tag", "tags")
    types = {name[2:] for name in names if TAG_PREFIX.match(name)}
    return counted(sorted(types), "type of entities", "types of entities")


def first_of(names: Iterable[str], columns: Collection[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def questions(columns: Mapping[str, Column]) -> Reading:
    answers = first_of(ANSWER_NAMES, columns)
    if answers is None:
        return Reading("qa", {})
    return Reading("qa", {"data.columns.answers": answers})


def entities(columns: Mapping[str, Column], words: str | None, spans: str | None) -> Reading:
    """Return how texts with spans, or words with tags, are read."""
    found = {}
    tags = spans or first_of(TAG_NAMES, columns)
    if spans is not None:
        words = text_among([column.name for column in columns.values() if column.is_text])
    if words is not None:
        found["data.columns.tokens"] = words
    if tags is not None:
        found["data.columns.tags"] = tags
    if spans is None and tags is not None and columns[tags].holds_plain_tags:
        found["task.scheme"] = "none"
    seen = "" if tags is None else types_in(columns[tags])
    return Reading("ner", found, seen=seen)


# ---- labels ----------------------------------------------------------------------------------------------------------


def targets_of(columns: Sequence[Column], typed: Mapping[str, Any]) -> list[str]:
    """Return the column of the labels or numbers, or the columns that hold 0 or 1 for each of several labels."""
    given = typed.get("data.columns.label")
    if given is not None:
        names = given if isinstance(given, list) else [given]
        return [str(name) for name in names]
    names = [column.name for column in columns if not column.is_text]
    found = [column.name for column in columns if column.name.lower() in LABEL_NAMES]
    if not found:
        found = [name for name in names if last_word(name) in LABEL_ENDS]
    if len(found) == 1:
        return found
    if not found:
        bits = [column.name for column in columns if column.is_bit]
        if len(bits) > 1:
            return bits
        found = [column.name for column in columns if column.may_be_label]
    if len(found) == 1:
        return found
    every = shortlist([column.name for column in columns])
    if not found:
        raise InputError(
            f"no column looks like labels; the columns are: {every}; say which is: data.columns.label=NAME. "
            "Texts without labels are for pretraining: baretrain prepare"
        )
    raise InputError(
        f"several columns may be the label: {shortlist(found)}; say which is: data.columns.label={found[0]}"
    )


def last_word(name: str) -> str:
    """Return the last word of a column's name: "sentiment" of airline_sentiment and of airlineSentiment."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)
    return parts[-1].lower() if parts else ""


def task_of(labels: Sequence[Column]) -> str:
    """Return the task that learns these columns."""
    if len(labels) != 1:
        return "multilabel"
    label = labels[0]
    if not label.is_number:
        has_several = label.holds_lists or separator_of(label) is not None
        return "multilabel" if has_several else "classify"
    names = label.distinct
    if not all(map(WHOLE.fullmatch, names)):
        return "regress"
    if label.label_names or len(names) <= MOST_WHOLE_CLASSES:
        return "classify"
    raise InputError(
        f"{label.name} holds {len(names)} different whole numbers: task=regress learns an amount, "
        f"task=classify learns {len(names)} classes; say which"
    )


def separator_of(label: Column) -> str | None:
    """Return the character between several labels in one field, or None if each field holds one label."""
    texts = [value for value in label.values if isinstance(value, str)]
    if len(texts) < len(label.values) or label.holds_lists:
        return None
    for mark in SEPARATORS:
        several = [text for text in texts if mark in text.strip(mark)]
        parts = {part.strip() for text in texts for part in text.split(mark)}
        is_often = len(several) > SEPARATED_SHARE * len(texts)
        if is_often and len(parts) < len(label.distinct):
            return mark
    return None


# ---- texts -----------------------------------------------------------------------------------------------------------


def texts_of(texts: Sequence[str], typed: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings for the columns of the text, or of a pair. Raises InputError if `texts` allow several."""
    if "data.columns.text" in typed:
        return {}
    pair = pair_among(texts)
    if pair is not None and "data.columns.text_pair" not in typed:
        return {"data.columns.text": pair[0], "data.columns.text_pair": pair[1]}
    one = text_among(texts)
    other = [name for name in texts if name != one]
    if one is None or len(texts) == 2:
        first, *rest = [name for name in (one, *other) if name is not None]
        raise InputError(
            f"several columns hold texts: {shortlist(texts)}; say which to read: data.columns.text={first}, and for "
            f"pairs of texts also data.columns.text_pair={rest[0]}"
        )
    return {"data.columns.text": one}


def pair_among(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the names of the two texts of a pair, such as sentence1 and sentence2, or None."""
    by_lower = {name.lower(): name for name in names}
    ends = [
        (first, first.removesuffix(one) + two)
        for one, two in PAIR_ENDS
        for first in by_lower
        if first.endswith(one)
    ]
    for first, second in (*PAIRS, *ends):
        if first in by_lower and second in by_lower and first != second:
            return by_lower[first], by_lower[second]
    return None


def text_among(names: Sequence[str]) -> str | None:
    """Return the column of the text: the only one, or the one with the commonest name."""
    if len(names) == 1:
        return names[0]
    for end in TEXT_ENDS:
        found = [name for name in names if name.lower() == end]
        found = found or [name for name in names if last_word(name) == end]
        if len(found) == 1:
            return found[0]
    return None
