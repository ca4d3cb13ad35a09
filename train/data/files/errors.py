"""Errors in data: a library's error becomes one line for the user; a bad row is a value, so that reading continues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from train.config import Failure, InputError, shortlist
from train.system.schema import BadContent

SHOWN_COLUMNS = 20
LIBRARY_ERRORS = (OSError, ValueError, RuntimeError)  # raised by datasets and pyarrow if data is bad or missing
# No text has these characters: half of a surrogate pair, which JSON can escape, and the characters that stand for bytes
# that do not decode.
SURROGATE = re.compile("[\ud800-\udfff]")


class BadRow(Exception):
    """An error raised because one row cannot be used. Its message has the reason, and does not name the row."""


def listed(columns: Iterable[str], wanted: str) -> str:
    """Return column names for a message: the first of many, and any that equals `wanted` up to blanks and capitals."""
    names = list(columns)
    near = next((name for name in names if name.strip().lower() == wanted.strip().lower()), None)
    hint = "" if near is None else f'; "{near}" is there: blanks and capitals count'
    return (shortlist(names, SHOWN_COLUMNS) or "(none)") + hint


@contextmanager
def naming(what: str, errors: tuple[type[Exception], ...], hint: str = "") -> Iterator[None]:
    """Turn one of the `errors` of a library into a one-line InputError that says `what` failed."""
    try:
        yield
    except BadContent as error:
        raise InputError(f"{what}: {error}{hint}") from None
    except (InputError, Failure):
        raise
    except errors as error:
        lines = str(getattr(error, "strerror", None) or error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"{what}: {lines[0]}{hint}") from error


def unreadable(text: str, encoding: str, settings: str = "data.encoding") -> BadRow | None:
    """Return the fault of a text's characters; None if all are fine. `settings`: what the message advises to check."""
    if "\0" in text:
        return BadRow(f"a NUL character, which no text has: a binary file, or another encoding; check {settings}")
    bad = None if text.isascii() else SURROGATE.search(text)
    if bad is None:
        return None
    code = ord(bad.group())
    if 0xDC80 <= code <= 0xDCFF:
        return BadRow(f"byte {code - 0xDC00:#04x} is not {encoding}; check {settings}")
    return BadRow("half of a surrogate pair")
