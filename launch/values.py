"""Values of JSON from elsewhere, a run folder's or a record's: of the right type, or None."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from train.config.checks import LARGEST_FLOAT
from train.storage.schema import MAX_COUNT

MOST_CHARS, MOST_ITEMS = 2000, 4096  # of a text and of a list that are kept
LAST_UNIX_S = 253402300800.0  # the year 10000, from which on time.gmtime gives years that nothing prints
Object = Mapping[str, Any]


def number(values: Object, key: str) -> float | None:
    """A finite number."""
    value = values.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) < LARGEST_FLOAT else None  # NaN is not


def count(values: Object, key: str) -> int | None:
    """A whole number, 0 or more."""
    value = values.get(key)
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT
    return value if is_count else None


def text(values: Object, key: str) -> str:
    """A text, cut if it is very long; empty if there is none."""
    value = values.get(key)
    return value[:MOST_CHARS] if isinstance(value, str) else ""


def texts(values: Object, key: str) -> list[str]:
    value = values.get(key)
    return (
        [item[:MOST_CHARS] for item in value if isinstance(item, str)][:MOST_ITEMS] if isinstance(value, list) else []
    )


def table(values: Object, key: str) -> dict[str, Any]:
    """An object; empty if there is none."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def moment(values: Object, key: str) -> float | None:
    """Seconds since 1970."""
    value = number(values, key)
    return value if value is not None and 0 <= value < LAST_UNIX_S else None


def shown_moment(unix_s: float | None) -> str:
    return "-" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def shown_duration(seconds: float) -> str:
    """A duration in its one or two largest units."""
    if seconds < 1:
        return f"{seconds:.1g} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24:,} days {hours % 24} h"
