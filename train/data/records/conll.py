"""Sentences in columns, as of CoNLL-2003: a line a word, which is in the first column and its tag in the last; a blank
line ends a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from train.data.files.errors import BadRow, unreadable
from train.data.files.rows import Values

MAX_WORDS = 10_000  # of a sentence; more are a file without blank lines
DOCUMENT = "-DOCSTART-"  # begins a document: no word
TABS, BLANKS = re.compile(r" *\t *"), re.compile(r"[ \t]+")


def conll_rows(lines: Iterable[str], encoding: str) -> Iterator[tuple[int, Values]]:
    """The number of each sentence's first line, and its `tokens` and `tags`; no tags in files of one column.

    Columns are separated by tabs or, in lines without one, by blanks. All words of a file have equally many columns.
    """
    columns, first, bad = 0, 0, None
    words: list[list[str]] = []

    def sentence() -> Iterator[tuple[int, Values]]:
        if bad is not None:
            yield bad
        elif words:
            tags = {"tags": [fields[-1] for fields in words]} if columns > 1 else {}
            yield first, {"tokens": [fields[0] for fields in words], **tags}

    for number, line in enumerate(lines, 1):
        text = line.strip(" \t\r\n")
        fields = (TABS if "\t" in text else BLANKS).split(text)
        if not text or fields[0] == DOCUMENT:
            yield from sentence()
            words, bad = [], None
            continue
        columns, first = columns or len(fields), first if words else number
        if bad is None and (fault := unreadable(line, encoding)) is not None:
            bad = number, fault
        elif bad is None and len(fields) != columns:
            bad = number, BadRow(f"{len(fields)} columns where the first word has {columns}")
        elif bad is None and len(words) == MAX_WORDS:
            bad = number, BadRow(f"a sentence of more than {MAX_WORDS:,} words; a blank line ends each")
        if bad is None:
            words.append(fields)
    yield from sentence()
