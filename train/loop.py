"""The training loop. It has three doors, task, backend and engine, and never asks their names."""

from __future__ import annotations

import logging
import os
import platform
import time
from dataclasses import asdict
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from train import card, exported
from train.backend import Backend, open_backend
from train.checkpoints.progress import Progress
from train.config import (
    InputError,
    Plan,
    TrainConfig,
    Unreachable,
    check,
    make_plan,
)
from train.data.batches import Batches, failure_of
from train.feed import as_own_failure, check_same_data, eval_order, train_batches, train_order
from train.hub import check_push, push
from train.launched import check_launch, launched
from train.life import ENDS, Life, begin, leave_word, refusals
from train.metrics import Recorder
from train.monitor import open_monitor
from train.optim import build_optimizer, learning_rate, set_learning_rate
from train.parallel import Engine, LossFunction, build_engine
from train.preempt import StopRequest
from train.recovery import Recovery
from train.run_folder import RunFolder, identity_of
from train.tasks import Task, build_task
from train.together import TOGETHER, meanwhile, raise_together, together
from train.watchdog import Watchdog

logger = logging.getLogger("train")
MOST_NAMED = 3  # ranks that were asked to stop


def run(cfg: TrainConfig, stop: StopRequest) -> tuple[str, int]:
    """Train as cfg says, from scratch or from the newest checkpoint of its run folder.

    Everything that can be refused is refused before a device opens. Gives why it ended (done, early_stop or what asked
    for it) and the step.
    """
    with stop.nothing_to_save(), refusals(cfg):
        check_launch(cfg, launched())
        check_push(cfg)
        task = build_task(cfg)
        plan = make_plan(cfg, world_size=launched().world_size, rows=task.train_rows)
        identity = identity_of(cfg, plan, task.data_id)
    with begin(Life(cfg, plan, task, RunFolder(cfg.run_dir, cfg.s3), identity, stop)) as life:
        reason, step = open_and_fit(life)
        leave_word(life, reason, step)
    return reason, step


def open_and_fit(life: Life) -> tuple[str, int]:
    cfg = life.cfg
    life.watch.phase("join", is_start=True)
    with life.stop.nothing_to_save():
        backend = open_backend(cfg.backend, cfg.instance, collects=cfg.collect_graphs)
    life.joined(*backend.share((life.folder.previous, life.owner))[0])  # rank 0 owns the folder, or it would not join
    refused: Exception | None = None
    try:
        if cfg.data.verify:
            together(backend, life.task.verify_data if backend.local_rank == 0 else lambda: None)
        ended = fit(life, backend)
    except TOGETHER as error:
        refused = error.with_traceback(None)
    backend.close()  # what fit made must be gone by now: hence a function of its own, and no traceback
    if refused is not None:
        raise refused
    return ended


