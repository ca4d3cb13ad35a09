"""The content checks of labelled rows: small functions from the facts of a table to a sentence.

A Fault rejects the data, because a wrong column or a wrong task would be learnt without a word. A Remark is a warning.
Each names the setting that decides. With data.labels, or names of labels in the data, the labels are what the user says
they are, and LABEL_CHECKS do not apply.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from train.config import check, plural, shortlist

MAX_NUMBERS = 50  # numbers as labels; more are scores or ids, unless each has rows as a class has
ROWS_OF_A_CLASS = 10  # rows per number on average; numbers from 0 or 1 need only two
MANY_LABELS = 20  # fewer labels are not compared with the number of rows
FEW_WORDS = 3  # words in sentences of several words; fewer say nothing about a column
FEW_EXAMPLES = 30  # with fewer examples in an evaluation, one answer changes a score by over 3 %
TRUTHS, BITS = {"true", "false"}, {"0", "1"}
WHOLE = re.compile(r"-?\d+")
PLAIN_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
# Thousands may be separated, the decimal point may be a comma, and a currency or per cent may stand beside the number.
NUMBER = re.compile(
    r"[+-]?[$€£¥]?\s?(\d{1,3}([,.'\u2019\s]\d{3})+|\d+)?([.,]\d*)?(e[+-]?\d+)?\s?[%‰$€£¥]?",
    re.IGNORECASE,
)
# These are numbers if other labels are numbers; else labels.
NO_NUMBER = re.compile(r"[+-]?(inf(inity)?|nan)", re.IGNORECASE)
MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
DATE = re.compile(
    rf"\d{{4}}([-/.])\d\d?\1\d\d?([ T].*)?|\d\d?([-/.])\d\d?\3(\d\d){{1,2}}|\d\d?:\d\d(:\d\d.*)?"
    rf"|\d\d?[ -.]({MONTHS})[a-z]*[ -.]\d{{2,4}}|({MONTHS})[a-z]* \d\d?,? \d{{4}}",
    re.IGNORECASE,
)
PARTS = re.compile(r"""'[^'\\]*'|"[^"\\]*"|[^\s,'"][^,'"]*""")  # items of a list written as text
NO_LETTER = re.compile(r"[\W\d_]+")
SELECTORS = "\ufe0e\ufe0f"  # choose whether a sign is drawn as text or as emoji
BRACKETS = ("[]", "{}", "()")
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
    words: int = 0  # words in sentences of several words
    has_words: bool = False  # in some sentence, words differ in their letters
    rows: int = 0
    lines: int = 0  # lines of CSV from which the rows were read; 0: they are not CSV

    def add_words(self, words: Sequence[str]) -> None:
        if len(words) > 1 and not self.has_words:
            self.words += len(words)
            self.has_words = len({NO_LETTER.sub("", word) for word in words}) > 1


class Remark(str):
    """A sentence for the log."""


class Fault(str):
    """A sentence that rejects the data."""


Check = Callable[[TableFacts], Remark | Fault | None]


def remarks_on(facts: TableFacts, checks: Sequence[Check]) -> list[str]:
    """Return the remarks of the checks. Raises InputError with the first fault."""
    remarks: list[str] = []
    for examine in checks:
        said = examine(facts)
        check(not isinstance(said, Fault), str(said))
        if said is not None:
            remarks.append(said)
    return remarks


# ---- labels that no setting lists ------------------------------------------------------------------------------------


def multi_hot(facts: TableFacts) -> Fault | None:
    """Reject lists that are equally long, and have nothing but 0 and 1."""
    width = max(facts.widths, default=0)
    is_hot = len(facts.widths) == 1 and facts.counts.keys() <= BITS | TRUTHS
    if not facts.takes_lists or width < 2 or not is_hot:
        return None
    names = ",".join("ABC"[:width])
    if width > len("ABC"):
        names += ",..."
    return Fault(
        f"{facts.name} holds lists of {width} numbers, all 0 or 1: name the label that each stands for, as in "
        f"data.labels=[{names}]; if each label has a column of its own: data.columns.label=[{names}]"
    )


def listed_as_text(facts: TableFacts) -> Fault | None:
    """Reject labels that are the text of a list or an object."""
    for name in filter(is_list, facts.counts):
        what = "which is a list: task=multilabel learns several labels per row"
        if items_of(name) is None:
            own = f"a column of its own (data.columns.{facts.key})"
            what = f"which is an object: write the value in it into {own}"
        return Fault(f"{facts.name} holds {name!r:.40}, {what}; {CLASSES}")
    return None


def truths_and_bits(facts: TableFacts) -> Fault | None:
    """Reject labels among which true may mean 1."""
    names = facts.counts.keys()
    if not TRUTHS & names or not BITS & names:
        return None
    return Fault(
        f"the labels are {shortlist(sorted(names))}, where true may mean 1: "
        f"data.label_map={{true: 1, false: 0}} merges the two; {CLASSES}"
    )


def dates(facts: TableFacts) -> Remark | Fault | None:
    """Reject dates and times, even with some words among them."""
    found = list(filter(DATE.fullmatch, facts.counts))
    if not found:
        return None
    if not is_most(found, facts):
        return odd_one(facts, found[0])
    right = f"is data.columns.{facts.key} right?"
    return Fault(
        f"{facts.name} holds the date or time {found[0]}, not a label: {right} Or, {CLASSES}"
    )


def fractions(facts: TableFacts) -> Remark | Fault | None:
    """Reject numbers of which some are not whole, even with some words such as n/a among them."""
    found = [name for name in facts.counts if is_number(name)]
    if found:
        found += filter(NO_NUMBER.fullmatch, facts.counts)
    odd = [name for name in found if not WHOLE.fullmatch(name)]
    if not odd or are_codes(found):
        return None
    if not is_most(found, facts):
        return odd_one(facts, odd[0])
    return Fault(
        f"the labels are numbers, but not all plain whole ones, such as {odd[0]}: {SCORES}"
    )


def many_numbers(facts: TableFacts) -> Remark | Fault | None:
    """Reject more numbers than classes of so few rows usually have."""
    found = list(filter(WHOLE.fullmatch, facts.counts))
    if len(found) <= MAX_NUMBERS or are_codes(found):
        return None
    rows = ROWS_OF_A_CLASS
    if counts_up(found):
        rows = 2
    if is_most(found, facts) and is_sparse(facts, rows):
        many = f"more than {MAX_NUMBERS} different numbers, such as {max(found, key=int)}"
        return Fault(f"the labels are {many}: {SCORES}")
    return Remark(
        f"{len(found):,} different numbers in {facts.name} are learnt as classes; if they are scores, task=regress "
        "learns them as numbers"
    )


def joined(facts: TableFacts) -> Remark | Fault | None:
    """Reject labels whose parts are labels too. Remark on others with a mark that often separates labels."""
    remark = None
    for name, mark in with_mark(facts):
        if sum(part in facts.counts for part in parts_of(name, mark)) > 1:
            return Fault(several(facts, name, mark))
        if remark is None and mark != ",":
            remark = Remark(several(facts, name, mark))
    return remark


def near_copies(facts: TableFacts) -> Fault | None:
    """Reject labels that differ only in capitals, blanks, Unicode's forms or leading zeros."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name, _ in facts.counts.most_common():
        alike[folded(name)].append(name)
    for names in alike.values():
        if len(names) > 1:
            shown = shortlist(list(map(repr, names)))
            pairs = ", ".join(f"{name!r}: {names[0]!r}" for name in names[1:])
            return Fault(
                f"the labels {shown} differ only in capitals, blanks or the spelling of characters: "
                f"data.label_map={{{pairs}}} merges them; {CLASSES}"
            )
    return None


