"""Sentences in columns, as in CoNLL-2003: a line per word, a blank line between sentences."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import chain

from train.config import ColumnsConfig, check
from train.data.files.errors import BadRow, unreadable
from train.data.files.rows import Values

logger = logging.getLogger("train")

TAG = re.compile(r"O|[BIESLU]-\S+")  # O is the tag of words that are in no entity
PHRASE = re.compile(r"[BI]-(NP|VP|PP|ADVP|ADJP|SBAR|PRT|CONJP|INTJ|LST|UCP|NC|VC|PC)|O")  # CoNLL-2003's, of no entity
MAX_WORDS = 10_000  # per sentence; more are a file without blank lines
FEW_WORDS = 10  # a file of at most this many may have no letter
IN_FILES = {"tokens": "0", "tags": "-1"}  # the columns if data.columns has its defaults, which are not numbers
DOCUMENT = "-DOCSTART-"  # begins a document, and is not a word
COMMENT = ("# ", "#\t")
TABS, BLANKS = re.compile(r" *\t *"), re.compile(r"[ \t]+")
UNIVERSAL = 10  # columns of CoNLL-U, in which 1-2 and 1.1 are numbers of lines that are not words
NO_WORD = re.compile(r"\d+[-.]\d+")


def conll_rows(lines: Iterable[str], name: str, encoding: str, given: ColumnsConfig) -> Iterator[tuple[int, Values]]:
    """Yield the number of each sentence's first line and its `tokens` and, if there are several columns, `tags`.

    Columns are separated by tabs or, in lines without one, by blanks. All words of a file have equally many. Raises
    InputError if there is no such column as `given` says, or if the words are numbers.
    """
    sentences, first, bad = Sentences(name, given), 0, None
    words: list[list[str]] = []
    for number, line, fields in chain(word_lines(lines), [(0, "", [])]):
        if not fields:
            if bad is not None:
                yield bad
            elif words:
                yield first, sentences.read(words)
            words, bad = [], None
            continue
        first = first if words else number
        sentences.begin(len(fields), number)
        if bad is None and (fault := unreadable(line, encoding)) is not None:
            bad = number, fault
        elif bad is None and len(fields) != sentences.columns:
            bad = number, BadRow(f"{len(fields)} columns where the first word has {sentences.columns}")
        elif bad is None and len(words) == MAX_WORDS:
            bad = number, BadRow(f"a sentence of more than {MAX_WORDS:,} words; a blank line ends each")
        if bad is None:
            words.append(fields)
    sentences.end()


def word_lines(lines: Iterable[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the number of each line with a word, the line and its columns, and of each end of a sentence no columns.

    Before the first word of a sentence, a line that begins with "# " is a comment unless it has a word's columns.
    """
    columns, is_inside = 0, False
    waiting: list[tuple[int, str, list[str]]] = []  # words or comments, until the number of columns is known
    for number, line in enumerate(lines, 1):
        text = line.strip(" \t\r\n")
        fields = (TABS if "\t" in text else BLANKS).split(text)
        if not text or fields[0] == DOCUMENT:
            yield number, line, []
            waiting, is_inside = [], False
        elif not is_inside and text.startswith(COMMENT) and (fields[0] != "#" or len(fields) != columns):
            waiting += [(number, line, fields)] if fields[0] == "#" and not columns else []
        elif not (len(fields) == UNIVERSAL and NO_WORD.fullmatch(fields[0])):
            yield from (each for each in waiting if len(each[2]) == len(fields))
            columns, is_inside, waiting = columns or len(fields), True, []
            yield number, line, fields


class Sentences:
    """Words and tags of the sentences of one file, with hints that they are in other columns."""

    def __init__(self, name: str, given: ColumnsConfig) -> None:
        self.name, self.given = name, given
        self.columns = self.word = self.tag = 0
        self.start: list[str] = []  # the first words
        self.num_words, self.has_letters, self.counts = 0, False, True
        self.like_tags: set[int] = set()  # further columns that hold tags
        self.named: set[int] = set()  # those in which there is more than O and phrases

    def begin(self, columns: int, number: int) -> None:
        """Take the number of columns of the first word of the file, which is in this line."""
        if self.columns:
            return
        self.columns = columns
        found = {}
        for key, default in IN_FILES.items():
            given = getattr(self.given, key)
            value = default if given == key else given
            ok = re.fullmatch(r"-?\d{1,4}", value, re.ASCII) and -columns <= int(value) < columns
            where = f"{self.name}:{number}: data.columns.{key}={value}"
            check(bool(ok), f"{where} is no column: they are 0 to {columns - 1}, or count from the last, which is -1")
            found[key] = int(value) % columns
        self.word, self.tag = found["tokens"], found["tags"]
        same = f"{self.name}:{number}: data.columns.tokens and data.columns.tags are both column {self.word}"
        check(columns == 1 or self.word != self.tag, same)
        self.like_tags = set(range(columns)) - {self.word, self.tag}

    def read(self, words: list[list[str]]) -> dict[str, list[str]]:
        """Return the columns of a sentence."""
        tokens = [fields[self.word] for fields in words]
        self.start = self.start or [words[0][column] for column in range(self.columns)]
        self.num_words += len(tokens)
        self.has_letters = self.has_letters or any(letter.isalpha() for token in tokens for letter in token)
        self.counts = self.counts and tokens == [str(number) for number in range(1, len(tokens) + 1)]
        self.like_tags = {c for c in self.like_tags if all(TAG.fullmatch(fields[c]) for fields in words)}
        self.named |= {c for c in self.like_tags if not all(PHRASE.fullmatch(fields[c]) for fields in words)}
        return {"tokens": tokens, **({"tags": [fields[self.tag] for fields in words]} if self.columns > 1 else {})}

    def end(self) -> None:
        """Raise InputError if the words have no letters. If tags may be elsewhere, log it."""
        with_letters = [column for column, text in enumerate(self.start) if any(map(str.isalpha, text))]
        hint = f"as data.columns.tokens={(*with_letters, 0)[0]} (columns count from 0)"
        is_counting = self.counts and self.num_words > 1
        check(
            self.has_letters or self.columns == 1 or not (is_counting or self.num_words >= FEW_WORDS),
            f"{self.name}: column {self.word} has no letters, as numbers of words: set data.columns.tokens, {hint}",
        )
        if self.given.tags == "tags" and (others := sorted(self.like_tags & self.named)):
            listed = ", ".join(map(str, others))
            message = "%s: tags are those of column %d; column %s holds tags too: see data.columns.tags"
            logger.warning(message, self.name, self.tag, listed)
