"""Questions of SQuAD files (v1.1 and v2), and the check of answers against their contexts.

Format: Rajpurkar et al., https://arxiv.org/abs/1606.05250 (v1.1) and https://arxiv.org/abs/1806.03822 (v2):
{"data": [{"paragraphs": [{"context": ..., "qas": [{"id", "question", "answers": [{"text", "answer_start"}],
"is_impossible"}]}]}]}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config import InputError, check
from train.data.files.errors import BadRow
from train.data.files.rows import Values
from train.data.files.text import open_text

SQUAD_START = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')
LEVELS = ("data", "paragraphs", "qas")  # lists, each in the objects of the one before
SHOWN_CHARS = 40  # of a text in an error


def squad_rows(path: Path, name: str, encoding: str) -> Iterator[tuple[str, Values]]:
    """Each question and its position in the file, which is read as a whole: some 200 MB of memory for SQuAD itself."""
    with open_text(path, encoding) as (text, _):
        try:
            document = json.load(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{name}:{error.lineno}: not JSON: {error.msg}") from error
    is_squad = isinstance(document, dict) and isinstance(document.get("data"), list)
    check(is_squad, f'{name} is not SQuAD: there is no list "data" at its top')
    for where, row in questions(document, LEVELS, "", {}):
        own = row.get("id") if isinstance(row, dict) else None
        yield f"{name}, " + (f"question {own}" if isinstance(own, str) else where), row


def questions(node: Any, levels: tuple[str, ...], where: str, above: dict[str, Any]) -> Iterator[tuple[str, Values]]:
    """Objects at the end of nested lists, with the context of what they are in."""
    if not isinstance(node, dict):
        yield where, BadRow(f"a {type(node).__name__} where an object should be")
    elif not levels:
        row = above | {key: node[key] for key in ("id", "question", "answers") if key in node}
        yield where, row | ({"answers": []} if node.get("is_impossible") is True else {})
    elif not isinstance(node.get(levels[0]), list):
        yield where, BadRow(f"no list {levels[0]}")
    else:
        above = above | ({"context": node["context"]} if "context" in node else {})
        for number, child in enumerate(node[levels[0]]):
            yield from questions(child, levels[1:], f"{where}.{levels[0]}[{number}]".lstrip("."), above)


def answers_of(value: Any, context: str) -> dict[str, list[Any]]:
    """`{"text": [str], "answer_start": [int]}` of answers in that shape or as a list of objects; starts are characters.

    BadRow for another shape, or an answer that is not where it should be.
    """
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {key: [item.get(key) for item in value] for key in ("text", "answer_start")}
    texts, starts = (value.get("text"), value.get("answer_start")) if isinstance(value, dict) else (None, None)
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise BadRow("answers are not lists text and answer_start of one length, nor a list of objects with these")
    for text, start in zip(texts, starts, strict=True):
        if not isinstance(text, str) or not text or type(start) is not int:
            raise BadRow(f"an answer that is not a text and a number but {text!r:.40} and {start!r:.40}")
        there = context[max(start, 0) : max(start, 0) + len(text)]
        if start < 0 or there != text:
            at = f"character {start} of the context"
            raise BadRow(f"answer {text[:SHOWN_CHARS]!r} is not at {at}, where there is {there[:SHOWN_CHARS]!r}")
    return {"text": texts, "answer_start": starts}
