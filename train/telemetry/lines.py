"""Writing lines to a file on a disk that may be full for a while, and reading those of metrics.jsonl."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config import check

logger = logging.getLogger("train")
HELD_LINES = 100_000  # kept in memory while the disk refuses them; beyond it the oldest are lost
LINE: dict[str, type | tuple[type, ...]] = {  # what every line of the metrics holds
    "kind": str,
    "attempt": int,
    "time_unix_s": (int, float),
    "step": int,
}


class LineFile:
    """A file that holds whole lines only. A line that the disk refuses is tried again with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)  # less the umask
        self.end = os.fstat(self.handle).st_size  # end of the last whole line
        self.waiting: deque[bytes] = deque(maxlen=HELD_LINES)
        self.refused = False

    def write(self, line: str) -> None:
        self.waiting.append(line.encode() + b"\n")
        try:
            while self.waiting:
                self._put(self.waiting[0])
                self.waiting.popleft()
        except OSError as error:
            if not self.refused:
                logger.warning("%s: %s; its lines wait in memory", self.path, error.strerror)
            self.refused = True
        else:
            self.refused = False

    def _put(self, line: bytes) -> None:
        done = 0
        while done < len(line):  # half a line is written again from its beginning
            done += os.pwrite(self.handle, line[done:], self.end + done)
        self.end += done

    def close(self, *, cuts_off: bool = True) -> None:
        """Close the file. `cuts_off`: remove half a line at its end; False if another job writes to the file by now."""
        if cuts_off:
            os.truncate(self.handle, self.end)
        os.close(self.handle)
        if self.waiting:
            logger.error("%s: %d lines could not be written", self.path, len(self.waiting))


def finite(value: Any) -> bool:
    """Whether JSON can hold the value: it has no NaN and no infinity."""
    return not isinstance(value, float) or math.isfinite(value)


def read_lines(metrics: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl, none if there is no such file. InputError for one of an earlier version."""
    yield from parse_lines(metrics.read_bytes() if metrics.is_file() else b"", where=str(metrics))


def parse_lines(content: bytes, *, where: str = "metrics.jsonl") -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl, which may hold anything.

    A line that is damaged, or that a killed process left half written, is left out: a run continues without it.
    InputError if a line does not name its attempt: an earlier version wrote it, and nothing here can use it.
    """
    for text in content.splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        check(
            not isinstance(line, dict) or LINE.keys() - line.keys() != {"attempt"},
            f"{where} is of an earlier version: its lines do not name their attempt. Use that version, or begin a "
            "new run from its weights with model.init_from",
        )
        if isinstance(line, dict) and all(isinstance(line.get(key), kind) for key, kind in LINE.items()):
            yield line
