"""The bytes and requests of one sharded save to S3, counted for several numbers of ranks. Nothing is timed.

Each rank is a thread of this process, and saves one row of a weight and of its moment with the real AsyncSaver and
S3Store, as two files. Stand-ins for torch.distributed and S3 count requests, and bytes at the rank that receives them.
The counts are those of the fifth save, which also removes the second checkpoint (checkpoint.keep=3). Each machine has
32 ranks.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from train.checkpoints.loader import Loaded, load
from train.checkpoints.manifest import Manifest, Progress
from train.checkpoints.saver import AsyncSaver
from train.checkpoints.store_s3 import S3Store
from train.config import BackendConfig, CheckpointConfig
from train.parallel import ranks
from train.parallel.backend import State
from train.parallel.ddp import DDP
from train.parallel.pieces import Tensors, piece
from train.parallel.ranks import World
from train.storage.schema import Head

SAVES = 5
# in place of a run's settings
SETTINGS = {f"section.name_of_setting_{number}": number for number in range(300)}
LOCAL = 32  # ranks per machine
ROW = 4096  # values in a rank's row
PAGE = 1000  # maximum objects in a response of ListObjectsV2
Result = TypeVar("Result")


class Group:
    """One rank of a process group whose ranks are threads."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.values, self.barrier = rank, values, barrier

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks, after all ranks have read them."""
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


def groups(size: int) -> list[Group]:
    values, barrier = [None] * size, threading.Barrier(size, timeout=300)
    return [Group(rank, values, barrier) for rank in range(size)]


class Collectives:
    """The functions of torch.distributed that `World` calls, for ranks that are threads. Counts bytes by receiver."""

    ReduceOp = dist.ReduceOp

    def __init__(self) -> None:
        self.received: Counter[int] = Counter()

    def all_reduce(
        self, tensor: Any, op: Any = dist.ReduceOp.SUM, *, group: Group, async_op: bool = False
    ) -> Any:
        values = torch.stack(group.exchange(tensor.clone()))
        tensor.copy_(values.amax(0) if op == dist.ReduceOp.MAX else values.sum(0))
        self.received[group.rank] += tensor.nbytes
        return SimpleNamespace(wait=lambda: None)

    def gather(self, tensor: Any, parts: list[Any] | None, *, group: Group) -> None:
        values = group.exchange(tensor)
        for part, value in zip(parts or (), values, strict=False):
            part.copy_(value)
        self.received[group.rank] += (
            sum(value.nbytes for value in values[1:]) if group.rank == 0 else 0
        )

    def broadcast_object_list(self, objects: list[Any], *, group: Group) -> None:
        content, values = group.exchange(
            (pickle.dumps(objects), objects) if group.rank == 0 else (b"", [])
        )[0]
        objects[:] = copy.deepcopy(values)
        self.received[group.rank] += len(content) if group.rank else 0

    def all_gather_object(self, objects: list[Any], value: Any, *, group: Group) -> None:
        contents = group.exchange((pickle.dumps(value), value))
        objects[:] = [each for _, each in contents]
        self.received[group.rank] += sum(len(content) for content, _ in contents) - len(
            contents[group.rank][0]
        )


class Objects:
    """An S3Folder in memory, with the methods that checkpoints use. It counts the requests that boto3 would send."""

    location = "s3://counted/run"

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content
        self.downloads: set[str] = set()
        # a file that is damaged in downloads, and its step ("": any)
        self.damages, self.is_of_step = (
            "",
            "",
        )
        self.requests: Counter[str] = Counter()
        self.lock = threading.Lock()

    def count(self, kind: str, number: int = 1) -> None:
        with self.lock:
            self.requests[kind] += number

    def read(self, name: str) -> bytes:
        self.count("GET")
        if name not in self.content:
            raise FileNotFoundError(name)
        return self.content[name]

    def write(self, name: str, content: bytes) -> None:
        self.count("PUT")
        self.content[name] = content

    def create(self, name: str, content: bytes) -> bool:
        is_new = name not in self.content
        self.write(name, content)
        return is_new

    def upload(self, name: str, path: Path) -> None:
        self.write(name, path.read_bytes())

    def download(self, name: str, path: Path) -> None:
        content = self.read(name)
        self.downloads.add(name)
        if path.name == self.damages and self.is_of_step in name:
            content = bytes(len(content))
        path.write_bytes(content)

    def size(self, name: str) -> int | None:
        self.count("HEAD")
        return len(self.content[name]) if name in self.content else None

    def remove(self, name: str) -> None:
        self.count("DELETE")
        self.content.pop(name, None)

    def names(self, prefix: str = "") -> list[str]:
        return list(self.listing(prefix))

    def listing(self, prefix: str = "") -> dict[str, Head]:
        with self.lock:
            content = dict(self.content)
        names = sorted(name for name in content if name.startswith(prefix))
        self.count("LIST", max(1, -(-len(names) // PAGE)))
        return {
            name: Head(len(content[name]), hashlib.md5(content[name]).hexdigest())
            for name in names
        }


class Rows:
    """An engine in which each rank has one row of a weight and of its moment."""

    model: Any = None

    def __init__(self, world: World) -> None:
        self.world, self.row = world, torch.full((1, ROW), float(world.rank))

    def check_replicas(self) -> None:
        return

    def state(self) -> dict[str, State]:
        rank, size = self.world.rank, self.world.size
        own = piece(self.row, rank, size)
        groups = {} if rank else {"param_groups": [{"params": [0]}]}
        return {"model": {"weight": own}, "optimizer": {"state": {0: {"exp_avg": own}}, **groups}}

    def sources(self, rank: int, *_: Any) -> set[int]:
        return {rank}

    def load(self, model: Tensors, optimizer: State) -> None:
        rows = slice(self.world.rank, self.world.rank + 1)
        for tensors, name in ((model, "weight"), (optimizer["state"][0], "exp_avg")):
            assert torch.equal(tensors.rows(name, rows), self.row)


class Host(DDP):
    """A rank's backend, whose process group for writing checkpoints consists of threads."""

    writers: Any

    def subgroup(self, ranks: list[int]) -> Any:
        return self.writers


