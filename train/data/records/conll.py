"""Sentences in columns, as in CoNLL-2003: a line per word, a blank line between sentences."""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from train.config import ColumnsConfig, check
from train.data.files.errors import BadRow, unreadable
from train.data.files.rows import Values

logger = logging.getLogger("train")

TAG = re.compile(r"O|[BIESLU]-\S(.*\S)?")  # O: the word is in no entity
# These tags of CoNLL-2003 mark phrases, not entities.
PHRASE = re.compile(r"[BI]-(NP|VP|PP|ADVP|ADJP|SBAR|PRT|CONJP|INTJ|LST|UCP|NC|VC|PC)|O")
MAX_WORDS = 10_000  # words per sentence; more suggest a file without blank lines
FEW_WORDS = 10  # a file with fewer words may contain only numbers and signs
DIGITS = re.compile(r"\d+")
# the columns to read if data.columns has the default names
IN_FILES = {
    "tokens": "0",
    "tags": "-1",
}
DOCUMENT = "-DOCSTART-"  # marks the beginning of a document; not a word
MIN_IDS = 3  # words in sentences of several words; fewer say nothing about a column
COMMENT = ("# ", "#\t")
# lines that begin with #; more before the first word are comments, and are not kept
MOST_WAITING = 1000
TABS, BLANKS = re.compile(r" *\t *"), re.compile(r"[ \t]+")
UNIVERSAL = 10  # the column count of CoNLL-U, in which lines numbered 1-2 or 1.1 are not words
NO_WORD = re.compile(r"\d+[-.]\d+")


def conll_rows(
    lines: Iterable[str], name: str, encoding: str, given: ColumnsConfig
) -> Iterator[tuple[int, Values]]:
    """Yield each sentence's first line number, with its `tokens` and, if there are several columns, its `tags`.

    Columns are separated by tabs or, in lines without tabs, by blanks. All words of a file must have the same number of
    columns. Raises InputError if a column that `given` names does not exist, or if the words have no letters.
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
            bad = (
                number,
                BadRow(f"{len(fields)} columns where the first word has {sentences.columns}"),
            )
        elif bad is None and len(words) == MAX_WORDS:
            bad = (
                number,
                BadRow(
                    f"a sentence of more than {MAX_WORDS:,} words; a blank line must end each sentence"
                ),
            )
        if bad is None:
            words.append(fields)
    sentences.end()


def word_lines(lines: Iterable[str]) -> Iterator[tuple[int, str, list[str]]]:
    """Yield the number, text and columns of each line with a word. A line that ends a sentence has the columns [].

    Before the first word of a sentence, a line that begins with "# " is a comment, unless its first column is "#" and
    it has the number of columns that words have.
    """
    columns, is_inside = 0, False
    # Words or comments: undecided until the number of columns is known.
    waiting = deque[tuple[int, str, list[str]]](maxlen=MOST_WAITING)
    for number, line in enumerate(lines, 1):
        text = line.strip(" \t\r\n")
        fields = (TABS if "\t" in text else BLANKS).split(text)
        if not text or fields[0] == DOCUMENT:
            yield number, line, []
            waiting.clear()
            is_inside = False
        elif (
            not is_inside
            and text.startswith(COMMENT)
            and (fields[0] != "#" or len(fields) != columns)
        ):
            if fields[0] == "#" and not columns:
                waiting.append((number, line, fields))
        elif not (len(fields) == UNIVERSAL and NO_WORD.fullmatch(fields[0])):
            yield from (each for each in waiting if len(each[2]) == len(fields))
            waiting.clear()
            columns = columns or len(fields)
            is_inside = True
            yield number, line, fields


class Sentences:
    """A reader of words and tags in one file's sentences. It also finds other columns that may contain tags."""

    def __init__(self, name: str, given: ColumnsConfig) -> None:
        self.name, self.given = name, given
        self.columns = self.word = self.tag = 0
        self.start: list[str] = []  # the columns of the first word
        self.num_words, self.num_long, self.has_letters = 0, 0, False
        # columns whose values differ in no sentence but for digits, as ids do
        self.steady: set[int] = set()
        self.like_tags: set[int] = set()  # other columns that contain only tags
        self.named: set[int] = set()  # those of `like_tags` in which a tag marks an entity

    def begin(self, columns: int, number: int) -> None:
        """Set the column count from the first word, in line `number`. Raises InputError if data.columns is wrong."""
        if self.columns:
            return
        self.columns = columns
        found = {}
        for key, default in IN_FILES.items():
            given = getattr(self.given, key)
            value = default if given == key else given
            ok = re.fullmatch(r"-?\d{1,4}", value, re.ASCII) and -columns <= int(value) < columns
            where = f"{self.name}:{number}: data.columns.{key}={value}"
            check(
                bool(ok),
                f"{where} is not a column: columns are 0 to {columns - 1}, or -1, -2, ... from the end",
            )
            found[key] = int(value) % columns
        self.word, self.tag = found["tokens"], found["tags"]
        same = f"{self.name}:{number}: data.columns.tokens and data.columns.tags are both column {self.word}"
        check(columns == 1 or self.word != self.tag, same)
        self.like_tags = set(range(columns)) - {self.word, self.tag}
        self.steady = set(range(columns))

    def read(self, words: list[list[str]]) -> dict[str, list[str]]:
        """Return the tokens and tags of a sentence; `words` has the columns of each word."""
        tokens = [fields[self.word] for fields in words]
        self.start = self.start or [words[0][column] for column in range(self.columns)]
        self.num_words += len(tokens)
        self.has_letters = self.has_letters or any(
            letter.isalpha() for token in tokens for letter in token
        )
        if len(tokens) > 1:
            self.num_long += len(tokens)
            self.steady = {
                c for c in self.steady if len({DIGITS.sub("", fields[c]) for fields in words}) == 1
            }
        self.like_tags = {
            c for c in self.like_tags if all(TAG.fullmatch(fields[c]) for fields in words)
        }
        self.named |= {
            c for c in self.like_tags if not all(PHRASE.fullmatch(fields[c]) for fields in words)
        }
        return {
            "tokens": tokens,
            **({"tags": [fields[self.tag] for fields in words]} if self.columns > 1 else {}),
        }

    def end(self) -> None:
        """Raise InputError if the words are numbers or ids. Log other columns that may contain the tags."""
        with_letters = [
            column for column, text in enumerate(self.start) if any(map(str.isalpha, text))
        ]
        others = [column for column in with_letters if column not in self.steady]
        hint = f"set data.columns.tokens, as in data.columns.tokens={(*others, 0)[0]} (columns are counted from 0)"
        are_ids = self.word in self.steady and self.num_long >= MIN_IDS
        what = f"{self.name}: column {self.word} has"
        check(
            not are_ids or self.columns == 1,
            f"{what} the same value in all words of a sentence, or counts: {hint}",
        )
        few = self.has_letters or self.num_words < FEW_WORDS or self.columns == 1
        check(few, f"{what} no letters, so it has no words: {hint}")
        if self.given.tags == "tags" and (others := sorted(self.like_tags & self.named)):
            listed = ", ".join(map(str, others))
            message = "%s: tags are read from column %d; column %s also contains tags: see data.columns.tags"
            logger.warning(message, self.name, self.tag, listed)
