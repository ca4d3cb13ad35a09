"""A budget for compiled graphs: on Trainium each one is minutes of compilation, and an unforeseen one a mistake."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from train.backend.guards import Shapes

if TYPE_CHECKING:
    from train.data.batches import Batch

logger = logging.getLogger("train")


class Graphs(NamedTuple):
    compiled: int = 0  # since the first batch
    compile_s: float = 0.0  # of all compiling
    executed: int = 0  # since the first batch


class GraphBudget:
    """Counts the graphs compiled since the first batch and compares with what the run should need."""

    def __init__(self, compiled: Callable[[], int], *, is_fatal: bool) -> None:
        self.compiled, self.is_fatal = compiled, is_fatal
        self.limit = 0  # set once the model is known
        self.base: int | None = None
        self.told = 0
        self.shapes = Shapes()  # of the stream that changed them last

    def start(self) -> None:
        """From here on counts, unless it does already: what came before is set-up."""
        if self.base is None:
            self.base = self.compiled()

    @property
    def used(self) -> int:
        return 0 if self.base is None else self.compiled() - self.base

    def forgive(self, number: int) -> None:
        """Not to count so many of those compiled: they were part of no step."""
        if self.base is not None:
            self.base += number

    def check(self) -> None:
        """Raises RuntimeError (or warns, once a graph) if there are more graphs than allowed, with the likely cause."""
        used = self.used
        if used <= max(self.limit, self.told):
            return
        self.told = used
        message = (
            f"graph {used} was compiled, {self.limit} are expected (backend.max_graphs); {self.shapes.last_change()}"
        )
        if self.is_fatal:
            raise RuntimeError(message)
        logger.warning(message)


class Watched:
    """Batches for a loader thread, which would take an exception for the end of the data and say nothing."""

    def __init__(self, batches: Iterable[Batch], budget: GraphBudget) -> None:
        self.batches, self.budget = batches, budget
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[Batch]:
        shapes = Shapes()
        try:
            for batch in self.batches:
                if "failure" not in batch and shapes.see(batch["inputs"]):
                    self.budget.shapes = shapes
                yield batch
        except Exception as error:
            self.failure = error

    def raise_failure(self) -> None:
        """In the training thread, once the loader says that the data has ended."""
        if self.failure is not None:
            raise self.failure
