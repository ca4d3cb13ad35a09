"""The data of a run as the loop sees it: in which order, from where on, in which micro batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from train.checkpoints.progress import Progress
from train.config import InputError, Plan, ShardsConfig, TrainConfig, check
from train.data.batches import Batch, Batches, InGroups
from train.data.buckets import BucketEvalOrder, BucketSampler
from train.data.order import EvalOrder, ShardSampler, Windows
from train.tasks import Task
from train.together import together

if TYPE_CHECKING:
    from train.backend import Backend

HELD_BACK = 8  # micro batches that a backend may gather before it gives the first (XLA's device_prefetch is 4)


def check_same_data(ids: list[str]) -> None:
    for rank, found in enumerate(ids):
        check(
            found == ids[0],
            f"rank {rank} reads other data than rank 0 (id {found[:12]} and {ids[0][:12]}): data.path must lead all "
            "machines to the same; has one an older copy?",
        )


def train_order(cfg: TrainConfig, plan: Plan, task: Task, backend: Backend, progress: Progress) -> ShardSampler:
    """This rank's order of the data, from where the run stands. At first the smallest cache decides on the window."""
    mine = together(backend, task.windows)
    if progress.window_shards is None:
        progress.window_shards = min(backend.share(mine.shards))  # disks differ
        progress.windows_grow = bool(backend.broadcast(mine.grow))
    windows = Windows(progress.window_shards, progress.windows_grow)
    wanted = cfg.data.window_shards if isinstance(cfg.data, ShardsConfig) else None
    check(
        wanted is None or mine == windows,
        f"data.window_shards={wanted}, but this run shuffles {windows.shards} together"
        f"{', growing to them at first' if windows.grow else ''}; leave it out "
        "or choose another run_dir",
    )
    if task.buckets is not None:
        return BucketSampler(
            task.buckets.train,
            seed=cfg.seed,
            global_batch_size=plan.global_batch_size,
            rank=backend.rank,
            world_size=backend.world_size,
            consumed_rows=progress.examples,
        )
    return ShardSampler(
        task.shard_rows,
        seed=cfg.seed,
        windows=windows,
        global_batch_size=plan.global_batch_size,
        rank=backend.rank,
        world_size=backend.world_size,
        consumed_rows=progress.examples,
    )


def train_batches(
    cfg: TrainConfig, plan: Plan, task: Task, backend: Backend, order: ShardSampler
) -> Iterator[list[Batch]]:
    """The micro batches of each step of this rank, endlessly."""
    batches = Batches(
        task.train_data(),
        order.micro_batches(plan.micro_batch_size),
        batch_size=plan.micro_batch_size,
        num_workers=cfg.data.num_workers,
        prefetch=cfg.data.prefetch,
        pin_memory=backend.pin_memory,
        # No batch may wait for a shard that only comes when batches are done with that wait for it.
        most_together=max(1, order.window_rows // (plan.micro_batch_size * backend.world_size) - HELD_BACK)
        if task.buckets is None
        else 1,  # those drawn together have one shape
    )
    return iter(InGroups(as_own_failure(backend.feed(batches), backend), plan.accumulation))


def eval_order(task: Task, backend: Backend, *, batch_size: int, collects: bool) -> EvalOrder | BucketEvalOrder:
    """This rank's batches of an evaluation. `collects`: only graphs are wanted, a batch of each length a rank."""
    rank, world_size = backend.rank, backend.world_size
    most = batch_size * world_size if collects else task.eval_rows
    if task.buckets is None:
        return EvalOrder(min(most, task.eval_rows), batch_size, rank, world_size)
    return BucketEvalOrder(task.buckets.evaluation, batch_size=batch_size, rank=rank, world_size=world_size, most=most)


def as_own_failure(batches: Iterator[Batch], backend: Backend) -> Iterator[Batch]:
    """What is wrong with one rank's data the others do not know: it must not leave in order, they would wait for it."""
    try:
        yield from batches
    except InputError as error:
        if backend.world_size == 1:
            raise
        raise RuntimeError(f"rank {backend.rank}: {error}") from error
