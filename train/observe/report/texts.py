"""Formatting of values for the report: None becomes "unknown", and no value can garble a terminal or a page."""

from __future__ import annotations

import json
import re

from train.config.checks import LARGEST
from train.storage.folders import sha256_bytes


def printable(text: object) -> str:
    """Replace unprintable characters with U+FFFD: control and direction characters, and lone surrogates."""
    return "".join(
        char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(text)
    )


def shortened(text: str, length: int = 40) -> str:
    """Return the text, or only its beginning and end if it is longer than `length`."""
    text, half = printable(text), length // 2
    return text if len(text) <= length else f"{text[: half - 1]}...{text[2 - half :]}"


def as_text(value: object) -> str:
    return printable(
        value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    )


def file_name(prefix: str, name: str) -> str:
    """Return a figure's file name, the same in every report. If characters are replaced, a hash is added."""
    plain = re.sub(r"[^a-z0-9_]", "_", name)[:60]
    hashed = "" if plain == name else f"_{sha256_bytes(name.encode(errors='surrogatepass'))[:8]}"
    return f"{prefix}_{plain}{hashed}"


# ---- numbers -------------------------------------------------------------------------------------------------------


def count(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if value == round(value) and abs(value) < LARGEST else f"{value:,.4g}"


def share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def score(value: float | None) -> str:
    return count(value) if value is None or isinstance(value, int) else f"{value:.4f}"


def figure(value: float | None) -> str:
    return (
        "no number" if value is None else f"{value:,.3f}" if abs(value) < 10 else f"{value:,.2f}"
    )


def at_step(value: float | None, step: int) -> str:
    return f"{'no number' if value is None else f'{value:,.4f}'} at step {step:,}"


def duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"


def percent(part: float) -> str:
    return f"{100 * part:.3g}%"
