"""Texts whose entities are spans of characters, as annotation tools export them: words, and a tag for each."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from train.data.files.errors import BadRow

WORD = re.compile(r"\S+")
# of spans that are objects
KEYS = (
    ("start", "start_offset"),
    ("end", "end_offset"),
    ("label", "labels", "type", "entity_group"),  # Label Studio has a list of one
)
# the first character, the one behind the last, and the type of the entity
Span = tuple[int, int, str]


def words_of(text: str, spans: Any, column: str) -> tuple[list[str], list[str]]:
    """Return the words of a text, and their tags (B-, I- and O). Words end at blanks, and where spans begin or end.

    Raises BadRow if the spans are unusable. `column`: the name of their column.
    """
    if not isinstance(spans, list):
        raise BadRow(
            f"{column} holds {spans!r:.40} for a text, not spans [[first, last, type], ...]; if each row is a word, "
            "join sentences: pandas.read_csv(FILE).ffill().groupby(SENTENCE, sort=False)[[WORD, TAG]].agg(list)"
            ".to_json(NEW, orient='records', lines=True), or write a line per word (data.format=conll)"
        )
    found = sorted(span_of(span, text, column) for span in spans)
    for (_, last, _), (first, *_) in pairwise(found):
        if first < last:
            raise BadRow(
                f"{column}: two spans overlap at character {first}; each word has one tag"
            )
    cuts = sorted(place for span in found for place in span[:2])
    words, tags, begun = [], [], set[Span]()
    for match in WORD.finditer(text):
        inside = [place for place in cuts if match.start() < place < match.end()]
        for first, last in pairwise([match.start(), *dict.fromkeys(inside), match.end()]):
            span = next((span for span in found if span[0] <= first < span[1]), None)
            words.append(text[first:last])
            tags.append("O" if span is None else f"{'I' if span in begun else 'B'}-{span[2]}")
            begun |= {span} if span else set()
    return words, tags


def span_of(span: Any, text: str, column: str) -> Span:
    """Return a span that is a list or an object. Raises BadRow if it is neither, or is not in the text."""
    if isinstance(span, dict):
        span = [next((span[name] for name in names if name in span), None) for names in KEYS]
        if isinstance(span[2], list) and len(span[2]) == 1:
            span[2] = span[2][0]
    ok = (
        isinstance(span, list)
        and len(span) == 3
        and [type(each) for each in span] == [int, int, str]
    )
    if not ok or not 0 <= span[0] < span[1] <= len(text) or not span[2].strip():
        raise BadRow(
            f"{column} holds the span {span!r:.60}, not [first, last, type] in a text of {len(text)} characters"
        )
    return span[0], span[1], span[2].strip()
