"""The training loop. It has three doors, task, backend and engine, and never asks their names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TypeVar, cast

import torch

from train import checkpoint
from train.backend import Backend, open_backend
from train.config import (
    InputError,
    Plan,
    TrainConfig,
    Unreachable,
    check,
    check_launch,
    launched_world_size,
    make_plan,
)
from train.data.batches import Batch, Batches, InGroups, failure_of
from train.data.order import EvalOrder, ShardSampler, Windows
from train.metrics import Recorder
from train.monitor import open_monitor
from train.optim import build_optimizer, learning_rate, set_learning_rate
from train.parallel import Engine, build_engine
from train.preempt import StopRequest
from train.run_folder import RunFolder, identity_of, set_up_logging
from train.tasks import Task, build_task

logger = logging.getLogger("train")
Result = TypeVar("Result")
HELD_BACK = 8  # micro batches that a backend may gather before it gives the first (XLA's device_prefetch is 4)


def run(cfg: TrainConfig, stop: StopRequest) -> tuple[str, int]:
    """Train as cfg says, from scratch or from the newest checkpoint of its run folder.

    Everything that can be refused is refused before a device opens. Gives why it ended (done, early_stop or the name
    of the signal that asked for it) and the step.
    """
    check_launch(cfg, os.environ)
    task = build_task(cfg)
    plan = make_plan(cfg, world_size=launched_world_size(), rows=task.train_rows)
    folder = RunFolder(cfg.run_dir)
    identity = identity_of(cfg, plan, task.data_id)
    folder.claim(identity)
    set_up_logging(folder.log)
    try:
        return open_and_fit(cfg, plan, task, folder, identity, stop)
    except InputError as error:
        folder.exit_file(f"refused: {error}", None)
        raise


def open_and_fit(
    cfg: TrainConfig, plan: Plan, task: Task, folder: RunFolder, identity: dict[str, object], stop: StopRequest
) -> tuple[str, int]:
    backend = open_backend(cfg.backend, cfg.instance, collects=cfg.collect_graphs)
    refused: InputError | Unreachable | None = None
    try:
        if cfg.data.verify:
            together(backend, task.verify_data if backend.local_rank == 0 else lambda: None)
        ended = fit(cfg, plan, task, backend, folder, identity, stop)
    except (InputError, Unreachable) as error:  # on all ranks alike
        refused = error.with_traceback(None)
    backend.close()  # what fit made must be gone by now: hence a function of its own, and no traceback
    if refused is not None:
        raise refused
    return ended


def fit(
    cfg: TrainConfig,
    plan: Plan,
    task: Task,
    backend: Backend,
    folder: RunFolder,
    identity: dict[str, object],
    stop: StopRequest,
) -> tuple[str, int]:
    check_same_data(backend.share(task.data_id))
    torch.manual_seed(cfg.seed)  # the same weights on every rank
    model = task.build_model()
    engine = build_engine(cfg.parallel, backend, model, accumulation=plan.accumulation)
    optimizer = build_optimizer(cfg.optim, engine.parameters, adamw=backend.adamw)
    backend.seed(cfg.seed)  # other dropout on every rank
    progress, faults = checkpoint.load(folder.checkpoints, model, optimizer, backend, identity=identity)
    optimizer = backend.own(optimizer, engine.parameters, cfg.optim.max_grad_norm)
    if backend.rank == 0:
        folder.describe(cfg, identity, facts(plan, task, backend, engine))
    logger.info(describe(plan, backend))
    backend.barrier()
    num_blind = backend.sum([not folder.environment.is_file()])[0]
    order = train_order(cfg, plan, task, backend, progress)
    supply = together(backend, lambda: task.supply(order, is_first_on_machine=backend.local_rank == 0))
    shares = num_blind == 0 or cfg.collect_graphs  # whose run folder is a temporary one of each machine
    check(shares, f"{num_blind:g} ranks do not see run_dir={cfg.run_dir} of rank 0; it must be a shared folder")
    batches = train_batches(cfg, plan, task, backend, order)
    flops = task.flops_per_example(model)
    reason, stopping = "done", False

    monitor = open_monitor(
        backend.monitor_kind,
        num_devices=backend.local_world_size,
        is_first_on_machine=backend.local_rank == 0,
        run_tag=os.environ.get("NEURON_PROCESS_TAG"),
    )
    with supply, monitor, Recorder(cfg, plan, folder, backend, task.seq_len, flops, progress.step, monitor) as recorder:
        for fault in faults:
            recorder.fault(progress.step, fault)
        while progress.step < plan.total_steps and not is_over(cfg, progress):
            recorder.begin_step()
            micro_batches = next(batches)
            recorder.data_ready()
            labels = sum(batch["count"] for batch in micro_batches)
            failure = failure_of(micro_batches)
            count, num_stops, num_failures = backend.sum([labels, stop.reason is not None, failure is not None])
            if num_failures:
                raise_together(backend, failure)
            stopping = num_stops > 0 and progress.step + 1 < plan.total_steps  # the last step ends by itself
            lr = learning_rate(progress.step, cfg=cfg.optim, plan=plan)
            set_learning_rate(optimizer, lr)
            engine.forward_backward(micro_batches, task.loss, count)
            grad_norm = backend.step(optimizer, engine.parameters, cfg.optim.max_grad_norm)
            progress.step += 1
            supply.consumed(progress.step * plan.global_batch_size)
            evaluates = due(progress.step, cfg.eval_every, plan.total_steps)
            saves = stopping or due(progress.step, cfg.checkpoint.every, plan.total_steps)
            saves = saves and not cfg.collect_graphs
            recorder.end_step(
                progress.step, evaluates or saves, lr=lr, count=count, take_loss=engine.take_loss, grad_norm=grad_norm
            )
            if evaluates:
                began_s = time.perf_counter()
                metrics = evaluate(cfg, plan, task, backend, engine)
                if metrics is not None:
                    recorder.evaluation(progress.step, metrics, time.perf_counter() - began_s)
                    progress.saw(metrics["loss"], min_delta=cfg.early_stop.min_delta)
            if saves or is_over(cfg, progress):
                saved = checkpoint.save(
                    folder.checkpoints, progress, model, optimizer, backend, identity=identity, keep=cfg.checkpoint.keep
                )
                recorder.checkpoint(progress.step, saved)
            if stopping:
                reason = stop.reason or "another rank was asked to stop"
                break
        if not stopping and is_over(cfg, progress):
            reason = "early_stop"
        if recorder.steps_done and not cfg.collect_graphs:  # a finished run that is started again has nothing to add
            recorder.summary(progress.step, reason, task.facts)
    if cfg.export and reason in ("done", "early_stop") and backend.rank == 0:
        task.export(model, folder.export)
    return reason, progress.step


def describe(plan: Plan, backend: Backend) -> str:
    machines = backend.world_size // backend.local_world_size
    return (
        f"{backend.name} on {backend.device_name}, {backend.precision}: {machines} x {backend.local_world_size} ranks, "
        f"{plan.global_batch_size} sequences a step ({plan.micro_batch_size} x {plan.accumulation} a rank)"
    )


def together(backend: Backend, action: Callable[[], Result]) -> Result:
    """What an action gives on this rank, once it succeeded on all; else all raise what one found."""
    result, failure = None, None
    try:
        result = action()
    except (InputError, Unreachable) as error:
        failure = error.with_traceback(None)
    if backend.sum([failure is not None])[0]:
        raise_together(backend, failure)
    return cast(Result, result)


def check_same_data(ids: list[str]) -> None:
    for rank, found in enumerate(ids):
        check(
            found == ids[0],
            f"rank {rank} reads other data than rank 0 (id {found[:12]} and {ids[0][:12]}): data.path must lead all "
            "machines to the same; has one an older copy?",
        )


def raise_together(backend: Backend, failure: Exception | None) -> None:
    """All ranks call it; the first failure among theirs is raised on all."""
    raise next(found for found in backend.share(failure) if found is not None)


def is_over(cfg: TrainConfig, progress: checkpoint.Progress) -> bool:
    return cfg.early_stop.patience is not None and progress.evals_since_best >= cfg.early_stop.patience


def evaluate(cfg: TrainConfig, plan: Plan, task: Task, backend: Backend, engine: Engine) -> dict[str, float] | None:
    """Metrics over the validation data, each example once whatever the number of ranks. None where only the graph is
    wanted: a batch for each rank, whose numbers mean nothing.
    """
    rows = task.eval_rows
    if cfg.collect_graphs:
        rows = min(rows, plan.micro_batch_size * backend.world_size)
    order = EvalOrder(rows, plan.micro_batch_size, backend.rank, backend.world_size)
    batches = Batches(task.eval_data(), order, batch_size=order.batch_size, num_workers=0, prefetch=1, pin_memory=False)
    failure: Exception | None = None
    found = []  # left on the device until the end, so that it never waits for the host
    engine.model.eval()
    with torch.no_grad():
        for batch in as_own_failure(backend.feed(batches), backend):
            if failure := failure_of([batch]):
                break
            with backend.autocast():  # for each batch: casts of weights that outlive it make the next another graph
                found.append(task.eval_sums(engine.model, batch["inputs"]))
    engine.model.train()
    if backend.sum([failure is not None])[0]:
        raise_together(backend, failure)
    # Added up on the host in double precision: float32 on the device would lose counts past 2**24.
    sums = torch.stack(backend.read(found)).double().sum(0).tolist()
    sums = backend.sum(sums)
    return None if cfg.collect_graphs else task.eval_metrics(sums)


def facts(plan: Plan, task: Task, backend: Backend, engine: Engine) -> dict[str, object]:
    """For environment.json: what the configuration came to here."""
    return {
        "plan": asdict(plan),
        "parameters": sum(parameter.numel() for parameter in engine.parameters),
        "device": backend.device_name,
        "precision": backend.precision,
        "backend": backend.name,
        "world_size": backend.world_size,
        "threads": torch.get_num_threads(),
        **task.facts,
    }


def due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def train_order(
    cfg: TrainConfig, plan: Plan, task: Task, backend: Backend, progress: checkpoint.Progress
) -> ShardSampler:
    """This rank's order of the data, from where the run stands. At first the smallest cache decides on the window."""
    mine = together(backend, task.windows)
    if progress.window_shards is None:
        progress.window_shards = min(backend.share(mine.shards))  # disks differ
        progress.windows_grow = bool(backend.broadcast(mine.grow))
    windows = Windows(progress.window_shards, progress.windows_grow)
    check(
        cfg.data.window_shards is None or mine == windows,
        f"data.window_shards={cfg.data.window_shards}, but this run shuffles {windows.shards} together"
        f"{', growing to them at first' if windows.grow else ''}; leave it out "
        "or choose another run_dir",
    )
    return ShardSampler(
        task.shard_rows,
        seed=cfg.seed,
        windows=windows,
        global_batch_size=plan.global_batch_size,
        rank=backend.rank,
        world_size=backend.world_size,
        consumed_rows=progress.step * plan.global_batch_size,
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
        most_together=max(1, order.window_rows // (plan.micro_batch_size * backend.world_size) - HELD_BACK),
    )
    return iter(InGroups(as_own_failure(backend.feed(batches), backend), plan.accumulation))


def as_own_failure(batches: Iterator[Batch], backend: Backend) -> Iterator[Batch]:
    """What is wrong with one rank's data the others do not know: it must not leave in order, they would wait for it."""
    try:
        yield from batches
    except InputError as error:
        if backend.world_size == 1:
            raise
        raise RuntimeError(f"rank {backend.rank}: {error}") from error
