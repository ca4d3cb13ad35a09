"""Questions in the form of SQuAD, https://arxiv.org/abs/1606.05250 (v2: 1806.03822).

The form is {"data": [{"paragraphs": [{"context": ..., "qas": [{"id", "question", "answers": [{"text", "answer_start"}],
"is_impossible"}]}]}]}.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from train.config import check
from train.data.files.errors import BadRow
from train.data.files.rows import Values

START = re.compile(r'\s*\{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')
LEVELS = ("data", "paragraphs", "qas")  # the nested lists, from the outside in
NO_ANSWERS = (("", -1), ("", 0))  # texts and starts, as data sets without a list of no answers say
OF_QUESTIONS = ("id", "question", "answers")
SHOWN_CHARS = 40  # maximum characters of a text in an error


def is_squad(start: str) -> bool:
    """Return whether a file that begins so has the form of SQuAD."""
    return START.match(start) is not None and '"paragraphs"' in start


def squad_rows(document: Any, name: str) -> Iterator[tuple[str, Values]]:
    """Yield the location and values of each question of a document."""
    has_data = isinstance(document, dict) and isinstance(document.get("data"), list)
    check(has_data, f'{name} is not SQuAD: there is no list "data" at the top level')
    for where, row in questions(document, LEVELS, "", {}):
        if isinstance(row, dict) and isinstance(row.get("id"), str):
            where = f"question {row['id']}"
        yield f"{name}, {where}", row


def questions(
    node: Any, levels: tuple[str, ...], where: str, above: dict[str, Any]
) -> Iterator[tuple[str, Values]]:
    """Yield the location and values of each innermost object in nested lists, with the "context" of an outer object."""
    if not isinstance(node, dict):
        yield where, BadRow(f"{node!r:.40} where an object should be")
        return
    if not levels:
        row = above | {key: node[key] for key in OF_QUESTIONS if key in node}
        if node.get("is_impossible") is True:
            row["answers"] = []
        yield where, row
        return
    level, *inner = levels
    children = node.get(level)
    if not isinstance(children, list):
        yield where, BadRow(f"no list {level}")
        return
    if "context" in node:
        above = {**above, "context": node["context"]}
    for number, child in enumerate(children):
        place = f"{where}.{level}[{number}]".lstrip(".")
        yield from questions(child, tuple(inner), place, above)


def answers_of(value: Any, context: str) -> dict[str, list[Any]]:
    """Return answers as `{"text": [str], "answer_start": [int]}`, from this form or a list of objects.

    Starts are in characters. Raises BadRow if the form is wrong, or if an answer is not at its start in `context`.
    """
    if isinstance(value, str):
        read = "pandas.read_csv(FILE, converters={'answers': ast.literal_eval})"
        write = f"write JSON lines: {read}.to_json(NEW, 'records', lines=True)"
        raise BadRow(f"answers are text, as in CSV files; {write}")
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {key: [item.get(key) for item in value] for key in ("text", "answer_start")}
    texts = starts = None
    if isinstance(value, dict):
        texts, starts = value.get("text"), value.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        form = "equally long lists text and answer_start, or a list of objects with these keys"
        raise BadRow(f"answers must be {form}")
    pairs = [pair for pair in zip(texts, starts, strict=True) if pair not in NO_ANSWERS]
    for text, start in pairs:
        check_answer(text, start, context)
    return {"text": [text for text, _ in pairs], "answer_start": [start for _, start in pairs]}


def check_answer(text: Any, start: Any, context: str) -> None:
    """Raise BadRow unless a text is at its start in `context`."""
    if not isinstance(text, str) or not text or type(start) is not int:
        found = f"{text!r:.40} and {start!r:.40}"
        raise BadRow(f"an answer must be a text and a number, not {found}")
    there = context[max(start, 0) : max(start, 0) + len(text)]
    if start < 0 or there != text:
        at = f"character {start} of the context, which has {there[:SHOWN_CHARS]!r} there"
        raise BadRow(f"answer {text[:SHOWN_CHARS]!r} is not at {at}")
