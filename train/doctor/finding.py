"""What a check comes to, and how a list of them is shown: one line each, the cure under what is not well."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "bad", "skip"]
COLOURS: dict[State, int] = {"ok": 32, "warn": 33, "bad": 31, "skip": 2}  # ANSI: green, yellow, red, faint
MARKS: dict[State, str] = {"ok": "ok", "warn": "warn", "bad": "BAD", "skip": "-"}
NAME_COLUMN, TEXT_COLUMN = 6, 22


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    text: str
    cure: str = ""  # what to type or to do; given exactly for warn and bad

    def __post_init__(self) -> None:
        assert bool(self.cure) == (self.state in ("warn", "bad")), self


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def skip(name: str, text: str) -> Finding:
    return Finding(name, "skip", text)


def warn(name: str, text: str, *, cure: str) -> Finding:
    return Finding(name, "warn", text, cure)


def bad(name: str, text: str, *, cure: str) -> Finding:
    return Finding(name, "bad", text, cure)


def is_red(findings: Iterable[Finding]) -> bool:
    return any(finding.state == "bad" for finding in findings)


def screen(findings: list[Finding], *, width: int, colour: bool) -> str:
    """All findings as text of at most `width` columns; a command in a cure is never broken inside a word."""
    lines = []
    for finding in findings:
        lines += show(finding, width=width, colour=colour)
    count = {state: sum(finding.state == state for finding in findings) for state in COLOURS}
    summary = f"{count['ok']} ok, {count['warn']} to look at, {count['bad']} to mend"
    if count["skip"]:
        summary += f", {count['skip']} that do not apply"
    return "\n".join([*lines, summary])


def show(finding: Finding, *, width: int, colour: bool) -> list[str]:
    text = wrap(finding.text, width=width - TEXT_COLUMN)
    cure = wrap(f"-> {finding.cure}", width=width - TEXT_COLUMN) if finding.cure else []
    mark = paint(f"{MARKS[finding.state]:{NAME_COLUMN}}", COLOURS[finding.state], colour=colour)
    name = f"{finding.name:{TEXT_COLUMN - NAME_COLUMN}}"
    return [mark + name + text[0], *(" " * TEXT_COLUMN + line for line in [*text[1:], *cure])]


def wrap(text: str, *, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]


def paint(text: str, code: int, *, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour else text
