"""The training loop. It has three doors, task, backend and engine, and never asks their names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from train.attempt.attempt import ENDS, Attempt, begin, record_end, refusals
from train.attempt.dry import DryRecorder, DrySaver
from train.attempt.preempt import StopRequest
from train.attempt.recovery import Recovery
from train.attempt.resume import go_on
from train.attempt.watchdog import Watchdog
from train.backend import Backend, open_backend
from train.checkpoints.progress import Progress
from train.checkpoints.saver import Saver
from train.checkpoints.store import open_store
from train.config import TrainConfig, check, make_plan
from train.data.batches.loader import Batch
from train.data.shards.prefetch import Prefetcher
from train.evaluation import evaluate, write_samples
from train.feed import check_same_data, draw, train_batches, train_order
from train.host.garbage import search_as_usual
from train.host.launched import check_launch, launched
from train.models.memory import memory_of
from train.models.model_sizes import check_layers, shape_of_model
from train.optim import learning_rate
from train.parallel import Engine, LossFunction, build_engine
from train.ranks import AGREED
from train.run_folder import exported
from train.run_folder.folder import RunFolder, identity_of
from train.tasks import build_task
from train.telemetry.metrics import Recorder
from train.telemetry.monitor import open_monitor
from train.votes import Votes

logger = logging.getLogger("train")
MOST_NAMED = 3  # ranks that were asked to stop


def run(cfg: TrainConfig, stop: StopRequest, *, dry: Callable[..., Recorder] | None = None) -> tuple[str, int]:
    """Train as cfg says, from scratch or from the newest checkpoint of its run folder. With `dry`, which makes its
    recorder, the run saves nothing, and each machine may have a run folder of its own.

    Everything that can be refused is refused before a device opens. Gives why it ended (done, early_stop or what asked
    for it) and the step.
    """
    with stop.nothing_to_save(), refusals(cfg):
        check_launch(cfg.instance, launched())
        if cfg.hub.push_to is not None:
            from train.publish.push import check_push  # the rooms of the tools are not for every run

            check_push(cfg)
        task = build_task(cfg)
        check_layers(cfg)
        plan = make_plan(cfg, world_size=launched().world_size, rows=task.train_rows, seq_len=task.seq_len)
        identity = identity_of(cfg, plan, task.data_id)
    search_as_usual()  # all is imported
    dry = DryRecorder if cfg.collect_graphs else dry
    with begin(Attempt(cfg, plan, task, RunFolder(cfg.run_dir, cfg.s3), identity, stop, dry)) as attempt:
        reason, step = open_and_fit(attempt)
        record_end(attempt, reason, step)
    return reason, step


def open_and_fit(attempt: Attempt) -> tuple[str, int]:
    cfg = attempt.cfg
    attempt.watch.phase("join", is_start=True)
    with attempt.stop.nothing_to_save():
        backend = open_backend(cfg.backend, cfg.instance, cfg.s3, collects=cfg.collect_graphs)
    world, attempt.watch.compiles = backend.world, backend.compilers.are_busy
    attempt.joined(world)
    refused: Exception | None = None
    try:
        if cfg.data.verify:
            world.run_on_local_rank0(attempt.task.verify_data)  # without a heartbeat: a hang is ended
        ended = fit(attempt, backend)
    except AGREED as error:
        refused = error.with_traceback(None)
    backend.close()  # all that fit made must be freed by now: it is a function, and the traceback is dropped
    if refused is not None:
        raise refused
    return ended


def fit(attempt: Attempt, backend: Backend) -> tuple[str, int]:
    """Build model and engine, go on from the newest checkpoint, train, export."""
    cfg, plan, task, world = attempt.cfg, attempt.plan, attempt.task, backend.world
    folder, watch = attempt.folder, attempt.watch
    check_same_data(world.all_gather_object(task.data_id))
    torch.manual_seed(cfg.seed)  # the same weights on every rank
    model = world.agree(task.build_model)
    lengths = 1 if task.buckets is None else len(task.buckets.lengths)
    loss = beating(task.loss, watch)
    engine = build_engine(
        cfg.parallel, cfg.optim, backend, model, loss, accumulation=plan.accumulation, lengths=lengths
    )
    backend.seed(cfg.seed)  # other dropout on every rank
    watch.phase("load", is_start=True)
    store = open_store(folder.storage, folder.staging)
    loaded = go_on(attempt, store, engine, backend)
    engine.ready()
    facts = facts_of(attempt, engine, backend)
    world.run_on_rank0(lambda: describe(attempt, facts, model))
    each = "rank" if plan.replicas == world.size else f"group of {world.size // plan.replicas} ranks"
    logger.info(
        f"{backend.name} on {backend.device_name}, {backend.precision}: {world.num_machines} x {world.local_size} "
        f"ranks, {plan.global_batch_size} sequences a step ({plan.micro_batch_size} x {plan.accumulation} a {each})"
    )
    if (shape := shape_of_model(model)) is not None:
        sizes = {name: getattr(plan, name) for name in ("world_size", "micro_batch_size", "accumulation")}
        logger.info(memory_of(cfg, shape, seq_len=task.seq_len, precision=backend.precision, **sizes))
    if not folder.is_remote:
        num_blind = world.sum([not folder.environment.is_file()])[0]
        shares = num_blind == 0 or attempt.dry is not None  # which uses a temporary run folder on each machine
        check(shares, f"{num_blind:g} ranks do not see run_dir={cfg.run_dir} of rank 0; it must be a shared folder")
    order = train_order(cfg, plan, task, world, engine, loaded.progress)
    prefetcher = world.agree(lambda: task.prefetcher(order, is_first_on_machine=world.local_rank == 0))
    monitor = open_monitor(
        backend.monitor_kind,
        num_devices=world.local_size,
        is_first_on_machine=world.local_rank == 0,
        run_tag=os.environ.get("NEURON_PROCESS_TAG"),
    )
    flops = partial(task.flops_per_example, model)
    batches = train_batches(cfg, plan, task, backend, engine, order)
    make_recorder, make_saver = (attempt.dry, DrySaver) if attempt.dry else (Recorder, Saver)
    with prefetcher:  # until the samples of the export have been read
        with (
            monitor,
            make_recorder(cfg, plan, folder, backend, engine, flops, loaded.progress, monitor) as recorder,
            Recovery(attempt, backend, engine, store, recorder, loaded, make_saver) as recovery,
        ):
            training = Training(
                attempt, backend, engine, prefetcher, batches, Votes(world, attempt.stop), recorder, recovery
            )
            reason = train(training)
            recovery.finish()
            if recorder.has_measured:  # a finished run that is started again has nothing to add
                recorder.summary(reason, {**task.facts, **recovery.facts()})
        watch.phase("export", is_start=True)  # the others wait for rank 0
        if cfg.export and reason in ENDS:
            engine.assemble()
            world.run_on_rank0(lambda: export(attempt, recovery, model), watch.beat)
    return reason, training.progress.step


@dataclass
class Training:
    """What the loop works with."""

    attempt: Attempt
    backend: Backend
    engine: Engine
    prefetcher: Prefetcher
    batches: Iterator[list[Batch]]
    votes: Votes
    recorder: Recorder
    recovery: Recovery

    @property
    def progress(self) -> Progress:
        return self.recorder.progress

    @property
    def is_over(self) -> bool:
        return self.progress.step >= self.attempt.plan.total_steps or self.stopped_early

    @property
    def stopped_early(self) -> bool:
        patience = self.attempt.cfg.early_stop.patience
        return patience is not None and self.progress.evals_since_best >= patience

    def first_batches(self) -> list[Batch]:
        """Draw the micro batches of the first step and vote on them; later ones are drawn one step ahead."""
        self.attempt.watch.phase("data", step=self.progress.step, is_start=True)
        began_s = time.perf_counter()
        micro_batches, failure = draw(self.batches)
        self.recorder.waited(time.perf_counter() - began_s)
        self.votes.cast(failure)
        self.votes.count()
        return micro_batches

    def evaluate(self) -> float | None:
        return evaluate(self.attempt, self.backend, self.engine, self.recorder)


def train(t: Training) -> str:
    """Train until the last step, an early stop, or a request to stop. Gives which one it was, the same on every rank.

    A step's batches are drawn before the step before it begins, and the ranks' votes travel while that one runs: a rank
    that cannot go on is known to all before they would wait for it.
    """
    cfg, plan, watch = t.attempt.cfg, t.attempt.plan, t.attempt.watch
    if t.progress.owes_evaluation:
        score = t.evaluate()
        if t.progress.owes_evaluation:  # the checkpoint of this step knows it
            return who_asked(t.attempt, t.votes)
        if t.is_over:  # there is no later checkpoint that could know of it
            t.recovery.save(score, is_last=True)
    micro_batches = [] if t.is_over else t.first_batches()
    while not t.is_over:
        t.votes.raise_failure()
        progress, recorder = t.progress, t.recorder
        watch.phase("data", step=progress.step, is_start=recorder.is_first)
        recorder.begin_step()
        is_last = progress.step + 1 == plan.total_steps
        following, failure = ([], None) if is_last else draw(t.batches)
        recorder.data_ready()
        t.recovery.report()
        t.votes.cast(failure or t.recovery.failure)
        seq_len = micro_batches[0]["inputs"]["input_ids"].shape[-1]
        watch.phase("step", step=progress.step, is_start=recorder.is_first or recorder.is_new(seq_len))
        lr = learning_rate(progress.step, cfg=cfg.optim, plan=plan)
        grad_norm = t.engine.step(micro_batches, lr)
        watch.phase("agree", step=progress.step, is_start=recorder.is_first)
        votes = t.votes.count()
        progress.step += 1
        progress.examples += plan.global_batch_size
        t.prefetcher.consumed(progress.examples)
        evaluates = due(progress.step, cfg.eval_every, plan.total_steps)
        recorder.end_step(evaluates, lr=lr, micro_batches=micro_batches, seq_len=seq_len, grad_norm=grad_norm)
        if recorder.skips_in_a_row >= cfg.nonfinite.max_skips:
            t.recovery.roll_back()
            micro_batches = t.first_batches() if is_last else following
            continue
        score = t.evaluate() if evaluates else None
        stopping = votes.stops > 0 or progress.owes_evaluation
        ends = stopping or t.is_over
        if ends or t.recovery.is_due(votes.saves):
            watch.phase("save", step=progress.step)
            t.recovery.save(score, is_last=ends)
        if stopping:
            return who_asked(t.attempt, t.votes)
        micro_batches = following
    return "early_stop" if t.stopped_early else "done"


def who_asked(attempt: Attempt, votes: Votes) -> str:
    """Why the run stops, the same on all ranks; the log names the ranks that were asked."""
    asked = votes.reasons()
    attempt.asked = "; ".join(f"{reason}, at rank {rank} on {host}" for rank, reason, _, host in asked[:MOST_NAMED])
    attempt.kind = asked[0][2]
    logger.info("stopping: %s", attempt.asked)
    return asked[0][1]


def facts_of(attempt: Attempt, engine: Engine, backend: Backend) -> dict[str, Any]:
    """What the configuration amounts to here, for environment.json."""
    return {
        "plan": asdict(attempt.plan),
        "seq_len": attempt.task.seq_len,
        "parameters": sum(weight.numel() for weight in engine.model.parameters() if weight.requires_grad),
        "device": backend.device_name,
        "precision": backend.precision,
        "backend": backend.name,
        "world_size": backend.world.size,
        "threads": torch.get_num_threads(),
        **attempt.task.facts,
    }


def describe(attempt: Attempt, facts: dict[str, Any], model: nn.Module) -> None:
    """Rank 0: describe the run in its folder."""
    attempt.folder.describe(attempt.cfg, attempt.identity, facts, attempt.task.details)
    attempt.task.describe_model(model, attempt.folder.folder)


def export(attempt: Attempt, recovery: Recovery, model: nn.Module) -> None:
    """Weights and tokenizer for transformers, samples of what they learnt, and the card; to the Hub, if asked for."""
    from train.publish import card  # late: the report is no part of a run

    cfg, task, folder = attempt.cfg, attempt.task, attempt.folder
    if cfg.best.export:
        recovery.put_best()
    with exported.renewed(folder, recovery.recorder.progress.step) as scratch:
        task.export(model, scratch)
    write_samples(attempt, recovery.recorder.progress.step)
    card.write(folder)
    exported.mirror(folder)
    if cfg.hub.push_to is not None:
        from train.publish.push import push

        push(folder, cfg.hub.push_to, private=cfg.hub.private)


def beating(loss: LossFunction, watch: Watchdog) -> LossFunction:
    """The same, with a heartbeat for each micro batch."""

    def loss_with_beat(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        watch.beat()
        return loss(model, inputs)

    return loss_with_beat


def due(step: int, every: int | None, total: int) -> bool:
    return step == total or (every is not None and step % every == 0)
