"""The data that the training loop consumes: its order, the run's position in it, and the micro batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from train.checkpoints.manifest import Progress
from train.config import InputError, Plan, TrainConfig, XLAConfig, check
from train.data.batches.buckets import BucketEvalOrder, BucketSampler
from train.data.batches.loader import Batch, Batches, batched, failure_of
from train.data.shards.order import (
    WINDOW_SHARDS,
    EvalOrder,
    ShardSampler,
    lanes_of,
    window_of_lane,
)
from train.run_folder.identity import differences
from train.storage.folders import is_s3
from train.tasks import Task

if TYPE_CHECKING:
    from train.parallel.backends import Backend
    from train.parallel.engines import Engine
    from train.parallel.ranks import World

logger = logging.getLogger("train")
MICRO_BATCHES_AHEAD = 4  # batches that a loader process keeps ready; more would only use memory
HELD_BACK = 8  # micro batches that a backend may gather before it returns the first (XLA's loader sends 4 together)


def check_same_data(ids: list[str]) -> None:
    """Raise InputError unless all ranks read the same data."""
    for rank, data_id in enumerate(ids):
        check(
            data_id == ids[0],
            f"rank {rank} reads different data (id {data_id[:12]}) from rank 0 (id {ids[0][:12]}): data.path must be "
            "the same data on every machine; does one have an older copy?",
        )


def check_same_code(imports: list[dict[str, str]]) -> None:
    """Raise InputError unless all ranks have imported the same files."""
    for rank, files in enumerate(imports):
        check(
            files == imports[0],
            f"rank {rank} has different code from rank 0: {', '.join(differences(imports[0], files))}; every machine "
            "needs the same files",
        )


class TrainData:
    """A rank's micro batches for each step, from the run's position in the data. The `prefetcher` fetches shards."""

    def __init__(
        self,
        cfg: TrainConfig,
        plan: Plan,
        task: Task,
        backend: Backend,
        engine: Engine,
        progress: Progress,
    ) -> None:
        world = backend.world
        order = train_order(cfg, plan, task, world, engine, progress)
        self.prefetcher = world.agree(
            lambda: task.prefetcher(order, is_first_on_machine=world.local_rank == 0)
        )
        held_back = HELD_BACK + plan.accumulation  # the loop draws one step ahead
        # Batches that are drawn together must not need a shard that is fetched only after some of them are consumed:
        # that would be a deadlock.
        multi_batch = max(
            1, order.window_rows // (plan.micro_batch_size * engine.data_size) - held_back
        )
        loading: dict[str, int] = {
            "batch_size": plan.micro_batch_size,
            "num_workers": cfg.data.num_workers,
            "prefetch": MICRO_BATCHES_AHEAD,
            "multi_batch": multi_batch
            if task.buckets is None
            else 1,  # batches drawn together must have one shape
        }
        micro_batches = Batches(
            task.train_data(),
            order.micro_batches(plan.micro_batch_size),
            pin_memory=backend.pin_memory,
            **loading,
        )
        self.steps = iter(batched(backend.to_device(micro_batches), plan.accumulation))

    def consumed(self, examples: int) -> None:
        """Tell the prefetcher how many examples all ranks have seen."""
        if self.prefetcher is not None:
            self.prefetcher.consumed(examples)

    def draw(self) -> tuple[list[Batch], Exception | None]:
        return draw(self.steps)


def train_order(
    cfg: TrainConfig, plan: Plan, task: Task, world: World, engine: Engine, progress: Progress
) -> ShardSampler:
    """Return the order in which this rank reads the data, from the run's position in it.

    `load` in train/checkpoints/loader.py has restored the position: `examples`, `lanes` and `window_shards` of
    `progress`, or only `examples` with batches of several lengths. A new run chooses windows of shards that fit
    the machines' caches.
    """
    data_ranks = world.all_gather_object(engine.data_rank)
    size = world.local_size
    machines = [data_ranks[first : first + size] for first in range(0, world.size, size)]
    here = machines[world.rank // size]
    place: dict[str, Any] = {
        "seed": cfg.seed,
        "global_batch_size": plan.global_batch_size,
        "rank": engine.data_rank,
        "world_size": engine.data_size,
        "machine_ranks": here,
        "eval_shards": task.eval_shards(here, engine.data_size),
        "consumed_rows": progress.examples,
    }
    if task.buckets is not None:
        together = 1
        if isinstance(cfg.backend, XLAConfig):
            together = cfg.backend.batches_per_execution
        return BucketSampler(task.buckets.train, together=together, **place)
    # a forced resume may change the batch size
    if progress.lanes is None or plan.global_batch_size % progress.lanes:
        order = choose_windows(task, world, place)
    else:
        order = ShardSampler(
            task.shard_rows, lanes=progress.lanes, window_shards=progress.window_shards, **place
        )
    progress.lanes = order.lanes.number
    progress.window_shards = order.window_shards
    if is_s3(str(cfg.data.path)) and world.rank == 0 and (more := order.fetched_more(machines)):
        logger.warning("%s", more)
    return order


def choose_windows(task: Task, world: World, place: dict[str, Any]) -> ShardSampler:
    """Return the order of a new run: at most one lane per shard, and fewer if a machine's cache is too small."""
    most = min(len(task.shard_rows), WINDOW_SHARDS)
    while True:
        lanes = lanes_of(place["global_batch_size"], most)
        window = window_of_lane(WINDOW_SHARDS, lanes)
        order = ShardSampler(task.shard_rows, lanes=lanes, window_shards=window, **place)
        mine = world.agree(lambda order=order: task.window_shards(order))  # type: ignore[misc]
        window = min(world.all_gather_object(mine))  # machines may have different disks
        if window or lanes == 1:
            order.window_shards = window or 1
            return order
        most = lanes - 1


def draw(steps: Iterator[list[Batch]]) -> tuple[list[Batch], Exception | None]:
    """Return the next batches ([] at the end) and the error if they could not be drawn, for the vote of all ranks."""
    try:
        batches = next(steps, [])
    except InputError as error:
        return [], error
    return batches, failure_of(batches)


def eval_order(task: Task, engine: Engine, *, batch_size: int) -> EvalOrder | BucketEvalOrder:
    """Return this rank's batches of an evaluation."""
    rank = engine.data_rank
    size = engine.data_size
    if task.buckets is None:
        return EvalOrder(task.eval_rows, batch_size, rank, size)
    return BucketEvalOrder(
        task.buckets.evaluation, batch_size=batch_size, rank=rank, world_size=size
    )
