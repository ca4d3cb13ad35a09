"""The time, which tests replace."""

from __future__ import annotations

import time


class Clock:
    def now(self) -> float:
        """Seconds since 1970, as EC2 and records have it."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