def fit(life: Life, backend: Backend) -> tuple[str, int]:
    cfg, plan, task, folder, watch = life.cfg, life.plan, life.task, life.folder, life.watch
    check_same_data(backend.share(task.data_id))
    torch.manual_seed(cfg.seed)  # the same weights on every rank
    model = task.build_model()
    lengths = 1 if task.buckets is None else len(task.buckets.lengths)
    engine = build_engine(cfg.parallel, backend, model, accumulation=plan.accumulation, lengths=lengths)
    optimizer = build_optimizer(cfg.optim, engine.parameters, adamw=backend.adamw, head=model.head_parameters())
    backend.seed(cfg.seed)  # other dropout on every rank
    watch.phase("load", is_start=True)
    recovery = Recovery(life, backend, model, engine, optimizer)
    progress = recovery.load()
    recovery.optimizer = optimizer = backend.own(optimizer, engine.parameters, cfg.optim.max_grad_norm)
    known = facts(plan, task, backend, engine)
    together(backend, lambda: folder.describe(cfg, life.identity, known, task.details) if backend.rank == 0 else None)
    together(backend, lambda: task.describe_model(model, folder.folder) if backend.rank == 0 else None)
    logger.info(describe(plan, backend))
    num_blind = 0.0 if folder.is_remote else backend.sum([not folder.environment.is_file()])[0]
    order = train_order(cfg, plan, task, backend, progress)
    supply = together(backend, lambda: task.supply(order, is_first_on_machine=backend.local_rank == 0))
    shares = num_blind == 0 or cfg.collect_graphs  # whose run folder is a temporary one of each machine
    check(shares, f"{num_blind:g} ranks do not see run_dir={cfg.run_dir} of rank 0; it must be a shared folder")
    batches = train_batches(cfg, plan, task, backend, order)
    flops = partial(task.flops_per_example, model)
    loss = beating(task.loss, watch)
    reason, stopping = "done", False

    monitor = open_monitor(
        backend.monitor_kind,
        num_devices=backend.local_world_size,
        is_first_on_machine=backend.local_rank == 0,
        run_tag=os.environ.get("NEURON_PROCESS_TAG"),
    )
    with (
        supply,
        monitor,
        Recorder(cfg, plan, folder, backend, flops, progress, monitor) as recorder,
        recovery,
    ):
        recovery.begin(recorder)
        if progress.owes_evaluation:
            progress.owes_evaluation = False
            evaluate(life, backend, engine, recorder)
        while progress.step < plan.total_steps and not is_over(cfg, progress):
            watch.phase("data", step=progress.step, is_start=recorder.is_first)
            recorder.begin_step()
            micro_batches = next(batches)
            recorder.data_ready()
            own = [sum(batch[key] for batch in micro_batches) for key in ("count", "tokens")]
            failure = failure_of(micro_batches) or recovery.look()
            watch.phase("agree", step=progress.step, is_start=recorder.is_first)
            asked = [life.stop.reason is not None, life.stop.saves_soon is not None]
            count, tokens, num_stops, num_saves, num_failures = backend.sum([*own, *asked, failure is not None])
            if num_failures:
                raise_together(backend, failure)
            stopping = num_stops > 0 and progress.step + 1 < plan.total_steps  # the last step ends by itself
            seq_len = micro_batches[0]["inputs"]["input_ids"].shape[-1]
            watch.phase("step", step=progress.step, is_start=recorder.is_first or recorder.is_new(seq_len))
            lr = learning_rate(progress.step, cfg=cfg.optim, plan=plan)
            set_learning_rate(optimizer, lr)
            engine.forward_backward(micro_batches, loss, count)
            grad_norm = backend.step(optimizer, engine.parameters, cfg.optim.max_grad_norm)
            progress.step += 1
            progress.examples += plan.global_batch_size
            supply.consumed(progress.examples)
            evaluates = due(progress.step, cfg.eval_every, plan.total_steps)
            recorder.end_step(
                evaluates, lr=lr, count=count, tokens=tokens, seq_len=seq_len, engine=engine, grad_norm=grad_norm
            )
            if recorder.skips_in_a_row >= cfg.nonfinite.max_skips:
                progress = recovery.roll_back()
                continue
            progress.owes_evaluation = evaluates and stopping
            score = evaluate(life, backend, engine, recorder) if evaluates and not stopping else None
            ends = stopping or progress.step == plan.total_steps or is_over(cfg, progress)
            if ends or recovery.is_due(num_saves):
                watch.phase("save", step=progress.step)
                recovery.save(score, is_last=ends)
            if stopping:
                reason = who_asked(life, backend)
                break
        recovery.finish()
        if not stopping and is_over(cfg, progress):
            reason = "early_stop"
        if recorder.steps_done and not cfg.collect_graphs:  # a finished run that is started again has nothing to add
            recorder.summary(reason, {**task.facts, **recovery.facts()})
    watch.phase("export", is_start=True)  # the others wait for rank 0
    if cfg.export and reason in ENDS:
        meanwhile(backend, lambda: export(life, recovery, model), watch.beat)
    return reason, progress.step


def who_asked(life: Life, backend: Backend) -> str:
    """Why the run stops, the same on all ranks; the log tells which of them were asked."""
    answers = enumerate(backend.share((life.stop.reason, platform.node())))
    asked = [(rank, reason, host) for rank, (reason, host) in answers if reason is not None]
    life.asked = "; ".join(f"{reason}, at rank {rank} on {host}" for rank, reason, host in asked[:MOST_NAMED])
    logger.info("stopping: %s", life.asked)
    return asked[0][1]


