"""A budget for compiled graphs: on Trainium each one takes minutes to compile, and an unexpected one is a mistake."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from train.parallel.guards import Shapes

if TYPE_CHECKING:
    from train.data.batches.loader import Batch

logger = logging.getLogger("train")


class Graphs(NamedTuple):
    compiled: int = 0  # since the first batch
    compile_s: float = 0.0  # total
    executed: int = 0  # since the first batch


class GraphBudget:
    """A count of the graphs compiled since the first batch, compared with the number that the run should need."""

    def __init__(self, compiled: Callable[[], int], *, is_fatal: bool, hint: str) -> None:
        """Count by `compiled`; `hint` says how to find the cause if it is not a new shape."""
        self.compiled, self.is_fatal, self.hint = compiled, is_fatal, hint
        self.limit = 0  # set once the model is known
        self.base: int | None = None
        self.reported = 0
        self.shapes = Shapes()  # those of the stream that changed last

    def start(self) -> None:
        """Begin to count, unless it has begun: earlier graphs are set-up."""
        if self.base is None:
            self.base = self.compiled()

    @property
    def used(self) -> int:
        return 0 if self.base is None else self.compiled() - self.base

    def forgive(self, number: int) -> None:
        """Exclude this number of compiled graphs from the count: they were part of no step."""
        if self.base is not None:
            self.base += number

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, and record their shapes: they explain an extra graph."""
        shapes = Shapes()
        for batch in batches:
            if "failure" not in batch and shapes.see(batch["inputs"]):
                self.shapes = shapes
            yield batch

    def check(self) -> None:
        """Raise RuntimeError (or warn, once a graph) and name the likely cause if too many graphs were compiled."""
        used = self.used
        if used <= max(self.limit, self.reported):
            return
        self.reported = used
        message = f"graph {used} was compiled, {self.limit} are expected; " + (
            self.shapes.last_change() or f"no input changed its shape: {self.hint}"
        )
        if self.is_fatal:
            raise RuntimeError(message)
        logger.warning(message)


class Compilers:
    """A flag shared by the ranks: some rank is compiling.

    The watchdog asks on behalf of a rank that makes no progress: other machines wait in a collective for one that
    compiles, and learn of it through the store by which they joined.
    """

    def __init__(self, is_compiling: Callable[[], bool] = lambda: False, store: dist.Store | None = None) -> None:
        self.is_compiling, self.store = is_compiling, store
        self.signs: int | None = None  # count of signs that compiling ranks have given
        self.others_compile = False
        self.asking: Thread | None = None

    def are_busy(self) -> bool:
        """Return whether this rank compiles, which it tells the others, or another one did when last asked.

        It never waits for the store: its machine may have died without a word, and then the answer is no.
        """
        compiles = self.is_compiling()
        if self.store is None or (self.asking is not None and self.asking.is_alive()):
            return compiles
        others_compile, self.asking = self.others_compile, Thread(target=self.ask, args=[int(compiles)], daemon=True)
        self.asking.start()
        return compiles or others_compile

    def ask(self, own_signs: int) -> None:
        assert self.store is not None
        before, self.others_compile = self.signs, False
        with suppress(dist.DistError):  # the store has ended with its machine
            self.signs = self.store.add("signs_of_compiling", own_signs)
            self.others_compile = before is not None and self.signs > before


class ThreadSource:
    """Batches for a loader thread, which would silently take an exception for the end of the data."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self.batches = batches
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[Batch]:
        try:
            yield from self.batches
        except Exception as error:
            self.failure = error

    def raise_failure(self) -> None:
        """Raise the exception of the loader thread. The training thread calls it after the last batch."""
        if self.failure is not None:
            raise self.failure
