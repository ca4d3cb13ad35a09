"""A budget for compiled graphs: on Trainium each one takes minutes to compile, and an unexpected one is a fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

logger = logging.getLogger("train")


class Graphs(NamedTuple):
    compiled: int = 0  # graphs compiled since the first batch
    compile_s: float = 0.0  # seconds of compiling since the process began
    executed: int = 0  # executions since the first batch


class GraphBudget:
    """A count of the graphs compiled since the first batch, and `limit`, the number that the run should need."""

    def __init__(self, compiled: Callable[[], int], *, is_fatal: bool, hint: str) -> None:
        """Store `compiled`, which returns the number of graphs so far. `hint`: how to find the cause."""
        self.compiled = compiled
        self.is_fatal = is_fatal
        self.hint = hint
        self.limit = 0  # set once the model is known
        self.base: int | None = None
        self.reported = 0

    def start(self) -> None:
        """Begin to count, unless counting has begun. Earlier graphs belong to the set-up."""
        if self.base is None:
            self.base = self.compiled()

    @property
    def used(self) -> int:
        if self.base is None:
            return 0
        return self.compiled() - self.base

    def forgive(self, number: int) -> None:
        """Exclude `number` compiled graphs from the count, because they belong to no step."""
        if self.base is not None:
            self.base += number

    def check(self) -> None:
        """Raise RuntimeError if more than `limit` graphs were compiled; warn if not `is_fatal`."""
        used = self.used
        if used <= max(self.limit, self.reported):
            return
        self.reported = used
        message = f"graph {used} was compiled, but only {self.limit} are expected; {self.hint}"
        if self.is_fatal:
            raise RuntimeError(message)
        logger.warning(message)


def brief(error: BaseException) -> str:
    """Return the type and the first line of an error. A reference to it would keep the memory of its frames."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