def describe(plan: Plan, backend: Backend) -> str:
    machines = backend.world_size // backend.local_world_size
    return (
        f"{backend.name} on {backend.device_name}, {backend.precision}: {machines} x {backend.local_world_size} ranks, "
        f"{plan.global_batch_size} sequences a step ({plan.micro_batch_size} x {plan.accumulation} a rank)"
    )


def export(life: Life, recovery: Recovery, model: nn.Module) -> None:
    """Weights and tokenizer for transformers, and the card that goes with them; to the Hub, if asked for."""
    cfg, task, folder = life.cfg, life.task, life.folder
    if cfg.best.export:
        recovery.put_best()
    with exported.renewed(folder, recovery.recorder.progress.step) as scratch:
        task.export(model, scratch)
    card.write(folder)
    exported.mirror(folder)
    if cfg.hub.push_to is not None:
        push(folder, cfg.hub.push_to, private=cfg.hub.private)


def beating(loss: LossFunction, watch: Watchdog) -> LossFunction:
    """The same, with a heartbeat for each micro batch."""

    def loss_with_beat(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        watch.beat()
        return loss(model, inputs)

    return loss_with_beat


def is_over(cfg: TrainConfig, progress: Progress) -> bool:
    return cfg.early_stop.patience is not None and progress.evals_since_best >= cfg.early_stop.patience


def evaluate(life: Life, backend: Backend, engine: Engine, recorder: Recorder) -> float | None:
    """Take note of an evaluation. Gives what it counts by, lower being better: see config.BestConfig."""
    began_s = time.perf_counter()
    found = validate(life, backend, engine, is_first=recorder.is_first_evaluation)
    if found is None:
        return None
    metrics, rows = found
    recorder.evaluation(recorder.progress.step, metrics, time.perf_counter() - began_s)
    best, step = life.cfg.best, recorder.progress.step
    score = metrics[best.metric] if best.lower_is_better else -metrics[best.metric]
    if recorder.progress.saw(score, best.metric, min_delta=life.cfg.early_stop.min_delta):
        failure = meanwhile(backend, lambda: written(life, rows, step), life.watch.beat)
        if failure is not None:
            recorder.alarm(f"the predictions of this evaluation are not written: {failure}")
    return score


def written(life: Life, rows: np.ndarray, step: int) -> str | None:
    """Predictions and tables of an evaluation; why not, if they are not: a full disk is no reason to stop training."""
    try:
        life.task.write_evaluation(rows, life.folder.folder, step=step)
    except (InputError, Unreachable, OSError) as error:
        return str(error)
    return None


def validate(
    life: Life, backend: Backend, engine: Engine, *, is_first: bool
) -> tuple[dict[str, float], np.ndarray] | None:
    """Metrics over the validation data, each example once whatever the number of ranks, and on rank 0 what they are
    from. None where only the graph is wanted: a batch for each rank, whose numbers mean nothing.
    """
    cfg, plan, task = life.cfg, life.plan, life.task
    batch_size = cfg.eval_batch_size or plan.micro_batch_size
    order = eval_order(task, backend, batch_size=batch_size, collects=cfg.collect_graphs)
    most = None if task.buckets is None else 1  # drawn together: they have one shape
    batches = Batches(
        task.eval_data(), order, batch_size=batch_size, num_workers=0, prefetch=1, pin_memory=False, most_together=most
    )
    failure: Exception | None = None
    found = []  # left on the device until the end, so that it never waits for the host
    engine.model.eval()
    with torch.no_grad():
        for batch in as_own_failure(backend.feed(batches), backend):
            life.watch.phase("evaluate", is_start=is_first)  # which is compiled
            if failure := failure_of([batch]):
                break
            with backend.autocast():  # for each batch: casts of weights that outlive it make the next another graph
                found.append(task.eval_statistics(engine.model, batch["inputs"]))
    engine.model.train()
    if backend.sum([failure is not None])[0]:
        raise_together(backend, failure)
    shares = backend.gather({"rows": torch.cat(backend.read(found)).numpy()})
    if cfg.collect_graphs:
        return None
    # On the host, in the order of the data: the same numbers on any number of ranks.
    merged = order.merged([share["rows"] for share in shares]) if shares else np.empty((0, 0))
    metrics = meanwhile(backend, lambda: task.eval_metrics(merged), life.watch.beat)
    return backend.share(metrics or {})[0], merged


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
