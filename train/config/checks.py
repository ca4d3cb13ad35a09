"""Errors whose message is one line for the user, and checks of single settings, which raise InputError."""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, ClassVar, TypeVar

LARGEST_FLOAT = 1e100  # the product of two floats of this size is still finite
LARGEST = 2**63  # upper bound of numbers: NumPy, torch and safetensors store integers in 64 bits
LAST_UNIX_S = 253402300800.0  # start of the year 10000: later times are not printed
LONGEST_S = 1e9  # 30 years; the timers of Python and gloo overflow not far above this
# Unicode categories: controls, undecodable bytes, line and paragraph ends
CONTROLS = ("Cc", "Cs", "Zl", "Zp")
SHOWN_NAMES = 10  # maximum number of names in a message
T = TypeVar("T")
# settings whose names end in these may be a tab, or Hive's \x01
MARKS = ("delimiter", "separator")


class InputError(Exception):
    """An error in a setting or an input that the user has to fix.

    The message is one line: what is wrong, the value seen, and what would be right. The class is not a ValueError: code
    that catches a parser's ValueError must not mistake an S3 error for a damaged file.
    """


class NotPermitted(InputError):
    """The user or role may not delete a file or object. A run works without this permission, but needs all others."""


class Failure(RuntimeError):
    """An error whose message is all that the user needs: one line, identical on all ranks, without a traceback."""


class Unreachable(Failure):
    """A service has failed even after several tries. The same command may succeed later."""


def check(ok: bool, message: str) -> None:
    """Raise InputError with `message` unless `ok`."""
    if not ok:
        raise InputError(message)


def check_values(settings: Mapping[str, Any]) -> None:
    """Raise InputError if a value is one that no setting allows.

    These are numbers that are not finite or not below 2^63, times that are too long for timers, empty strings (usually
    from an unset shell variable), and strings with control characters or references (${...}).
    """
    for key, value in leaves(settings):
        if isinstance(value, int | float):
            # False for NaN
            check(abs(value) < LARGEST, f"{key}={value} must be a finite number below 2^63")
            check(
                not key.endswith("_s") or value <= LONGEST_S,
                f"{key}={value:g} must be at most {LONGEST_S:g} s",
            )
        elif isinstance(value, str):
            check(
                value != "",
                f"{key}= is empty (a variable that is not set?); give a value or leave it out",
            )
            if key.startswith("data.label") or key.endswith(MARKS):
                check(not set(value) & set("\0\n\r"), f"{key}={value!r} must be one line")
            else:
                check_printable(value, f"{key}=")
            check(
                "${" not in value,
                f'{key}={value}: references are not resolved; let the shell do it: key="$NAME"',
            )


def check_printable(text: str, prefix: str = "") -> None:
    """Raise InputError if a name, path or URL contains a line break or another control character."""
    ok = text.isprintable() or all(unicodedata.category(each) not in CONTROLS for each in text)
    check(ok, f"{prefix}{text!r} must be one line without control characters")


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of each leaf of nested dicts and lists; a name looks like "optim.betas[0]"."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{key}[{index}]")
    else:
        yield key, value


def shortlist(names: Iterable[object], most: int = SHOWN_NAMES) -> str:
    """Join names with commas for a one-line message. If there are more than `most`, show `most` and the total."""
    every = list(map(str, names))
    return ", ".join(every[:most]) + (f", ... ({len(every):,})" if len(every) > most else "")


def plural(count: float, one: str, many: str = "") -> str:
    """Return the count and its noun, such as "1 rank" and "2 ranks"."""
    return f"{count:,.0f} {one if count == 1 else many or one + 's'}"


def check_choice(key: str, value: object, choices: Sequence[object]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    check(
        value in choices,
        f"{key}={value} is not known; choose one of: {', '.join(map(str, choices))}",
    )


# ---- limits of single settings -------------------------------------------------------------------------------------

LIMITS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "above": (operator.gt, "above {:,}"),
    "least": (operator.ge, "{:,} or more"),
    "below": (operator.lt, "below {:,}"),
    "most": (operator.le, "at most {:,}"),
}


def setting(default: T, **limits: Any) -> T:
    """Return a dataclass field. Its values must be None or within `limits`: `among` (choices) or keys of LIMITS."""
    return field(default=default, metadata=limits)


class Section:
    """The base class of all settings dataclasses. Names of its settings begin with `prefix`, such as "optim."."""

    prefix: ClassVar[str] = ""

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        cls.prefix = cls.prefix if prefix is None else prefix

    def __post_init__(self) -> None:
        """Raise InputError if a value is outside the limits of its field."""
        for item in fields(self):  # type: ignore[arg-type]
            key, value = self.prefix + item.name, getattr(self, item.name)
            for name, limit in item.metadata.items() if value is not None else ():
                if name == "among":
                    check_choice(key, value, limit)
                else:
                    is_within, words = LIMITS[name]
                    check(is_within(value, limit), f"{key}={value} must be {words.format(limit)}")
