"""The content checks of a label column whose labels no setting lists: small functions from its facts to a sentence.

A sentence of ERRORS rejects the data, because a wrong column or a wrong task would be learnt without a word. A sentence
of REMARKS is a warning. Each names the setting that decides. With data.labels, or names of labels in the data, the
labels are what the user says they are, and nothing is checked.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from train.config import check, shortlist

# distinct numbers as labels; more are scores or ids, unless each has rows as a class has
MAX_NUMBERS = 50
ROWS_OF_A_CLASS = 10  # rows per number on average; numbers that count from 0 or 1 need only two
MANY_LABELS = 20  # fewer labels are not compared with the number of rows
TRUTHS, BITS = {"true", "false"}, {"0", "1"}
WHOLE = re.compile(r"-?\d+")
PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
# Thousands may be separated, the decimal point may be a comma, and a currency or per cent may stand beside the number.
NUMBER = re.compile(
    r"[+-]?[$€£¥]?\s?(\d{1,3}([,.'\u2019\s]\d{3})+|\d+)?([.,]\d*)?(e[+-]?\d+)?\s?[%‰$€£¥]?",
    re.IGNORECASE,
)
# numbers if other labels are numbers; else labels
NO_NUMBER = re.compile(r"[+-]?(inf(inity)?|nan)", re.IGNORECASE)
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
DATE = re.compile(
    rf"\d{{4}}([-/.])\d\d?\1\d\d?([ T].*)?|\d\d?([-/.])\d\d?\3(\d\d){{1,2}}|\d\d?:\d\d(:\d\d.*)?"
    rf"|\d\d?[ -.]({MONTHS})[a-z]*[ -.]\d{{2,4}}|({MONTHS})[a-z]* \d\d?,? \d{{4}}",
    re.IGNORECASE,
)
# the items of a list that was written as text
PARTS = re.compile(r"""'[^'\\]*'|"[^"\\]*"|[^\s,'"][^,'"]*""")
SELECTORS = "\ufe0e\ufe0f"  # choose whether a sign is drawn as text or as emoji
BRACKETS = ("[]", "{}", "()")


@dataclass(frozen=True)
class LabelColumn:
    """Facts about the labels that the rows of a split have."""

    name: str  # the column or columns in the data
    key: str  # of data.columns
    counts: Mapping[str, int]  # the number of rows (or words) with each label
    takes_lists: bool = False  # a row may have any number of labels
    takes_words: bool = False  # each word has a label
    widths: Set[int] = frozenset()  # the numbers of values in the rows' lists


def check_column(column: LabelColumn) -> list[str]:
    """Return the remarks on a column. Raises InputError with the first sentence of ERRORS that applies to it."""
    for error in ERRORS:
        said = error(column)
        check(said is None, said or "")
    return [said for remark in REMARKS if (said := remark(column)) is not None]


# ---- errors ----------------------------------------------------------------------------------------------------------


def multi_hot(column: LabelColumn) -> str | None:
    """Return an error if all lists are equally long, and have nothing but 0 and 1."""
    (width,) = column.widths if len(column.widths) == 1 else (0,)
    if not column.takes_lists or width < 2 or not column.counts.keys() <= BITS | TRUTHS:
        return None
    names = ",".join("ABC"[:width]) + (",..." if width > 3 else "")
    return (
        f"{column.name} holds lists of {width} numbers, all 0 or 1: name the label that each stands for, as in "
        f"data.labels=[{names}]; if each label has a column of its own: data.columns.label=[{names}]"
    )


def listed_as_text(column: LabelColumn) -> str | None:
    """Return an error if a label is the text of a list or an object."""
    found = next(filter(is_list, column.counts), None)
    if found is None:
        return None
    what = "which is a list: task=multilabel learns several labels per row"
    if items_of(found) is None:
        what = f"which is an object: write the value in it into a column of its own (data.columns.{column.key})"
    return f"{column.name} holds {found!r:.40}, {what}; if it is the name of a class, list all classes in data.labels"


def truths_and_bits(column: LabelColumn) -> str | None:
    """Return an error if true may mean 1."""
    if not (TRUTHS & column.counts.keys() and BITS & column.counts.keys()):
        return None
    return (
        f"the labels are {shortlist(sorted(column.counts))}, where true may mean 1: "
        "data.label_map={true: 1, false: 0} merges the two; if each label is a class, list all in data.labels"
    )


def scores(column: LabelColumn) -> str | None:
    """Return an error if labels are scores, even with some words such as n/a among them."""
    found = [name for name in column.counts if is_number(name)]
    found += [name for name in column.counts if found and NO_NUMBER.fullmatch(name)]
    if not is_most(found, column) or are_codes(found):
        return None
    odd = next((name for name in found if not WHOLE.fullmatch(name)), None)
    what = "numbers, but not all plain whole ones"
    if odd is None:
        rows = 2 if counts_up(found) else ROWS_OF_A_CLASS
        if len(found) <= MAX_NUMBERS or not is_sparse(column, rows):
            return None
        odd, what = max(found, key=int), f"more than {MAX_NUMBERS} different numbers"
    return (
        f"the labels are {what}, such as {odd}: scores are learnt by regression (task=regress), not as classes; "
        "if each number is a class, list all of them, as in data.labels=[0,1,2]"
    )


def dates(column: LabelColumn) -> str | None:
    """Return an error if labels are dates or times, even with some words among them."""
    found = list(filter(DATE.fullmatch, column.counts))
    if not is_most(found, column):
        return None
    return (
        f"{column.name} holds the date or time {found[0]}, not a label: is data.columns.{column.key} right? "
        "If it is the name of a class, list all classes in data.labels"
    )


def near_copies(column: LabelColumn) -> str | None:
    """Return an error if labels differ only in capitals, blanks, Unicode's forms or leading zeros."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in sorted(column.counts, key=column.counts.__getitem__, reverse=True):
        alike[folded(name)].append(name)
    same = next((names for names in alike.values() if len(names) > 1), None)
    if same is None:
        return None
    pairs = ", ".join(f"{name!r}: {same[0]!r}" for name in same[1:])
    return (
        f"the labels {shortlist(list(map(repr, same)))} differ only in capitals, blanks or the spelling of characters: "
        f"data.label_map={{{pairs}}} merges them; if each is a class, list all classes in data.labels"
    )


