"""Communication between ranks through host memory, over gloo: the methods of `World`.

Unless stated otherwise, all ranks must call these methods in the same order, and each call waits for all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from train.config import Failure, InputError
from train.machine.launched import launched
from train.machine.runtime import pool_beside_training

Result = TypeVar("Result")
POLL_S = 0.05
LOADING_RANKS = 8  # ranks per machine that may load a checkpoint at the same time; 32 copies have filled the memory
AGREED = (InputError, Failure, FloatingPointError)  # exceptions that `agree` raises on all ranks


def no_wait() -> None:
    """Do nothing. This is the `on_wait` of callers without a watchdog that expects heartbeats."""


class World:
    """The ranks of a run, as the launcher numbers them."""

    # None is the default group, which uses gloo for host tensors.
    group: dist.ProcessGroup | None = None

    def __init__(self) -> None:
        launch = launched()
        self.rank, self.size = launch.rank, launch.world_size
        self.local_rank, self.local_size = launch.local_rank, launch.local_world_size
        # True under a launcher, even with a single rank.
        self.is_distributed = launch.is_distributed

    @property
    def num_machines(self) -> int:
        return -(-self.size // self.local_size)

    def beside(self, group: dist.ProcessGroup | None) -> World:
        """Return a World of the same ranks with another group, for use in a thread; with None, of this rank alone."""
        other = copy(self)
        other.group = group
        other.is_distributed = group is not None
        return other

    # ---- values ----------------------------------------------------------------------------------------------------

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start to sum numbers over all ranks. Call the returned function to wait for the sums."""
        if not self.is_distributed:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def sums() -> list[float]:
            work.wait()
            return [float(value) for value in tensor]

        return sums

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each number over all ranks."""
        return self.begin_sum(values)()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.sum([0.0])

    def all_gather_object(self, value: Result) -> list[Result]:
        """Return every rank's value in rank order, on all ranks."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Result) -> Result:
        """Return rank 0's value on all ranks. Other ranks' values are ignored, and rank 0 does not wait."""
        if not self.is_distributed:
            return value
        values: list[Any] = [None]
        if self.rank == 0:
            values = [value]
        dist.broadcast_object_list(values, group=self.group)
        return cast(Result, values[0])

    def gather(self, value: Result) -> list[Result]:
        """Return every rank's value in rank order, on rank 0; an empty list elsewhere."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.gather_object(value, values if self.rank == 0 else None, group=self.group)
        if self.rank > 0:
            return []
        return values

    # ---- actions ---------------------------------------------------------------------------------------------------

    def agree(self, action: Callable[[], Result]) -> Result:
        """Run an action on every rank. Returns this rank's result if all ranks succeed.

        Otherwise all ranks raise the first failure, as `raise_failure` does.
        """
        result = None
        failure: Exception | None = None
        try:
            result = action()
        except AGREED as error:
            failure = error.with_traceback(None)
        except Exception as error:
            failure = error
        if self.sum([failure is not None])[0]:
            self.raise_failure(failure)
        return cast(Result, result)

    def raise_failure(self, failure: Exception | None) -> NoReturn:
        """Raise on all ranks the failure of the lowest rank that has one. At least one rank must have one.

        A failure that is not in AGREED is raised on its rank. Other ranks raise a RuntimeError that names the rank.
        """
        told = failure
        if failure is not None and not isinstance(failure, AGREED):
            told = RuntimeError(f"rank {self.rank}: {type(failure).__name__}: {failure}")
        first = self.broadcast(next(filter(None, self.gather(told)), None))
        assert first is not None
        if failure is not None and told is not failure:
            raise failure
        raise first

    def run_and_broadcast(self, action: Callable[[], Result]) -> Result:
        """Run an action on rank 0 and return its result on all ranks. Failures are raised as in `agree`."""
        is_first = self.rank == 0
        return self.broadcast(cast(Result, self.agree(lambda: action() if is_first else None)))

    def run_on_rank0(
        self, action: Callable[[], Result], on_wait: Callable[[], None] = no_wait
    ) -> Result:
        """Run an action in a thread of rank 0 and return its result on all ranks. Failures are raised as in `agree`.

        The action may take longer than the timeout of a collective, and must not use collectives. Meanwhile all ranks
        call `on_wait` repeatedly.
        """
        return self.broadcast(cast(Result, self._some_do(action, self.rank == 0, on_wait)))

    def run_on_local_rank0(
        self, action: Callable[[], Result], on_wait: Callable[[], None] = no_wait
    ) -> Result | None:
        """Run an action on each machine's first rank and return its result there. Other ranks wait and return None."""
        return self._some_do(action, self.local_rank == 0, on_wait)

    def _some_do(
        self, action: Callable[[], Result], is_mine: bool, on_wait: Callable[[], None]
    ) -> Result | None:
        if not is_mine:
            self.wait_until(lambda: True, on_wait)
            return self.agree(lambda: None)
        with pool_beside_training("action") as pool:
            future = pool.submit(action)
            self.wait_until(future.done, on_wait)
            return self.agree(future.result)

    def wait_until(
        self, is_done: Callable[[], bool], on_wait: Callable[[], None] = no_wait
    ) -> None:
        """Wait until `is_done` returns True on all ranks. Until then, call `on_wait` repeatedly."""
        while self.sum([not is_done()])[0]:
            on_wait()
            time.sleep(POLL_S)

    @contextmanager
    def stagger_local_ranks(self) -> Iterator[None]:
        """Let at most LOADING_RANKS ranks per machine enter at a time: its memory may not hold more checkpoints."""
        num_turns = -(-self.local_size // LOADING_RANKS)
        mine = self.local_rank // LOADING_RANKS
        for _ in range(mine):
            self.barrier()
        try:
            yield
        finally:
            for _ in range(num_turns - mine):
                self.barrier()
