"""Errors of reading: the library's errors become one line for the user; one bad row is a value, not an end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from train.config import Failure, InputError, shortlist
from train.system.schema import BadContent

SHOWN_COLUMNS = 20
LIBRARY_ERRORS = (OSError, ValueError, RuntimeError)  # of datasets and pyarrow, for data that is bad or missing
# No text holds these characters: half of a surrogate pair, which JSON can escape, and the stand-ins of bytes that do
# not decode.
SURROGATE = re.compile("[\ud800-\udfff]")


class BadRow(Exception):
    """An error because one row cannot be used; the message has the reason without naming the row."""


def listed(columns: Iterable[str], wanted: str) -> str:
    """Return the names of columns for a message: some of many, and a close one to `wanted` (blanks, capitals)."""
    names = list(columns)
    near = next((name for name in names if name.strip().lower() == wanted.strip().lower()), None)
    hint = "" if near is None else f'; "{near}" is there: blanks and capitals count'
    return (shortlist(names, SHOWN_COLUMNS) or "(none)") + hint


@contextmanager
def naming(what: str, errors: tuple[type[Exception], ...], hint: str = "") -> Iterator[None]:
    """Turn a library's error into one line that names what was read."""
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
    """Return the fault of a text's characters; None if there is none. `settings` decide how it is decoded."""
    if "\0" in text:
        return BadRow(f"a NUL character, which no text has: a binary file, or another encoding; check {settings}")
    bad = None if text.isascii() else SURROGATE.search(text)
    if bad is None:
        return None
    code = ord(bad.group())
    if 0xDC80 <= code <= 0xDCFF:
        return BadRow(f"byte {code - 0xDC00:#04x} is not {encoding}; check {settings}")
    return BadRow("half of a surrogate pair")
