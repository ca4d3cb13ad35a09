"""Errors in data: a library's error becomes one line for the user, and a bad row a value, so that reading continues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from yaml import YAMLError

from train.config import Failure, InputError, shortlist
from train.storage.schema import BadContent

SHOWN_COLUMNS = 20
# datasets and pyarrow raise these if data is missing, bad or described wrongly, or claims more memory than there is.
LIBRARY_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    MemoryError,
    YAMLError,
)
# Characters that valid text never contains: halves of surrogate pairs, which can come from JSON escapes, and the
# characters that "surrogateescape" substitutes for bytes that do not decode.
SURROGATE = re.compile("[\ud800-\udfff]")


class BadRow(Exception):
    """The reason why a row cannot be used: raised, or yielded in place of its values. It does not locate the row."""


def columns_shown(columns: Iterable[str]) -> str:
    """Return at most 20 column names for a message, with a hint if the only one is probably several."""
    names = list(columns)
    shown = shortlist(names, SHOWN_COLUMNS) or "(none)"
    return shown + delimiter_hint(names)


def delimiter_hint(names: list[str]) -> str:
    """Return a hint for a message if the only column is probably several."""
    for mark in ";|\t":
        if len(names) == 1 and mark in names[0]:
            return f"; the delimiter seems to be {mark!r}"
    return ""


@contextmanager
def naming(what: str, errors: tuple[type[Exception], ...], hint: str = "") -> Iterator[None]:
    """Turn BadContent, or an exception in `errors`, into a one-line InputError that begins with `what`."""
    try:
        yield
    except BadContent as error:
        raise InputError(f"{what}: {error}{hint}") from None
    except (InputError, Failure):
        raise
    except errors as error:
        reason = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
        raise InputError(f"{what}: {reason.splitlines()[0]}{hint}") from error


def unreadable(text: str, encoding: str, settings: str = "data.encoding") -> BadRow | None:
    """Return a BadRow if a text has invalid characters, else None. The message suggests checking `settings`."""
    if "\0" in text:
        return BadRow(
            f"a NUL character: a binary file, or text in another encoding; check {settings}"
        )
    if text.isascii():
        bad = None
    else:
        bad = SURROGATE.search(text)
    if bad is None:
        return None
    code = ord(bad.group())
    if 0xDC80 <= code <= 0xDCFF:
        return BadRow(f"byte {code - 0xDC00:#04x} is not {encoding}; check {settings}")
    return BadRow("half of a surrogate pair")
