"""The result of a check, and the screen of results: one line for each, with the cure below those that need one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "bad", "skip"]
COLOURS: dict[State, int] = {"ok": 32, "warn": 33, "bad": 31, "skip": 2}  # ANSI: green, yellow, red, faint
MARKS: dict[State, str] = {"ok": "ok", "warn": "warn", "bad": "BAD", "skip": "-"}
NAME_COLUMN, TEXT_COLUMN = 6, 22


@dataclass(frozen=True)
class Finding:
    state: State
    text: str
    cure: str = ""  # what to type or to do; set for warn and bad, and only for these

    def __post_init__(self) -> None:
        assert bool(self.cure) == (self.state in ("warn", "bad")), self


def ok(text: str) -> Finding:
    return Finding("ok", text)


def skip(text: str) -> Finding:
    return Finding("skip", text)


def warn(text: str, *, cure: str) -> Finding:
    return Finding("warn", text, cure)


def bad(text: str, *, cure: str) -> Finding:
    return Finding("bad", text, cure)


def is_red(findings: Mapping[str, Finding]) -> bool:
    return any(finding.state == "bad" for finding in findings.values())


def screen(findings: Mapping[str, Finding], *, width: int, colour: bool) -> str:
    """All findings as text of at most `width` columns; words, and so commands, are never broken."""
    lines = []
    for name, finding in findings.items():
        lines += show(name, finding, width=width, colour=colour)
    count = {state: sum(finding.state == state for finding in findings.values()) for state in COLOURS}
    summary = f"{count['ok']} ok, {count['warn']} to look at, {count['bad']} to fix"
    if count["skip"]:
        summary += f", {count['skip']} that do not apply"
    return "\n".join([*lines, summary])


def show(name: str, finding: Finding, *, width: int, colour: bool) -> list[str]:
    text = wrap(finding.text, width=width - TEXT_COLUMN)
    cure = wrap(f"-> {finding.cure}", width=width - TEXT_COLUMN) if finding.cure else []
    mark = f"{MARKS[finding.state]:{NAME_COLUMN}}"
    mark = f"\033[{COLOURS[finding.state]}m{mark}\033[0m" if colour else mark
    return [
        f"{mark}{name:{TEXT_COLUMN - NAME_COLUMN}}{text[0]}",
        *(" " * TEXT_COLUMN + line for line in [*text[1:], *cure]),
    ]


def wrap(text: str, *, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