def nearly_unique(column: LabelColumn) -> str | None:
    """Return an error if labels have fewer than two rows on average."""
    total, names = sum(column.counts.values()), column.counts
    if not is_sparse(column):
        return None
    example = next(iter(names))
    return (
        f"{column.name} has {len(names):,} different labels in {total:,} rows, such as {example[:40]!r}: is "
        f"data.columns.{column.key} right? If each is a class, list all classes in data.labels"
    )


def joined(column: LabelColumn) -> str | None:
    """Return an error if parts of a label are labels too."""
    for found, mark in with_mark(column, ";|,"):
        if sum(part in column.counts for part in parts_of(found, mark)) > 1:
            return several(column, found, mark)
    return None


# ---- remarks ---------------------------------------------------------------------------------------------------------


def maybe_joined(column: LabelColumn) -> str | None:
    """Return a remark if a label has a mark that often separates labels."""
    return next((several(column, *found) for found in with_mark(column, ";|")), None)


def numbers_and_names(column: LabelColumn) -> str | None:
    """Return a remark if some labels look like scores or dates, and most do not."""
    found = [name for name in column.counts if is_number(name) or DATE.fullmatch(name)]
    odd = next((name for name in found if not WHOLE.fullmatch(name)), None)
    if odd is None or is_most(found, column) or are_codes(found):
        return None
    return (
        f"{column.name} also holds {odd}, which looks like a number or a date: if it is no class, "
        f"data.label_map={{{odd!r}: null}} leaves its rows out"
    )


def many_numbers(column: LabelColumn) -> str | None:
    """Return a remark if many numbers are classes."""
    found = [name for name in column.counts if WHOLE.fullmatch(name)]
    if len(found) <= MAX_NUMBERS or are_codes(found):
        return None
    return (
        f"{len(found):,} different numbers in {column.name} are learnt as classes; if they are scores, task=regress "
        "learns them as numbers"
    )