def backends(size: int) -> list[Host]:
    """Return a backend for the thread of each rank."""
    made, plain = [], Host(BackendConfig(device="cpu"))
    for rank, (group, writers) in enumerate(zip(groups(size), groups(size), strict=True)):
        backend, world = copy.copy(plain), World()
        world.rank, world.size, world.local_rank, world.local_size = (
            rank,
            size,
            rank % LOCAL,
            min(LOCAL, size),
        )
        world.is_distributed, world.group = size > 1, group  # type: ignore[assignment]
        backend.world, backend.writers = world, writers
        made.append(backend)
    return made


class Run:
    """A run whose ranks are threads. Its machines share a bucket, and each machine counts its requests."""

    def __init__(self, size: int, scratch: str) -> None:
        content: dict[str, bytes] = {}
        self.machines = [Objects(content) for _ in range(-(-size // LOCAL))]
        self.collectives, self.threads, self.size = Collectives(), ThreadPoolExecutor(size), size
        self.backends = backends(size)
        self.engines: list[Any] = [Rows(backend.world) for backend in self.backends]
        stores: list[Any] = [
            S3Store(each, Path(scratch, str(n))) for n, each in enumerate(self.machines)
        ]  # type: ignore[arg-type]
        self.stores = [stores[rank // LOCAL] for rank in range(size)]

    def on_all(self, action: Callable[[int], Result]) -> list[Result]:
        """Reset the counts of bytes and requests, and run an action on all ranks."""
        self.collectives.received.clear()
        for machine in self.machines:
            machine.requests.clear()
            machine.downloads.clear()
        before, ranks.dist = ranks.dist, self.collectives  # type: ignore[assignment]
        try:
            return list(self.threads.map(action, range(self.size)))
        finally:
            ranks.dist = before

    def requests(self) -> dict[str, int]:
        return dict(sum((machine.requests for machine in self.machines), Counter[str]()))

    def save(self, num_saves: int = SAVES) -> None:
        owned: Any = SimpleNamespace(
            ownership=SimpleNamespace(check=lambda: None), mirror=lambda: None
        )
        draft = Manifest(0, 1, {}, SETTINGS, {}, self.size, "ddp", None)
        savers = [
            AsyncSaver(CheckpointConfig(), store, engine, backend, draft, owned)
            for store, engine, backend in zip(
                self.stores, self.engines, self.backends, strict=True
            )
        ]

        def save(rank: int, step: int) -> None:
            savers[rank].save(Progress(step=step), {"loss_sum": 0.0}, metric=None)
            saved = savers[rank].pending and savers[rank].pending.result()
            assert saved is None or saved.failure is None, saved.failure

        for step in range(1, num_saves + 1):
            self.on_all(partial(save, step=step))
        for saver in savers:
            saver.close(waits=True)

    def load(self) -> list[Loaded]:
        def resume(rank: int) -> Loaded:
            return load(
                self.stores[rank], self.engines[rank], self.backends[rank], {}, {}, force=False
            )

        return self.on_all(resume)


def save_cost(size: int) -> tuple[int, int, dict[str, int]]:
    """Return, for the last save, the bytes that all ranks receive, the maximum per rank, and requests by kind."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Run(size, scratch)
        run.save()
        received = run.collectives.received
        return sum(received.values()), max(received.values(), default=0), run.requests()
