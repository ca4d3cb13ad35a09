"""Formatting of values for the report: None becomes "unknown", and no value can garble a terminal or a page."""

from __future__ import annotations

import json
from collections.abc import Sequence

from train.config.checks import LARGEST


def printable(text: object) -> str:
    """Replace unprintable characters with U+FFFD: control and direction characters, and lone surrogates."""
    chars = (char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text))
    return "".join(chars)


def shortened(text: object, length: int = 40) -> str:
    """Return the text, or only its beginning and end if it is longer than `length`."""
    shown = printable(text)
    if len(shown) <= length:
        return shown
    half = length // 2
    return f"{shown[: half - 1]}...{shown[2 - half :]}"


def model_name(location: object) -> str:
    """Return a Hub id as it is, and the last two names of a path; of an export, those of its run."""
    run = str(location).rstrip("/").removesuffix("/export")
    return "/".join(run.split("/")[-2:])


def as_text(value: object) -> str:
    if not isinstance(value, str):
        value = json.dumps(value, default=str, ensure_ascii=False)
    return printable(value)


# ---- numbers -------------------------------------------------------------------------------------------------------


def count(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value == round(value) and abs(value) < LARGEST:
        return f"{value:,.0f}"
    return f"{value:,.4g}"


def share(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.1%}"


def score(value: float | None) -> str:
    if value is None or isinstance(value, int):
        return count(value)
    return f"{value:.4f}"


def figure(value: float | None) -> str:
    if value is None:
        return "no number"
    if abs(value) < 10:
        return f"{value:,.3f}"
    return f"{value:,.2f}"


def at_step(value: float | None, step: int) -> str:
    shown = "no number"
    if value is not None:
        shown = f"{value:,.4f}"
    return f"{shown} at step {step:,}"


def duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
