"""The training loop. It uses task, backend and engine only through their interfaces, and never tests their types."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from train.checkpoints.manifest import Progress
from train.config import DataParallelConfig, Plan, TrainConfig, make_plan
from train.data.batches.loader import Batch
from train.machine.launched import check_launch, launched
from train.machine.runtime import search_as_usual
from train.models.model_sizes import check_layers
from train.observe.metrics import Recorder, lengths_of
from train.observe.monitor import open_monitor
from train.observe.trackers import check_trackers
from train.parallel.backends import Backend, Workload, check_attention, open_backend
from train.parallel.engines import Engine, build_engine
from train.parallel.optim import learning_rate
from train.parallel.ranks import AGREED
from train.run.attempt import ENDS, Attempt, begin, record_end
from train.run.checkpoint_manager import CheckpointManager
from train.run.description import describe
from train.run.evaluation import evaluate, try_evaluation, write_samples
from train.run.feed import TrainData, check_same_code, check_same_data
from train.run.stopping import StopRequest, Votes
from train.run_folder import exported
from train.run_folder.identity import identity_of
from train.run_folder.run_folder import RunFolder, side_channel
from train.storage import imported
from train.tasks import Task, build_task

logger = logging.getLogger("train")
OnLine = Callable[[Recorder, str, dict[str, Any]], None]
MOST_NAMED = 3  # the log names at most this many of the ranks that were asked to stop


def run(cfg: TrainConfig, stop: StopRequest, *, on_line: OnLine | None = None) -> tuple[str, int]:
    """Train with these settings, from scratch or from the newest checkpoint in the run folder.

    Settings and data are checked before a device is opened. Returns the reason why training ended ("done", "early_stop"
    or what asked it to stop), and the number of steps done.

    `on_line` is for measurements: it receives the recorder, and the kind and fields of each line that would otherwise
    be written to metrics.jsonl. The first kind is "start". Measurements save nothing.
    """
    with stop.nothing_to_save():
        check_launch(cfg.instance, launched())
        check_attention(cfg)
        if cfg.hub.push_to is not None:
            # imports the report's code, which few runs need
            from train.observe.push import (
                check_push,
            )

            check_push(cfg)
        saves = on_line is None
        if saves and launched().rank == 0:
            check_trackers(cfg.telemetry)
        task = build_task(cfg)
        check_layers(cfg)
        plan = make_plan(
            cfg,
            world_size=launched().world_size,
            rows=task.train_rows,
            seq_len=task.seq_len,
            cut=task.micro_batches,
        )
        identity = identity_of(cfg, plan, task.data_id, task.lengths)
    search_as_usual()  # all modules are imported by now
    folder = RunFolder(cfg.run_dir, cfg.s3, ttl_s=cfg.lease.ttl_s)
    with begin(Attempt(cfg, plan, task, folder, identity, stop, saves)) as attempt:
        attempt.watch.phase("join", is_start=True)
        with stop.nothing_to_save():
            work = workload(cfg, plan, task, is_whole=saves)
            backend = open_backend(cfg.backend, cfg.instance, work=work)
        attempt.watch.compiles = backend.compilers.are_busy
        attempt.joined(backend.world)
        failure: Exception | None = None
        try:
            reason, step = fit(attempt, backend, on_line)
        except AGREED as error:
            failure = error.with_traceback(None)  # the traceback would keep the model alive
        backend.close()  # the model and engine of `fit` are freed by now
        if failure is not None:
            raise failure
        record_end(attempt, reason, step)
    return reason, step


def fit(attempt: Attempt, backend: Backend, on_line: OnLine | None) -> tuple[str, int]:
    """Build the model and engine, resume from the newest checkpoint, train and export. Returns what `run` returns."""
    cfg, plan, task, world = attempt.cfg, attempt.plan, attempt.task, backend.world
    folder, watch = attempt.folder, attempt.watch
    if cfg.data.verify:
        # this sends no heartbeats, so the watchdog ends it if it hangs
        world.run_on_local_rank0(task.verify_data)
    world.agree(lambda: check_same_code(world.gather(imported.checksums())))
    world.agree(lambda: check_same_data(world.gather(task.data_id)))
    torch.manual_seed(cfg.seed)  # all ranks need the same initial weights
    model = world.agree(task.build_model)
    lengths = num_lengths(task)
    task.compile_loss(backend.compile_loss)
    engine = build_engine(
        cfg.parallel,
        cfg.optim,
        backend,
        model,
        task.loss,
        accumulation=plan.accumulation,
        lengths=lengths,
    )
    backend.seed(cfg.seed)  # ranks need different dropout
    watch.phase("load", is_start=True)
    checkpoints = CheckpointManager(attempt, backend, engine)
    progress = checkpoints.resume()
    progress.owes_evaluation |= cfg.eval_at_start and not checkpoints.loaded.ranks
    engine.ready()
    data = TrainData(cfg, plan, task, backend, engine, progress)
    describe(attempt, backend, model)
    monitor = open_monitor(
        backend.monitor_kind,
        num_devices=world.local_size,
        is_first_on_machine=world.local_rank == 0,
        run_tag=os.environ.get("NEURON_PROCESS_TAG"),
    )
    # cached: counting takes as long as launching a few kernels
    flops = cache(partial(task.flops_per_example, model))
    with data.prefetcher or nullcontext():  # must be open until the export has read the samples
        with (
            monitor,
            Recorder(
                cfg, plan, folder, backend, engine, flops, progress, monitor, on_line
            ) as metrics,
            checkpoints.saving(metrics),
        ):
            if progress.step == 0 and attempt.saves and not progress.owes_evaluation:
                try_evaluation(attempt, backend, engine)
            reason = train(attempt, backend, engine, data, metrics, checkpoints)
            # stopped during an evaluation: the checkpoint records that it is due
            if metrics.progress.step == 0:
                checkpoints.save(None, is_last=True)
            checkpoints.finish()
            if metrics.owes_summary():
                metrics.summary(reason, {**task.facts, **checkpoints.facts()})
        if reason in ENDS:
            checkpoints.remove_leftovers()
        watch.phase("export", is_start=True)  # the other ranks wait for rank 0
        if cfg.export and reason in ENDS:
            engine.gather_full_model()
            world.run_on_rank0(lambda: export(attempt, checkpoints, model), watch.heartbeat)
    return reason, metrics.progress.step


def train(
    attempt: Attempt,
    backend: Backend,
    engine: Engine,
    data: TrainData,
    metrics: Recorder,
    checkpoints: CheckpointManager,
) -> str:
    """Train until the last step, an early stop or a request to stop. Returns the reason, the same on all ranks.

    During each step, the ranks draw the next step's batches and vote on whether to run it. Thus no rank waits for a
    rank that cannot continue.
    """
    cfg, plan, watch, votes = (
        attempt.cfg,
        attempt.plan,
        attempt.watch,
        Votes(backend.world, attempt.stop),
    )
    progress = metrics.progress
    if progress.owes_evaluation:
        score = evaluate(attempt, backend, engine, metrics)
        # stopped; this step's checkpoint records that the evaluation is due
        if progress.owes_evaluation:
            return who_asked(attempt, votes)
        # without this checkpoint the next start would evaluate again
        if is_over(attempt, progress):
            checkpoints.save(score, is_last=True)
    if is_over(attempt, progress):
        batches = []
    else:
        batches = draw_first(attempt, data, metrics, votes)
    while not is_over(attempt, progress):
        votes.raise_failure()
        watch.phase("data", step=progress.step, is_start=metrics.is_first)
        metrics.begin_step()
        is_last = progress.step + 1 == plan.total_steps
        following, failure = ([], None) if is_last else data.draw()
        metrics.data_ready()
        checkpoints.report()
        votes.cast(failure or checkpoints.failure)  # votes on whether to continue after this step

        is_new = metrics.is_new(lengths_of(batches))
        watch.phase("step", step=progress.step, is_start=metrics.is_first or is_new)
        lr = learning_rate(progress.step, cfg=cfg.optim, plan=plan)
        engine.begin_step(sum(batch["count"] for batch in batches), lr)
        for number, batch in enumerate(batches, start=1):
            watch.heartbeat()
            engine.forward_backward(batch, is_last=number == len(batches))
        grad_norm = engine.reduce_and_clip()  # a tensor on the device, like the losses
        engine.optimizer_step(grad_norm)  # skips the update unless the norm is finite

        watch.phase("agree", step=progress.step, is_start=metrics.is_first)
        votes.count()
        progress.advance(plan.global_batch_size, lr)
        data.consumed(progress.examples)
        evaluates = due(progress.step, cfg.eval_every, plan.total_steps)
        metrics.end_step(evaluates, lr=lr, micro_batches=batches, grad_norm=grad_norm)
        if metrics.skips_in_a_row >= cfg.nonfinite.max_skips:
            progress = checkpoints.roll_back()
            if is_last:
                batches = draw_first(attempt, data, metrics, votes)
            else:
                batches = following
            continue
        if evaluates:
            score = evaluate(attempt, backend, engine, metrics)
        else:
            score = None
        stops = votes.stops > 0 or progress.owes_evaluation
        ends = stops or is_over(attempt, progress)
        if ends or checkpoints.is_due():
            checkpoints.save(score, is_last=ends)
        if stops:
            return who_asked(attempt, votes)
        batches = following
    return "early_stop" if stopped_early(attempt, progress) else "done"


def num_lengths(task: Task) -> int:
    if task.buckets is None:
        return 1
    return len(task.buckets.lengths)


def workload(cfg: TrainConfig, plan: Plan, task: Task, *, is_whole: bool) -> Workload:
    """Return the workload for backend.compile=auto to judge. Unless `is_whole`, the run counts as endless."""
    if not isinstance(cfg.parallel, DataParallelConfig):
        return Workload()
    passes = plan.total_steps * plan.accumulation // num_lengths(task)
    return Workload(passes if is_whole else sys.maxsize, plan.micro_batch_size * task.seq_len)


def draw_first(attempt: Attempt, data: TrainData, metrics: Recorder, votes: Votes) -> list[Batch]:
    """Draw a step's micro batches if the step before did not, and vote on whether to run it."""
    attempt.watch.phase("data", step=metrics.progress.step, is_start=True)
    began_s = time.perf_counter()
    batches, failure = data.draw()
    metrics.waited(time.perf_counter() - began_s)
    votes.cast(failure)
    votes.count()
    return batches


