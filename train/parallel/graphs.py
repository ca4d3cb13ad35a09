"""A budget for compiled graphs: on Trainium each one takes minutes to compile, and an unexpected one is a fault."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

if TYPE_CHECKING:
    from train.data.batches.loader import Batch

logger = logging.getLogger("train")


class Graphs(NamedTuple):
    compiled: int = 0  # graphs compiled since the first batch
    compile_s: float = 0.0  # seconds of compiling since the process began
    executed: int = 0  # executions since the first batch


class GraphBudget:
    """A count of the graphs compiled since the first batch, and `limit`, the number that the run should need."""

    def __init__(self, compiled: Callable[[], int], *, is_fatal: bool, hint: str) -> None:
        """Store `compiled`, which returns the number of graphs so far. `hint`: how to find causes other than shapes."""
        self.compiled = compiled
        self.is_fatal = is_fatal
        self.hint = hint
        self.limit = 0  # set once the model is known
        self.base: int | None = None
        self.reported = 0
        # The distinct input shapes of one stream of batches: the stream that most recently had a new shape.
        self.shapes: list[dict[str, tuple[int, ...]]] = []

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

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches and record their shapes, which explain an extra graph."""
        seen: list[dict[str, tuple[int, ...]]] = []
        for batch in batches:
            if "failure" in batch:
                shapes = {}
            else:
                shapes = {name: tuple(each.shape) for name, each in batch["inputs"].items()}
            if shapes and shapes not in seen:
                seen.append(shapes)
                self.shapes = seen
            yield batch

    def check(self) -> None:
        """Raise RuntimeError with a likely cause if more than `limit` graphs were compiled; warn if not `is_fatal`."""
        used = self.used
        if used <= max(self.limit, self.reported):
            return
        self.reported = used
        cause = f"no input changed its shape: {self.hint}"
        if len(self.shapes) > 1:
            first = self.shapes[0]
            last = self.shapes[-1]
            changed = [
                f"{k} {list(first.get(k, ()))} -> {list(v)}"
                for k, v in last.items()
                if first.get(k) != v
            ]
            cause = "inputs changed their shape: " + ", ".join(changed)
        message = f"graph {used} was compiled, but only {self.limit} are expected; {cause}"
        if self.is_fatal:
            raise RuntimeError(message)
        logger.warning(message)


class Compilers:
    """A flag shared by the ranks, which is set while any rank compiles.

    The watchdog reads it when its rank makes no progress, because the rank may be waiting in a collective for a machine
    that compiles. The flag is in the store through which the ranks joined.
    """

    def __init__(
        self, is_compiling: Callable[[], bool] = lambda: False, store: dist.Store | None = None
    ) -> None:
        self.is_compiling, self.store = is_compiling, store
        # the store's count of messages from compiling ranks, as last read
        self.signs: int | None = None
        self.others_compile = False
        self.asking: Thread | None = None

    def are_busy(self) -> bool:
        """Return whether this rank is compiling, or another was when last asked. Tells the others if this rank is.

        This never waits for the store, whose machine may have died. If it does not answer, other ranks count as idle.
        """
        compiles = self.is_compiling()
        if self.store is None or (self.asking is not None and self.asking.is_alive()):
            return compiles
        others_compile, self.asking = (
            self.others_compile,
            Thread(target=self.ask, args=[int(compiles)], daemon=True),
        )
        self.asking.start()
        return compiles or others_compile

    def ask(self, own_signs: int) -> None:
        assert self.store is not None
        before = self.signs
        self.others_compile = False
        with suppress(dist.DistError):  # the store's process has ended
            self.signs = self.store.add("signs_of_compiling", own_signs)
            self.others_compile = before is not None and self.signs > before


def brief(error: BaseException) -> str:
    """Return the type and the first line of an error. A reference to it would keep the memory of its frames."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
