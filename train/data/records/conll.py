"""Sentences in columns, as in CoNLL-2003: a line per word, a blank line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from train.config import ColumnsConfig, check
from train.data.files.errors import BadRow, unreadable
from train.data.files.rows import Values

TAG = re.compile(r"O|[BIESLU]-\S(.*\S)?")  # O: the word is in no entity
MAX_WORDS = 10_000  # words per sentence; more suggest a file without blank lines
IN_FILES = {"tokens": "0", "tags": "-1"}  # read if data.columns has the default names
DOCUMENT = "-DOCSTART-"  # marks the beginning of a document; not a word
COMMENT = ("# ", "#\t")
TABS, BLANKS = re.compile(r" *\t *"), re.compile(r"[ \t]+")
UNIVERSAL = 10  # the column count of CoNLL-U, in which lines numbered 1-2 or 1.1 are not words
NO_WORD = re.compile(r"\d+[-.]\d+")

Line = tuple[int, str, list[str]]  # number, text and columns


def conll_rows(
    lines: Iterable[str], name: str, encoding: str, given: ColumnsConfig
) -> Iterator[tuple[int, Values]]:
    """Yield each sentence's first line number, with its `tokens` and, if there are several columns, its `tags`.

    Columns are separated by tabs or, in lines without tabs, by blanks. All words of a file must have the same number of
    columns. Raises InputError if a column that `given` names does not exist.
    """
    columns = token = tag = 0
    for block in blocks(lines):
        words = words_in(block, columns or len(block[-1][2]))
        if not words:
            continue
        first = words[0][0]
        if not columns:
            columns = len(words[0][2])
            token = column_of("tokens", given, columns, f"{name}:{first}")
            tag = column_of("tags", given, columns, f"{name}:{first}")
            same = f"data.columns.tokens and data.columns.tags are both column {token}"
            check(columns == 1 or token != tag, f"{name}:{first}: {same}")
        fault = fault_of(words, columns, encoding)
        if fault is not None:
            yield fault
            continue
        row: dict[str, list[str]] = {"tokens": [fields[token] for _, _, fields in words]}
        if columns > 1:
            row["tags"] = [fields[tag] for _, _, fields in words]
        yield first, row


def blocks(lines: Iterable[str]) -> Iterator[list[Line]]:
    """Yield the lines between blank lines. Of more than MAX_WORDS lines, only one more is kept."""
    block: list[Line] = []
    for number, line in enumerate(lines, 1):
        text = line.strip(" \t\r\n")
        separator = BLANKS
        if "\t" in text:
            separator = TABS
        fields = separator.split(text)
        if not text or fields[0] == DOCUMENT:
            if block:
                yield block
            block = []
        elif len(block) <= MAX_WORDS:
            block.append((number, text, fields))
    if block:
        yield block


def words_in(block: list[Line], columns: int) -> list[Line]:
    """Return the lines that are words.

    Before the first word, a line that begins with "# " is a comment, unless its first column is "#" and it has the
    number of columns that words have.
    """
    words = []
    is_head = True
    for line in block:
        _, text, fields = line
        is_head = is_head and text.startswith(COMMENT)
        is_comment = is_head and (fields[0] != "#" or len(fields) != columns)
        is_range = len(fields) == UNIVERSAL and NO_WORD.fullmatch(fields[0])
        if not is_comment and not is_range:
            words.append(line)
    return words


def fault_of(words: list[Line], columns: int, encoding: str) -> tuple[int, BadRow] | None:
    """Return the first line of a sentence that cannot be read, and why; None if all can."""
    for position, (number, text, fields) in enumerate(words):
        bad = unreadable(text, encoding)
        if bad is not None:
            return number, bad
        if len(fields) != columns:
            found = f"{len(fields)} columns where the first word has {columns}"
            return number, BadRow(found)
        if position == MAX_WORDS:
            many = f"a sentence of more than {MAX_WORDS:,} words"
            return number, BadRow(f"{many}; a blank line must end each sentence")
    return None


def column_of(key: str, given: ColumnsConfig, columns: int, where: str) -> int:
    """Return the index of the column that a setting names. Raises InputError if there is no such column."""
    value = getattr(given, key)
    if value == key:
        value = IN_FILES[key]
    ok = re.fullmatch(r"-?\d{1,4}", value, re.ASCII) and -columns <= int(value) < columns
    known = f"columns are 0 to {columns - 1}, or -1, -2, ... from the end"
    check(bool(ok), f"{where}: data.columns.{key}={value} is not a column: {known}")
    return int(value) % columns
