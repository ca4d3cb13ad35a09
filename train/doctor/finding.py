"""The result of a check, and the screen of results: one line for each, with the cure below those that need one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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


ok, skip = partial(Finding, "ok"), partial(Finding, "skip")
warn, bad = partial(Finding, "warn"), partial(Finding, "bad")


def is_red(findings: Mapping[str, Finding]) -> bool:
    return any(finding.state == "bad" for finding in findings.values())


def screen(findings: Mapping[str, Finding], *, width: int, colour: bool) -> str:
    """All findings as text of at most `width` columns; words, and so commands, are never broken."""
    lines, count = [], dict.fromkeys(COLOURS, 0)
    for name, finding in findings.items():
        count[finding.state] += 1
        mark = f"{MARKS[finding.state]:{NAME_COLUMN}}"
        mark = f"\033[{COLOURS[finding.state]}m{mark}\033[0m" if colour else mark
        text, *more = wrap(finding.text, width=width - TEXT_COLUMN)
        more += wrap(f"-> {finding.cure}", width=width - TEXT_COLUMN) if finding.cure else []
        lines.append(f"{mark}{name:{TEXT_COLUMN - NAME_COLUMN}}{text}")
        lines += [" " * TEXT_COLUMN + line for line in more]
    summary = f"{count['ok']} ok, {count['warn']} to look at, {count['bad']} to fix"
    return "\n".join([*lines, summary + (f", {count['skip']} that do not apply" if count["skip"] else "")])


def wrap(text: str, *, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
