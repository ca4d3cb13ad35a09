"""What ranks tell each other from host to host, beside the devices: a few plain numbers a step, over gloo."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from train.backend import guards
from train.backend.nonfinite import Skips
from train.launched import launched

if TYPE_CHECKING:
    from train.backend import State

Result = TypeVar("Result")
RANK_STRIDE = 1_000_003  # a prime: seeds of neighbouring runs and ranks do not meet
LOADING_RANKS = 8  # of one machine that hold a checkpoint on the host at once; 32 copies have exhausted its memory


class Hosts:
    """Rank, world size and the verbs of `train.backend.Backend` that every backend shares."""

    read: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    skips: Skips  # made with the model, before the first step: later, that step would be another graph on XLA
    group: dist.ProcessGroup | None = None  # None: the default one, which then speaks gloo for host tensors

    def __init__(self) -> None:
        launch = launched()
        self.rank, self.world_size = launch.rank, launch.world_size
        self.local_rank, self.local_world_size = launch.local_rank, launch.local_world_size
        self.is_distributed = launch.is_distributed
        self.work_s = 0.0

    def sum(self, values: Sequence[float]) -> list[float]:
        if not self.is_distributed:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        return [float(value) for value in tensor]

    def gather(self, value: State) -> list[State]:
        if not self.is_distributed:
            return [value]
        found: list[State] | None = [{} for _ in range(self.world_size)] if self.rank == 0 else None
        dist.gather_object(value, found, group=self.group)
        return found or []

    def share(self, value: Result) -> list[Result]:
        if not self.is_distributed:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found

    def broadcast(self, value: int) -> int:
        return int(self.sum([value if self.rank == 0 else 0])[0])

    def barrier(self) -> None:
        self.sum([0.0])

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        num_turns = -(-self.local_world_size // LOADING_RANKS)
        mine = self.local_rank // LOADING_RANKS
        for _ in range(mine):
            self.barrier()
        yield
        for _ in range(num_turns - mine):
            self.barrier()

    def check_same(self, parameters: list[nn.Parameter]) -> None:
        sums = [float(copy.double().sum()) for copy in self.read(guards.smallest(parameters))]
        guards.check_same([found["sums"] for found in self.gather({"sums": sums})])

    def skipped(self) -> tuple[int, int]:
        total, streak = self.read([self.skips.total, self.skips.streak])
        return int(total), int(streak)

    def known_skips(self) -> int:
        return self.skips.known_streak()

    def reset_skips(self) -> None:
        self.skips.reset_streak()

    @contextmanager
    def timed(self) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.work_s += time.perf_counter() - began_s

    def take_work_s(self) -> float:
        taken, self.work_s = self.work_s, 0.0
        return taken

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        state = optimizer.state_dict()
        return {**state, "param_groups": [{"params": group["params"]} for group in state["param_groups"]]}

    def copy_to_host(self, tensors: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        for buffer, copy in zip(buffers, self.read(tensors), strict=True):
            buffer.copy_(copy)

    def settle(self) -> None: ...

    def load(self, path: Path) -> State:
        # Mapped: ranks of a machine share the file's pages, and none of them copies what it only reads.
        state: State = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return state

    def close(self) -> None:
        """Leave the group. The model and optimizer must be out of scope: DDP's wrapper sits in a reference cycle, and
        gloo threads that still hold its tensors at exit abort the process (https://github.com/pytorch/pytorch/pull/179291).
        """
        if self.is_distributed:
            gc.collect()
            self.barrier()
            dist.destroy_process_group()