def nearly_unique(facts: TableFacts) -> Fault | None:
    """Reject labels that have fewer than two rows on average."""
    if not is_sparse(facts, 2):
        return None
    example = next(iter(facts.counts))
    return Fault(
        f"{facts.name} has {len(facts.counts):,} different labels in {facts.counts.total():,} rows, such as "
        f"{example[:40]!r}: is data.columns.{facts.key} right? Or, {CLASSES}"
    )


LABEL_CHECKS: tuple[Check, ...] = (
    *(multi_hot, listed_as_text, truths_and_bits, dates, fractions, many_numbers),
    *(joined, near_copies, nearly_unique),
)


# ---- rows for training -----------------------------------------------------------------------------------------------


def no_label(facts: TableFacts) -> Fault | None:
    """Reject lists of labels that are all empty."""
    if not facts.takes_lists or facts.counts or not facts.rows:
        return None
    return Fault(
        f"no row has a label, so there is nothing to learn; is data.columns.{facts.key} right?"
    )


def one_label(facts: TableFacts) -> Fault | None:
    """Reject a single label. If a row may have any number of labels, some rows may lack it."""
    some_lack_it = facts.takes_lists and facts.counts.total() < facts.rows
    if len(facts.counts) != 1 or some_lack_it:
        return None
    (name,) = facts.counts
    nothing = f"all rows have the label {name}, so there is nothing to learn"
    return Fault(f"{nothing}; is data.columns.{facts.key} right?")


TRAIN_CHECKS: tuple[Check, ...] = (no_label, one_label)


# ---- any rows --------------------------------------------------------------------------------------------------------


def no_words(facts: TableFacts) -> Fault | None:
    """Reject sentences whose words differ in digits and signs alone, as numbers and ids do."""
    if facts.has_words or facts.words < FEW_WORDS:
        return None
    return Fault(
        "the words of each sentence differ in nothing but digits and signs, as numbers or ids do: set "
        "data.columns.tokens (in CoNLL files, columns are counted from 0)"
    )


