"""The time since a run began, although machines disagree about the time and clocks are set back between attempts."""

from __future__ import annotations

import math
import time

TOLERANCE_S = 1.0  # of clocks that agree


class RunClock:
    """Seconds since the first attempt of a run began, by this machine's clock, but never fewer than the attempts took.
    Within an attempt only the monotonic clock counts.
    """

    def __init__(self, first_started_unix_s: object, *, age_s: float) -> None:
        """`first_started_unix_s` is what the run folder says, None in the first attempt; `age_s` is this attempt's."""
        self.began_s = time.monotonic() - age_s
        began_unix_s, first = time.time() - age_s, first_started_unix_s
        is_known = isinstance(first, int | float) and math.isfinite(first)
        self.first_started_unix_s = float(first) if is_known else began_unix_s  # type: ignore[arg-type]
        self.before_s = began_unix_s - self.first_started_unix_s
        self.attempts_before_s = 0.0

    def attempt_s(self) -> float:
        """How long this attempt has taken."""
        return time.monotonic() - self.began_s

    def attempts_s(self) -> float:
        """How long all attempts took, without the pauses between them and without what no checkpoint has."""
        return self.attempts_before_s + self.attempt_s()

    def run_s(self) -> float:
        """Time since the first attempt began, pauses included."""
        return max(self.before_s, self.attempts_before_s) + self.attempt_s()

    def go_on(self, attempts_s: float) -> str | None:
        """Add the time of earlier attempts. Gives a warning if the clock says that it was less."""
        self.attempts_before_s = attempts_s
        if self.before_s >= attempts_s - TOLERANCE_S:
            return None
        return (
            "the clock was set back, or the machines of this run disagree about the time: this attempt seems to begin "
            f"{self.before_s:.0f} s after the first one, though earlier attempts took {attempts_s:.0f} s; goodput and "
            "the time since the first start leave the pauses between attempts out"
        )
