"""Lines of a file that is appended to, on a disk that may be full for a while."""

from __future__ import annotations

import logging
import math
import os
from collections import deque
from pathlib import Path
from typing import Any

logger = logging.getLogger("train")
HELD_LINES = 100_000  # in memory, while the disk refuses them; then the oldest are lost


class LineFile:
    """Each line is there whole or not at all. What the disk refuses is tried again with the next line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)  # less the umask
        self.end = os.fstat(self.handle).st_size  # of the last whole line
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
        while done < len(line):  # what is half there is written again from its beginning
            done += os.pwrite(self.handle, line[done:], self.end + done)
        self.end += done

    def close(self, *, cuts_off: bool = True) -> None:
        """`cuts_off`: half a line; not if somebody else writes to the file now."""
        if cuts_off:
            os.truncate(self.handle, self.end)
        os.close(self.handle)
        if self.waiting:
            logger.error("%s: %d lines could not be written", self.path, len(self.waiting))


def finite(value: Any) -> bool:
    """JSON has no NaN."""
    return not isinstance(value, float) or math.isfinite(value)