Check = Callable[[LabelColumn], str | None]
ERRORS: tuple[Check, ...] = (
    multi_hot,
    listed_as_text,
    truths_and_bits,
    dates,
    scores,
    joined,
    near_copies,
    nearly_unique,
)
REMARKS: tuple[Check, ...] = (maybe_joined, numbers_and_names, many_numbers)


# ---- spellings -------------------------------------------------------------------------------------------------------


def is_number(name: str) -> bool:
    """Return whether a label is a number, in any usual spelling."""
    text = unicodedata.normalize("NFKC", name).replace("\N{MINUS SIGN}", "-").strip()
    return NUMBER.fullmatch(text) is not None and any(map(str.isdigit, text))


def counts_up(names: list[str]) -> bool:
    """Return whether whole numbers are 0, 1, 2, ... or 1, 2, 3, ..., without a gap."""
    values = sorted(map(int, names))
    return values[:1] in ([0], [1]) and values == list(range(values[0], values[0] + len(values)))


def are_codes(names: list[str]) -> bool:
    """Return whether a number is written with leading zeros, as in codes such as 004 and 008.45."""
    return any(name[0] == "0" and name[1:2].isdigit() for name in names)


def is_most(names: list[str], column: LabelColumn) -> bool:
    """Return whether at least half of the labels are these. Of codes, such as E11.9 and 401.9, some may be."""
    return bool(names) and 2 * len(names) >= len(column.counts)


def is_sparse(column: LabelColumn, rows: int = 2) -> bool:
    """Return whether many labels have fewer than so many rows on average."""
    return len(column.counts) >= MANY_LABELS and sum(column.counts.values()) < rows * len(
        column.counts
    )


def folded(name: str) -> str:
    """Return a label without the differences that people do not see or do not mean."""
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    visible = "".join(
        letter
        for letter in text
        if unicodedata.category(letter) != "Cf" and letter not in SELECTORS
    )
    return (
        str(int(visible)) if WHOLE.fullmatch(visible) else unicodedata.normalize("NFKC", visible)
    )


def parts_of(name: str, mark: str) -> list[str]:
    return [part.strip() for part in name.split(mark)]


def with_mark(column: LabelColumn, marks: str) -> Iterator[tuple[str, str]]:
    """Yield the labels that a mark separates into parts, with the mark. Tags of words may contain any sign."""
    pairs = ((name, mark) for name in column.counts for mark in marks if not column.takes_words)
    return ((name, mark) for name, mark in pairs if mark in name and all(parts_of(name, mark)))


def several(column: LabelColumn, name: str, mark: str) -> str:
    task = "" if column.takes_lists else "task=multilabel with "
    return (
        f"the label {name[:40]!r} seems to be several labels: {task}data.label_separator='{mark}' learns each of "
        "them; if it is the name of a class, list all classes in data.labels"
    )


def is_list(name: str) -> bool:
    """Return whether a label looks like a list or an object that was written as text. (a) and [a] are names."""
    if name[:1] + name[-1:] not in BRACKETS:
        return False
    inner = name[1:-1].strip()
    return inner[:1] in ("'", '"') or (
        name[0] != "(" and (not inner or "," in inner or inner[0] in "0123456789[{")
    )


def items_of(text: str) -> list[str] | None:
    """Return the items of a list that was written as text, such as ['a', 'b']; None if it is no such list."""
    text = text.strip()
    if text[:1] + text[-1:] not in BRACKETS:
        return None
    inner = text[1:-1]
    if text[0] in "({" and inner[:1].isalpha():
        return None  # a name, such as (none)
    found = [part.strip() for part in PARTS.findall(inner)]
    rest = PARTS.sub("", inner)
    if rest.strip(", \t\r\n") or any(
        mark in part for part in found for mark in "[]{}()" if part[0] not in "'\""
    ):
        return None
    if any(":" in part for part in found if text[0] == "{" and part[0] not in "'\""):
        return None
    if len(found) == 1 and all(map(is_number, found[0].split())):
        return found[0].split()  # as numpy writes numbers
    return [part[1:-1] if part[0] in "'\"" else part for part in found]
