"""Functions that read typed values from JSON, with defaults for bad ones, and functions that format values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from train.config.checks import LARGEST_FLOAT
from train.storage.schema import BadContent, of_type

LONGEST_S = 1e12  # longest duration that is printed
INDENT = 13  # columns
Object = Mapping[str, Any]


def value(hint: Any, values: Object, key: str, default: Any = None) -> Any:
    """Return the value of a key if it is of the type `hint` (see train.storage.schema.of_type), else `default`."""
    try:
        return of_type(hint, values.get(key), key)
    except BadContent:
        return default


def number(values: Object, key: str) -> float | None:
    """Return the value of a key if it is a finite number, else None."""
    found: float | None = value(float, values, key)
    if found is None or not abs(found) < LARGEST_FLOAT:  # NaN compares as false
        return None
    return found


def count(values: Object, key: str) -> int | None:
    """Return the value of a key if it is an integer of at least 0, else None."""
    found: int | None = value(int, values, key)
    return found


def text(values: Object, key: str) -> str:
    """Return the value of a key if it is a string, else an empty string."""
    return str(value(str, values, key, ""))


def table(values: Object, key: str) -> dict[str, Any]:
    """Return the value of a key if it is an object, else an empty object."""
    return dict(value(dict[str, Any], values, key, {}))


# ---- display --------------------------------------------------------------------------------------------------------


def shown_moment(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def shown_duration(seconds: float) -> str:
    """Return a duration in the form "1 day, 2:03:04"."""
    return str(timedelta(seconds=round(min(seconds, LONGEST_S))))


def line(head: str, text: str) -> str:
    return f"{head:{INDENT}}{text}"


def paragraph(head: str, text: str) -> list[str]:
    """Return the lines of a text, indented, with `head` in front of the first."""
    heads = [head, *[""] * text.count("\n")]
    return [line(*each) for each in zip(heads, text.splitlines(), strict=False)]
