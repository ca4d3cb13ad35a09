"""The training loop. It uses task, backend and engine only through their interfaces, and never tests their types."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
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
from train.parallel.backends import Backend, Workload, check_attention
from train.parallel.engines import Engine, build_engine
from train.parallel.optim import learning_rate
from train.parallel.ranks import AGREED
from train.run.attempt import Attempt, begin, record_end
from train.run.checkpoint_manager import CheckpointManager
from train.run.description import describe
from train.run.evaluation import evaluate, num_lengths, try_evaluation, write_samples
from train.run.feed import TrainData, check_same_code, check_same_data
from train.run.stopping import StopRequest, Votes
from train.run_folder import exported
from train.run_folder.identity import identity_of
from train.run_folder.outcome import ENDS
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
        saves = on_line is None
        check_services(cfg, saves=saves)
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
        backend = attempt.join(workload(cfg, plan, task, is_whole=saves))
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


def check_services(cfg: TrainConfig, *, saves: bool) -> None:
    """Raise InputError if the Hub or a tracker would not take what the run sends to it."""
    if cfg.hub.push_to is not None:
        from train.observe.push import check_push  # few runs need it

        check_push(cfg)
    if saves and launched().rank == 0:
        check_trackers(cfg.telemetry)


def fit(attempt: Attempt, backend: Backend, on_line: OnLine | None) -> tuple[str, int]:
    """Build the model and engine, resume from the newest checkpoint, train and export. Returns what `run` returns."""
    cfg, plan, task, world = attempt.cfg, attempt.plan, attempt.task, backend.world
    check_ranks(attempt, backend)
    torch.manual_seed(cfg.seed)  # all ranks need the same initial weights
    model = world.agree(task.build_model)
    task.compile_loss(backend.compile_loss)
    engine = build_engine(
        cfg.parallel,
        cfg.optim,
        backend,
        model,
        task.loss,
        accumulation=plan.accumulation,
        lengths=num_lengths(task),
    )
    backend.seed(cfg.seed)  # ranks need different dropout
    attempt.watch.phase("load", is_start=True)
    checkpoints = CheckpointManager(attempt, backend, engine)
    progress = checkpoints.resume()
    engine.ready()
    data = TrainData(cfg, plan, task, backend, engine, progress)
    describe(attempt, backend, model)
    metrics = recorder(attempt, backend, engine, model, progress, on_line)
    with data.prefetcher or nullcontext():  # must be open until the export has read the samples
        reason = Training(attempt, backend, engine, data, metrics, checkpoints).run()
        is_complete = reason in ENDS
        if is_complete:
            checkpoints.remove_leftovers()
        attempt.watch.phase("export", is_start=True)  # the other ranks wait for rank 0
        if cfg.export and is_complete:
            engine.gather_full_model()
            world.run_on_rank0(
                lambda: export(attempt, checkpoints, model), attempt.watch.heartbeat
            )
    return reason, metrics.progress.step


def check_ranks(attempt: Attempt, backend: Backend) -> None:
    """Verify the data, and raise InputError on all ranks unless they have the same data and code."""
    task, world = attempt.task, backend.world
    if attempt.cfg.data.verify:
        # this sends no heartbeats, so the watchdog ends it if it hangs
        world.run_on_local_rank0(task.verify_data)
    world.agree(lambda: check_same_code(world.gather(imported.checksums())))
    world.agree(lambda: check_same_data(world.gather(task.data_id)))


def recorder(
    attempt: Attempt,
    backend: Backend,
    engine: Engine,
    model: nn.Module,
    progress: Progress,
    on_line: OnLine | None,
) -> Recorder:
    monitor = open_monitor(
        backend.monitor_kind,
        num_devices=backend.world.local_size,
        is_first_on_machine=backend.world.local_rank == 0,
        run_tag=os.environ.get("NEURON_PROCESS_TAG"),
    )
    # cached: counting takes as long as launching a few kernels
    flops = cache(partial(attempt.task.flops_per_example, model))
    return Recorder(
        attempt.cfg,
        attempt.plan,
        attempt.folder,
        backend,
        engine,
        flops,
        progress,
        monitor,
        on_line,
    )


@dataclass
class Training:
    """The training loop of an attempt and the parts that it connects."""

    attempt: Attempt
    backend: Backend
    engine: Engine
    data: TrainData
    metrics: Recorder
    checkpoints: CheckpointManager

    def __post_init__(self) -> None:
        self.votes = Votes(self.backend.world, self.attempt.stop)

    @property
    def progress(self) -> Progress:
        return self.metrics.progress

    @property
    def stopped_early(self) -> bool:
        patience = self.attempt.cfg.early_stop.patience
        return patience is not None and self.progress.evals_since_best >= patience

    @property
    def is_over(self) -> bool:
        return self.progress.step >= self.attempt.plan.total_steps or self.stopped_early

    def run(self) -> str:
        """Train, then wait for the last save. Returns the reason why training ended, the same on all ranks."""
        metrics, checkpoints = self.metrics, self.checkpoints
        with metrics.monitor, metrics, checkpoints.saving(metrics):
            if (
                self.progress.step == 0
                and self.attempt.saves
                and not self.progress.owes_evaluation
            ):
                try_evaluation(self.attempt, self.backend, self.engine)
            reason = self.train()
            # stopped during an evaluation: the checkpoint records that it is due
            if self.progress.step == 0:
                checkpoints.save(None, is_last=True)
            checkpoints.finish()
            if metrics.owes_summary():
                metrics.summary(reason, self.attempt.task.facts)
        return reason

    def train(self) -> str:
        """Train until the last step, an early stop or a request to stop. Returns the reason.

        During each step, the ranks draw the next step's batches and vote on whether to run it. Thus no rank waits for a
        rank that cannot continue.
        """
        cfg, plan, watch = self.attempt.cfg, self.attempt.plan, self.attempt.watch
        metrics = self.metrics
        if self.progress.owes_evaluation and self.evaluate_first():
            return self.who_asked()
        batches = [] if self.is_over else self.draw_first()
        while not self.is_over:
            self.votes.raise_failure()
            following = self.draw_next()

            is_start = metrics.is_first or metrics.is_new(lengths_of(batches))
            watch.phase("step", step=self.progress.step, is_start=is_start)
            lr = learning_rate(self.progress.step, cfg=cfg.optim, plan=plan)
            grad_norm = self.step(batches, lr)

            watch.phase("agree", step=self.progress.step, is_start=metrics.is_first)
            self.votes.count()
            self.progress.advance(plan.global_batch_size, lr)
            self.data.consumed(self.progress.examples)
            evaluates = self.is_evaluation_due
            metrics.end_step(evaluates, lr=lr, micro_batches=batches, grad_norm=grad_norm)
            if metrics.skips_in_a_row >= cfg.nonfinite.max_skips:
                batches = self.roll_back(following)
                continue
            if self.evaluate_and_save():
                return self.who_asked()
            batches = following
        return "early_stop" if self.stopped_early else "done"

    def step(self, batches: list[Batch], lr: float) -> torch.Tensor:
        """Take an optimizer step. Returns the norm of the gradients, on the device, like the losses."""
        engine = self.engine
        engine.begin_step(sum(batch["count"] for batch in batches), lr)
        for number, batch in enumerate(batches, start=1):
            self.attempt.watch.heartbeat()
            engine.forward_backward(batch, is_last=number == len(batches))
        grad_norm = engine.reduce_and_clip()
        engine.optimizer_step(grad_norm)  # skips the update unless the norm is finite
        return grad_norm

    def evaluate_first(self) -> bool:
        """Evaluate before the first step. Returns whether the run was asked to stop; its checkpoint records that."""
        score = evaluate(self.attempt, self.backend, self.engine, self.metrics)
        if self.progress.owes_evaluation:
            return True
        # without this checkpoint the next start would evaluate again
        if self.is_over:
            self.checkpoints.save(score, is_last=True)
        return False

    def draw_first(self) -> list[Batch]:
        """Draw a step's micro batches if the step before did not, and vote on whether to run it."""
        self.attempt.watch.phase("data", step=self.progress.step, is_start=True)
        began_s = time.perf_counter()
        batches, failure = self.data.draw()
        self.metrics.waited(time.perf_counter() - began_s)
        self.votes.cast(failure)
        self.votes.count()
        return batches

    def draw_next(self) -> list[Batch]:
        """Draw the next step's micro batches ([] in the last step), and vote on whether to continue after this one."""
        self.attempt.watch.phase("data", step=self.progress.step, is_start=self.metrics.is_first)
        self.metrics.begin_step()
        batches: list[Batch] = []
        failure: Exception | None = None
        if self.progress.step + 1 < self.attempt.plan.total_steps:
            batches, failure = self.data.draw()
        self.metrics.data_ready()
        self.checkpoints.report()
        self.votes.cast(failure or self.engine.failure or self.checkpoints.failure)
        return batches

    @property
    def is_evaluation_due(self) -> bool:
        step, every = self.progress.step, self.attempt.cfg.eval_every
        is_last = step == self.attempt.plan.total_steps
        return is_last or (every is not None and step % every == 0)

    def roll_back(self, following: list[Batch]) -> list[Batch]:
        """Go back to a checkpoint, and return the next step's micro batches."""
        was_last = self.progress.step == self.attempt.plan.total_steps
        self.checkpoints.roll_back()
        return self.draw_first() if was_last else following

    def evaluate_and_save(self) -> bool:
        """Evaluate and save after a step if this is due. Returns whether the run was asked to stop."""
        score = None
        if self.is_evaluation_due:
            score = evaluate(self.attempt, self.backend, self.engine, self.metrics)
        stops = self.votes.stops > 0 or self.progress.owes_evaluation
        ends = stops or self.is_over
        if ends or self.checkpoints.is_due():
            self.checkpoints.save(score, is_last=ends)
        return stops

    def who_asked(self) -> str:
        """Return why the run stops, the same on all ranks, and log the ranks that were asked to stop."""
        asked = self.votes.reasons()
        self.attempt.asked = "; ".join(
            f"{reason}, at rank {rank} on {host}" for rank, reason, _, host in asked[:MOST_NAMED]
        )
        self.attempt.kind = asked[0][2]
        logger.info("stopping: %s", self.attempt.asked)
        return asked[0][1]


def workload(cfg: TrainConfig, plan: Plan, task: Task, *, is_whole: bool) -> Workload:
    """Return the workload for backend.compile=auto to judge. Unless `is_whole`, the run counts as endless."""
    if not isinstance(cfg.parallel, DataParallelConfig):
        return Workload()
    passes = plan.total_steps * plan.accumulation // num_lengths(task)
    return Workload(passes if is_whole else sys.maxsize, plan.micro_batch_size * task.seq_len)


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
