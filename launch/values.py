"""Values of JSON from elsewhere, a run folder's or a record's: of the right type, or a default; and how they print."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from train.config.checks import LARGEST_FLOAT
from train.storage.schema import BadContent, of_type

MAX_CHARS, MAX_ITEMS = 2000, 4096  # of a text and of a list that are kept
LAST_UNIX_S = 253402300800.0  # the year 10000, from which on time.gmtime gives years that nothing prints
Object = Mapping[str, Any]


def value(hint: Any, values: Object, key: str, default: Any = None) -> Any:
    """Return the value of a key if it is of the type `hint` (see train.storage.schema.of_type), else `default`."""
    try:
        return of_type(hint, values.get(key), key)
    except BadContent:
        return default


def number(values: Object, key: str) -> float | None:
    """Return a finite number."""
    found = value(float, values, key)
    return found if found is not None and abs(found) < LARGEST_FLOAT else None  # NaN is not below


def moment(values: Object, key: str) -> float | None:
    """Return seconds since 1970."""
    found = number(values, key)
    return found if found is not None and 0 <= found < LAST_UNIX_S else None


def count(values: Object, key: str) -> int | None:
    """Return a whole number, 0 or more."""
    found: int | None = value(int, values, key)
    return found


def text(values: Object, key: str) -> str:
    """Return a text, cut if it is very long; empty if there is none."""
    return str(value(str, values, key, ""))[:MAX_CHARS]


def texts(values: Object, key: str) -> list[str]:
    return list(value(list[str], values, key, []))[:MAX_ITEMS]


def table(values: Object, key: str) -> dict[str, Any]:
    """Return an object; empty if there is none."""
    return dict(value(dict[str, Any], values, key, {}))


def shown_moment(unix_s: float | None) -> str:
    return "-" if unix_s is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))


def shown_duration(seconds: float) -> str:
    """Return a duration in its one or two largest units."""
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
