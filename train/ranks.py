"""Communication between the hosts of all ranks, over gloo: every wait of one rank for another is a method of `World`.

Methods whose names do not begin with `begin` wait for all ranks, and all ranks call them in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from train.config import Failure, InputError
from train.host.launched import launched
from train.host.runtime import pool_beside_training

Result = TypeVar("Result")
POLL_S = 0.05
LOADING_RANKS = 8  # of one machine that hold a checkpoint on the host at once; 32 copies have exhausted its memory
AGREED = (InputError, Failure, FloatingPointError)  # failures that `agree` raises on all ranks alike


def no_wait() -> None:
    """Do nothing while waiting, where no watchdog is told of it."""


class World:
    """The ranks of a run, as the launcher numbers them."""

    group: dist.ProcessGroup | None = None  # None: the default group, which then speaks gloo for host tensors

    def __init__(self) -> None:
        launch = launched()
        self.rank, self.size = launch.rank, launch.world_size
        self.local_rank, self.local_size = launch.local_rank, launch.local_world_size
        self.is_distributed = launch.is_distributed  # a launcher numbers the ranks, even if there is only one

    @property
    def num_machines(self) -> int:
        return -(-self.size // self.local_size)

    def beside(self, group: dist.ProcessGroup | None) -> World:
        """The same ranks in a group of their own, for a thread of each. None: this rank by itself."""
        other = copy(self)
        other.group, other.is_distributed = group, group is not None
        return other

    # ---- values ----------------------------------------------------------------------------------------------------

    def begin_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Post numbers to be added over all ranks, without waiting. The result waits for the sums."""
        if not self.is_distributed:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self.group, async_op=True)

        def sums() -> list[float]:
            work.wait()
            return [float(value) for value in tensor]

        return sums

    def sum(self, values: Sequence[float]) -> list[float]:
        """Numbers added over all ranks."""
        return self.begin_sum(values)()

    def all_gather_object(self, value: Result) -> list[Result]:
        """Every rank's value in rank order, on all ranks."""
        if not self.is_distributed:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Result) -> Result:
        """The value of rank 0, on all ranks."""
        return self.all_gather_object(value)[0]

    def gather(self, value: Result) -> list[Result]:
        """Every rank's value in rank order, on rank 0; an empty list elsewhere."""
        if not self.is_distributed:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group)
        return values or []

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a host tensor over all ranks, in place."""
        dist.all_reduce(tensor, group=self.group)

    def sendrecv(self, peer: int, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Send a tensor of the host to another rank, and fill `theirs` with what it sends at the same time."""
        sending = dist.isend(mine, peer, group=self.group)
        dist.recv(theirs, peer, group=self.group)
        assert sending is not None  # as it would be for ranks outside the group
        sending.wait()

    def recv_from(self, tensors: Sequence[torch.Tensor], source: int) -> None:
        """Fill tensors of rank 0, on the host, with those of rank `source`. Only these two call it."""
        for tensor in tensors:
            if self.rank == source:
                dist.send(tensor.detach().cpu(), 0, group=self.group)
            else:
                dist.recv(tensor, source, group=self.group)

    # ---- actions ---------------------------------------------------------------------------------------------------

    def agree(self, action: Callable[[], Result]) -> Result:
        """Take an action on every rank. Returns this rank's result if all succeed; otherwise all ranks raise the first
        failure. A failure that is none of AGREED ends its rank alone.
        """
        result, failure = None, None
        try:
            result = action()
        except AGREED as error:
            failure = error.with_traceback(None)
        if self.sum([failure is not None])[0]:
            self.raise_failure(failure)
        return cast(Result, result)

    def raise_failure(self, failure: Exception | None) -> None:
        """Raise the first failure of all ranks on all of them; at least one rank passes one."""
        raise next(error for error in self.all_gather_object(failure) if error is not None)

    def run_on_rank0(self, action: Callable[[], Result], on_wait: Callable[[], None] = no_wait) -> Result:
        """Take an action on rank 0, in a thread, so without collectives. Returns its result on all ranks, which wait
        with `on_wait` called, even past the timeout of a collective. A failure is raised as in `agree`.
        """
        return self.broadcast(cast(Result, self._some_do(action, self.rank == 0, on_wait)))

    def run_on_local_rank0(self, action: Callable[[], object], on_wait: Callable[[], None] = no_wait) -> None:
        """The first rank of each machine takes the action, while the others wait as in `run_on_rank0`."""
        self._some_do(action, self.local_rank == 0, on_wait)

    def _some_do(self, action: Callable[[], Result], is_mine: bool, on_wait: Callable[[], None]) -> Result | None:
        if not is_mine:
            self.wait_until(lambda: True, on_wait)
            return self.agree(lambda: None)
        with pool_beside_training("action") as pool:
            future = pool.submit(action)
            self.wait_until(future.done, on_wait)
            return self.agree(future.result)

    def wait_until(self, is_done: Callable[[], bool], on_wait: Callable[[], None] = no_wait) -> None:
        """Wait until something is done on all ranks; `on_wait` is called while it is not."""
        while self.sum([not is_done()])[0]:
            on_wait()
            time.sleep(POLL_S)

    @contextmanager
    def stagger_local_ranks(self) -> Iterator[None]:
        """A few ranks of a machine at a time are inside, so that its memory does not hold a checkpoint for each."""
        num_turns = -(-self.local_size // LOADING_RANKS)
        mine = self.local_rank // LOADING_RANKS
        for _ in range(mine):
            self.barrier()
        try:
            yield
        finally:
            for _ in range(num_turns - mine):
                self.barrier()

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.sum([0.0])