def left_unmapped(facts: TableFacts) -> Remark | None:
    """Remark on labels that data.label_map does not name, if it names others."""
    if not facts.unmapped:
        return None
    some = shortlist(sorted(facts.unmapped))
    return Remark(f"data.label_map does not name {some}: these labels are left unchanged")


def lines_in_rows(facts: TableFacts) -> Remark | None:
    """Remark on fields of CSV that contain lines, which may be rows that a quotation mark has swallowed."""
    if facts.lines in (0, facts.rows):
        return None
    read = f"{facts.lines:,} lines were read as {facts.rows:,} rows"
    return Remark(f"{read}: if no text has line ends, set data.quotes=none")


ROW_CHECKS: tuple[Check, ...] = (no_words, left_unmapped, lines_in_rows)


def shortages(splits: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield remarks on labels without rows, and on small validation splits.

    `splits`: the number of "examples" and the "label_counts" of each split.
    """
    for split, facts in splits.items():
        missing = [name for name, count in facts["label_counts"].items() if not count]
        if missing:
            cannot = {"train": "cannot be learnt"}.get(split, "is not measured")
            yield f"{split} has no row with the label {shortlist(missing)}: it {cannot}"
        rows = facts["examples"]
        if split != "train" and rows < FEW_EXAMPLES:
            what = f"{split} has only {plural(rows, 'example')}"
            yield f"{what}: one answer moves a score by {1 / rows:.0%}; hold out at least {FEW_EXAMPLES}"


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


def is_most(names: list[str], facts: TableFacts) -> bool:
    """Return whether at least half of the labels are these. Of codes, such as E11.9 and 401.9, some may be."""
    return bool(names) and 2 * len(names) >= len(facts.counts)


def is_sparse(facts: TableFacts, rows: int) -> bool:
    """Return whether many labels have fewer than so many rows on average."""
    names = len(facts.counts)
    return names >= MANY_LABELS and facts.counts.total() < rows * names


def folded(name: str) -> str:
    """Return a label without the differences that people do not see or do not mean."""
    text = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
    is_hidden = {letter: unicodedata.category(letter) == "Cf" for letter in text}
    visible = "".join(
        letter for letter in text if not is_hidden[letter] and letter not in SELECTORS
    )
    if WHOLE.fullmatch(visible):
        return str(int(visible))
    return unicodedata.normalize("NFKC", visible)


def parts_of(name: str, mark: str) -> list[str]:
    return [part.strip() for part in name.split(mark)]


def with_mark(facts: TableFacts) -> Iterator[tuple[str, str]]:
    """Yield the labels that a mark separates into parts, with the mark. Tags of words may contain any sign."""
    if facts.takes_words:
        return
    for name in facts.counts:
        for mark in ";|,":
            if mark in name and all(parts_of(name, mark)):
                yield name, mark


def odd_one(facts: TableFacts, name: str) -> Remark:
    without = f"data.label_map={{{name!r}: null}} leaves its rows out"
    looks = f"{facts.name} also holds {name}, which looks like a number or a date"
    return Remark(f"{looks}: if it is no class, {without}")


def several(facts: TableFacts, name: str, mark: str) -> str:
    task = "task=multilabel with "
    if facts.takes_lists:
        task = ""
    learnt = f"{task}data.label_separator='{mark}' learns each of them"
    return f"the label {name[:40]!r} seems to be several labels: {learnt}; {CLASSES}"


def is_list(name: str) -> bool:
    """Return whether a label looks like a list or an object that was written as text. (a) and [a] are names."""
    if name[:1] + name[-1:] not in BRACKETS:
        return False
    inner = name[1:-1].strip()
    if inner[:1] in ("'", '"'):
        return True
    return name[0] != "(" and (not inner or "," in inner or inner[0] in "0123456789[{")


def items_of(text: str) -> list[str] | None:
    """Return the items of a list that was written as text, such as ['a', 'b']; None if it is no such list."""
    text = text.strip()
    bracket, inner = text[:1], text[1:-1]
    if bracket + text[-1:] not in BRACKETS or (bracket != "[" and inner[:1].isalpha()):
        return None  # no list, or a name such as (none)
    found = [part.strip() for part in PARTS.findall(inner)]
    plain = [part for part in found if part[0] not in "'\""]
    unread = PARTS.sub("", inner).strip(", \t\r\n")
    marks = set("[]{}()")
    if bracket == "{":
        marks.add(":")  # an object
    if unread or any(marks & set(part) for part in plain):
        return None
    if len(found) == 1 and all(map(is_number, found[0].split())):
        return found[0].split()  # as numpy writes numbers
    return [part[1:-1] if part[0] in "'\"" else part for part in found]
