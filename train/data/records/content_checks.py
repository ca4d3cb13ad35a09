"""The content checks of labelled rows: small functions from the facts of a table to a fault that rejects the data.

A wrong column or a wrong task would be learnt without a word. Each fault names the setting that decides. With
data.labels, or names of labels in the data, the labels are what the user says they are, and LABEL_CHECKS do not apply.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from train.config import check, shortlist

MAX_NUMBERS = 50  # numbers as labels; more are scores or ids, unless each has rows as a class has
ROWS_OF_A_CLASS = 10  # rows per number on average
MANY_LABELS = 20  # fewer labels are not compared with the number of rows
TRUTHS = {"true", "false"}
BITS = {"0", "1"}
WHOLE = re.compile(r"-?\d+")
PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
# The decimal point may be a comma, thousands may be separated, and per cent may stand behind the number.
NUMBER = re.compile(r"[+-]?(\d[\d,.']*|[.,]\d+)(e[+-]?\d+)?\s?%?", re.IGNORECASE)
ITEM = re.compile(r"""'[^']*'|"[^"]*"|[^,'"]+""")  # an item of a list written as text
CLASSES = "if each is a class, list all classes in data.labels"
SCORES = (
    "scores are learnt by regression (task=regress), not as classes; if each number is a class, list all of them, "
    "as in data.labels=[0,1,2]"
)


@dataclass
class TableFacts:
    """Facts about the rows of a split that have been read so far."""

    name: str  # the column or columns of the labels
    key: str  # of data.columns
    takes_lists: bool = False  # a row may have any number of labels
    takes_words: bool = False  # each word has a label
    counts: Counter[str] = field(default_factory=Counter)  # rows (or words) with each label
    widths: set[int] = field(default_factory=set)  # the numbers of values in the rows' lists
    unmapped: set[str] = field(default_factory=set)  # labels that a given data.label_map lacks
    rows: int = 0


Check = Callable[[TableFacts], str | None]


def reject_faults(facts: TableFacts, checks: Sequence[Check]) -> None:
    """Raise InputError with the first fault that the checks find."""
    for examine in checks:
        fault = examine(facts)
        check(fault is None, str(fault))


# ---- labels that no setting lists ------------------------------------------------------------------------------------


def multi_hot(facts: TableFacts) -> str | None:
    """Reject lists that are equally long, and have nothing but 0 and 1."""
    width = max(facts.widths, default=0)
    is_hot = len(facts.widths) == 1 and facts.counts.keys() <= BITS | TRUTHS
    if width < 2 or not is_hot:
        return None
    return (
        f"{facts.name} holds lists of {width} numbers, all 0 or 1: name the label that each stands for, as in "
        "data.labels=[A,B,C]; if each label has a column of its own: data.columns.label=[A,B,C]"
    )


def listed_as_text(facts: TableFacts) -> str | None:
    """Reject labels that are the text of a list. [a] is a name."""
    for name in facts.counts:
        items = items_of(name)
        if items and (len(items) > 1 or name[1] in "'\""):
            what = "which is a list: task=multilabel learns several labels per row"
            return f"{facts.name} holds {name!r:.40}, {what}; {CLASSES}"
    return None


def numbers(facts: TableFacts) -> str | None:
    """Reject numbers that are not whole, or more than classes of so few rows usually have."""
    found = list(filter(is_number, facts.counts))
    # Of codes, such as E11.9 and 401.9, some may be numbers.
    if 2 * len(found) < len(facts.counts):
        return None
    odd = [name for name in found if not WHOLE.fullmatch(name)]
    if odd:
        return f"the labels are numbers, but not all plain whole ones, such as {odd[0]}: {SCORES}"
    if len(found) > MAX_NUMBERS and is_sparse(facts, ROWS_OF_A_CLASS):
        many = f"more than {MAX_NUMBERS} different numbers, such as {found[0]}"
        return f"the labels are {many}: {SCORES}"
    return None


def joined(facts: TableFacts) -> str | None:
    """Reject labels whose parts are labels too. Tags of words may contain any sign."""
    if facts.takes_words:
        return None
    for name in facts.counts:
        for mark in ";|,":
            parts = [part.strip() for part in name.split(mark)]
            if sum(part in facts.counts for part in parts) > 1:
                learnt = f"task=multilabel with data.label_separator='{mark}' learns each of them"
                return f"the label {name[:40]!r} seems to be several labels: {learnt}; {CLASSES}"
    return None


def near_copies(facts: TableFacts) -> str | None:
    """Reject labels that differ only in capitals, blanks or Unicode's forms."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, _ in facts.counts.most_common():
        folded = unicodedata.normalize("NFKC", name).casefold()
        alike[" ".join(folded.split())].append(name)
    for names in alike.values():
        if len(names) > 1:
            shown = shortlist(list(map(repr, names)))
            pairs = ", ".join(f"{name!r}: {names[0]!r}" for name in names[1:])
            return (
                f"the labels {shown} differ only in capitals, blanks or the spelling of characters: "
                f"data.label_map={{{pairs}}} merges them; {CLASSES}"
            )
    return None


def nearly_unique(facts: TableFacts) -> str | None:
    """Reject labels that have fewer than two rows on average."""
    if not is_sparse(facts, 2):
        return None
    example = next(iter(facts.counts))
    return (
        f"{facts.name} has {len(facts.counts):,} different labels in {facts.counts.total():,} rows, such as "
        f"{example[:40]!r}: is data.columns.{facts.key} right? Or, {CLASSES}"
    )


LABEL_CHECKS: tuple[Check, ...] = (
    multi_hot,
    listed_as_text,
    numbers,
    joined,
    near_copies,
    nearly_unique,
)


# ---- other checks ----------------------------------------------------------------------------------------------------


def nothing_to_learn(facts: TableFacts) -> str | None:
    """Reject a single label that all training rows have, and lists of labels that are all empty."""
    right = f"so there is nothing to learn; is data.columns.{facts.key} right?"
    if facts.takes_lists and facts.rows and not facts.counts:
        return f"no row has a label, {right}"
    # If a row may have any number of labels, some rows may lack it.
    some_lack_it = facts.takes_lists and facts.counts.total() < facts.rows
    if len(facts.counts) != 1 or some_lack_it:
        return None
    return f"all rows have the label {next(iter(facts.counts))}, {right}"


def shortages(splits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield remarks on labels without rows. `splits`: the "label_counts" of each split."""
    for split, facts in splits.items():
        missing = [name for name, count in facts["label_counts"].items() if not count]
        if missing:
            cannot = {"train": "cannot be learnt"}.get(split, "is not measured")
            yield f"{split} has no row with the label {shortlist(missing)}: it {cannot}"


# ---- spellings -------------------------------------------------------------------------------------------------------


def is_number(name: str) -> bool:
    """Return whether a label is a number, in any usual spelling."""
    return NUMBER.fullmatch(name.strip()) is not None


def is_sparse(facts: TableFacts, rows: int) -> bool:
    """Return whether many labels have fewer than so many rows on average."""
    names = len(facts.counts)
    return names >= MANY_LABELS and facts.counts.total() < rows * names


def items_of(text: str) -> list[str] | None:
    """Return the items of a list that was written as text, such as ['a', 'b']; None if it is no such list."""
    text = text.strip()
    inner = text[1:-1]
    if text[:1] + text[-1:] != "[]" or any(mark in inner for mark in "[]{}"):
        return None
    if not any(mark in inner for mark in ",'\""):
        return inner.split()  # as numpy writes numbers
    return [item.strip(" '\"") for item in ITEM.findall(inner) if item.strip()]
