"""The way out for text: standard output and error, log records and warnings.

Text may quote files that others wrote. `visible` makes characters visible that could move the cursor, reorder a line or
begin a forged one, and hides secrets. `say` and log records keep a text on one line; the streams check the rest, also
the output of libraries.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

SECRETS = re.compile(
    r"\w*(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY|ACCESS_KEY_ID|JWT)", re.IGNORECASE
)
SHORTEST_SECRET = 8  # characters; a shorter value may be a part of ordinary words
RESULT = logging.INFO + 1  # level of a message that --quiet leaves, although it is no warning
CURSOR = re.compile(r"(?:[\r\n]|\x1b\[A)*")  # what tqdm begins its writes with


# ---- text ------------------------------------------------------------------------------------------------------------


def visible(text: object, *, keep: str = "") -> str:
    """Return a text in which unprintable characters except those in `keep` are escaped, and secrets are hidden.

    Unprintable are line ends, controls, escapes, bidirectional controls, invisible characters and spaces of other
    scripts.
    """
    shown = str(text)
    for value, name in secrets():
        shown = shown.replace(value, f"[{name}]")
    if shown.isprintable():
        return shown
    return "".join(each if each.isprintable() or each in keep else escaped(each) for each in shown)


def escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()


def visible_json(line: str) -> str:
    """Return a line of JSON with the same value, in which unprintable characters are escaped."""
    if line.isprintable():
        return line
    return "".join(x if x.isprintable() else json.dumps(x)[1:-1] for x in line)


def printable(text: str) -> str:
    """Return the text as one line, without control characters (file names may have them) or passwords in URLs."""
    line = re.sub(r"://\S*@", "://...@", " ".join(text.split()))  # user:password@ of a URL
    return visible(re.sub(r"(endpoint=[^\s?#]*)[?#]\S*", r"\1?...", line))


@cache
def secrets() -> tuple[tuple[str, str], ...]:
    """Return the secrets in the environment, as they are and quoted, each with the name of its variable."""
    found = dict[str, str]()
    for name, value in os.environ.items():
        if SECRETS.fullmatch(name) and len(value) >= SHORTEST_SECRET:
            in_code = ascii(value)[1:-1]
            in_url = quote(value, safe="", errors="replace")
            found |= dict.fromkeys((value, in_code, in_url), name)
    # a secret may be a part of another
    return tuple(sorted(found.items(), key=lambda item: -len(item[0])))


def trace_of(error: BaseException) -> str:
    """Return a traceback. Further lines of a message are indented, so that they cannot pass for lines of a log."""
    parts = (
        re.sub(r"\n(?=\S)", "\n    ", part.rstrip("\n"))
        for part in traceback.format_exception(error)
    )
    return visible("\n".join(parts), keep="\n")


# ---- streams ---------------------------------------------------------------------------------------------------------


class Console:
    """A stream whose text is visible. If `drops`, its writes and flushes always succeed.

    A failed flush at exit would change the exit code.
    """

    def __init__(self, stream: TextIO, *, drops: bool) -> None:
        self.stream = stream
        self.drops = drops

    def write(self, text: str) -> int:
        start = CURSOR.match(text).end()  # type: ignore[union-attr]
        try:
            self.stream.write(text[:start] + visible(text[start:], keep="\n\t"))
        except (OSError, ValueError):
            if not self.drops:
                raise
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError):
            if not self.drops:
                raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def use_console(*names: str, drops: bool = True) -> None:
    """Make what these streams ("stdout", "stderr") print visible and, if `drops`, make their writes always succeed.

    A program that does more than print must not end because its text cannot be written (full disk, `| head`).
    """
    for name in names:
        stream = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115
        if isinstance(stream, Console):
            stream.drops |= drops
            continue
        if isinstance(stream, io.TextIOWrapper):
            # as for standard error: the C locale has only ASCII
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Console(stream, drops=drops))


def say(*lines: object, file: TextIO | None = None, keep: str = "") -> None:
    """Print each text on a line of its own. `file` is standard output by default; `keep` is that of `visible`."""
    print(*(visible(line, keep=keep) for line in lines), sep="\n", file=file, flush=True)


@dataclass
class Speech:
    """The amount of what this command says, apart from warnings, its result and errors."""

    is_quiet: bool = False  # it says nothing else
    all_lines: bool = False  # the user has typed log_every, so each of its lines is said


speech = Speech()


def note(*lines: object) -> None:
    """Print texts on what is being done on standard error, unless the command is to be quiet."""
    if lines and not speech.is_quiet:
        say(*lines, file=sys.stderr)


@contextmanager
def without_stdout() -> Iterator[None]:
    """Drop everything that this process prints to standard output in the block, from any thread or C++ library."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


# ---- the start of a program ------------------------------------------------------------------------------------------


class VisibleRecord(logging.LogRecord):
    """A record of any logger, also a library's, whose message is one visible line."""

    def getMessage(self) -> str:
        return visible(super().getMessage())


class LogFormatter(logging.Formatter):
    """A formatter whose tracebacks come from `trace_of`."""

    def formatException(self, ei: Any) -> str:
        return trace_of(ei[1])


def begin_program() -> None:
    """Prepare a program's output, umask and variables of services. Programs call it before anything else."""
    before = os.umask(0o077)
    # Libraries and mkdir(parents=True) make what the umask allows. Others may never write; a group may, if they cannot.
    os.umask(before if before & 0o002 else before | 0o022)
    use_console("stderr")
    use_console("stdout", drops=False)
    speech.is_quiet = speech.all_lines = False
    logging.setLogRecordFactory(VisibleRecord)
    logging.addLevelName(RESULT, "RESULT")
    warnings.formatwarning = one_warning


def one_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    return f"{filename}:{lineno}: {category.__name__}: {visible(message)}\n"
