"""Texts whose entities are spans of characters, as annotation tools export them: words, and a tag for each."""

from __future__ import annotations

from typing import Any

from train.data.files.errors import BadRow

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
    words: list[str] = []
    tags: list[str] = []
    place = 0
    for first, last, kind in [*found, (len(text), len(text), "")]:
        if first < place:
            overlap = f"two spans overlap at character {first}; each word has one tag"
            raise BadRow(f"{column}: {overlap}")
        outside, inside = text[place:first].split(), text[first:last].split()
        words += outside + inside
        tags += ["O"] * len(outside)
        for number in range(len(inside)):
            tags.append(f"{'BI'[min(number, 1)]}-{kind}")
        place = last
    return words, tags


def span_of(span: Any, text: str, column: str) -> Span:
    """Return a span that is a list or an object. Raises BadRow if it is neither, or is not in the text."""
    if isinstance(span, dict):
        span = span_parts(span)
    if isinstance(span, list) and list(map(type, span)) == [int, int, str]:
        first, last, kind = span
        if 0 <= first < last <= len(text) and kind.strip():
            return first, last, kind.strip()
    wanted = f"[first, last, type] in a text of {len(text)} characters"
    raise BadRow(f"{column} holds the span {span!r:.60}, not {wanted}")


def span_parts(span: dict[str, Any]) -> list[Any]:
    """Return the first and last characters and the type of a span that is an object; None for what it lacks."""
    parts = [next((span[name] for name in names if name in span), None) for names in KEYS]
    kind = parts[2]
    if isinstance(kind, list) and len(kind) == 1:
        parts[2] = kind[0]
    return parts


def type_of(span: Any) -> str:
    """Return the type of the entity that a span names; "" if it is no string."""
    if isinstance(span, dict):
        span = span_parts(span)
    found = span[-1] if isinstance(span, list) else None
    return found if isinstance(found, str) else ""