def is_over(attempt: Attempt, progress: Progress) -> bool:
    return progress.step >= attempt.plan.total_steps or stopped_early(attempt, progress)


def stopped_early(attempt: Attempt, progress: Progress) -> bool:
    patience = attempt.cfg.early_stop.patience
    return patience is not None and progress.evals_since_best >= patience


def due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)


def who_asked(attempt: Attempt, votes: Votes) -> str:
    """Return why the run stops, the same on all ranks, and log the ranks that were asked to stop."""
    asked = votes.reasons()
    attempt.asked = "; ".join(
        f"{reason}, at rank {rank} on {host}" for rank, reason, _, host in asked[:MOST_NAMED]
    )
    attempt.kind = asked[0][2]
    logger.info("stopping: %s", attempt.asked)
    return asked[0][1]


def export(attempt: Attempt, checkpoints: CheckpointManager, model: nn.Module) -> None:
    """Export the model for transformers, write samples and a model card, and push everything if hub.push_to is set."""
    from train.observe import card  # imports the report's code, which training does not need

    cfg, task, folder = attempt.cfg, attempt.task, attempt.folder
    step, chosen = checkpoints.restore_exported()
    task.adopt(chosen)
    with exported.renewed(folder, checkpoints.recorder.progress.step, step) as scratch:
        task.export(model, scratch)
    write_samples(attempt, step)
    with side_channel("the model card is not written"):
        card.write(folder)
    exported.mirror(folder)
    if cfg.hub.push_to is not None:
        from train.observe.push import push

        push(folder, cfg.hub.push_to)
