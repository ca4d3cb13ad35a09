"""Evaluation. Its metrics do not depend on the number of ranks, since each example is counted once.

Ranks compute statistics for each row. Rank 0 puts the rows in the order of the data and computes the metrics in float64
(`eval_metrics` of the task). For masked language models, all evaluations mask the same tokens, those of epoch
EVAL_EPOCH (train/data/batches/loader.py). Metrics are bit-identical only for the same eval_batch_size: at a different
batch size, matrix products may add in a different order. The default is the micro batch size, which may depend on the
number of ranks (train/config/plan.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from train.config import RecordsConfig, TrainConfig, check, make_plan, shortlist
from train.data.batches.buckets import BucketEvalOrder
from train.data.batches.loader import Batch, Batches, batched
from train.data.shards.order import EvalOrder
from train.machine.launched import check_launch, launched
from train.observe.metrics import Recorder
from train.parallel.backends import Backend, compiles_each_length
from train.parallel.engines import Engine, build_engine
from train.parallel.ranks import AGREED
from train.run.attempt import Attempt, begin
from train.run.feed import check_same_data, draw, eval_order
from train.run.stopping import StoppedEarly, StopRequest, Votes
from train.run_folder import samples
from train.run_folder.run_folder import RunFolder, side_channel
from train.tasks import Task, best_metric, build_task

if TYPE_CHECKING:
    from train.models.network import Network

logger = logging.getLogger("train")


def evaluate(
    attempt: Attempt, backend: Backend, engine: Engine, recorder: Recorder
) -> float | None:
    """Evaluate and record the metrics. Return the score by best.metric (lower is better), or None if there is none.

    There is no score at step 0, if the backend only collects graphs, or if a rank is asked to stop during the
    evaluation, which is then repeated after a resume.
    """
    began_s = time.perf_counter()
    votes = Votes(backend.world, attempt.stop)
    measured = measure(
        attempt,
        backend,
        engine,
        votes,
        is_first=recorder.is_first_evaluation,
        is_trial=backend.collects,
    )
    recorder.progress.owes_evaluation = votes.stops > 0 and measured is None
    if measured is None:
        return None
    metrics, chosen, rows = measured
    recorder.evaluation(recorder.progress.step, metrics, time.perf_counter() - began_s)
    best = attempt.cfg.best
    step = recorder.progress.step
    if step == 0:  # never the best: step 0 has no checkpoint, and patience does not start with it
        return None
    score = -best_metric(attempt.cfg).sign * metrics[best.metric]
    is_best = recorder.progress.saw(score, best.metric)
    recorder.progress.keep(chosen)
    if is_best or not attempt.cfg.checkpoint.best:  # the exported weights may be these

        def write() -> None:  # a full disk must not stop training
            with side_channel("the predictions of this evaluation are not written"):
                attempt.task.write_evaluation(rows, attempt.folder.folder, step=step)

        backend.world.run_on_rank0(write, attempt.watch.heartbeat)
    return score


def try_evaluation(attempt: Attempt, backend: Backend, engine: Engine) -> None:
    """Evaluate the last batch, so that a model that cannot be evaluated fails before it is trained.

    It is a batch of the greatest length, often with empty places. Nothing random is drawn, and nothing is recorded.
    """
    compiles = backend.compiler is not None or compiles_each_length(
        attempt.cfg.backend, attempt.cfg.instance
    )
    # a graph may take minutes, and the first micro batch tries whether compiling works
    if not compiles:
        measure(
            attempt,
            backend,
            engine,
            Votes(backend.world, attempt.stop),
            is_first=True,
            is_trial=True,
        )


def write_samples(attempt: Attempt, step: int) -> None:
    """Write some validation examples with the answers of the model exported at `step`. Only rank 0 calls this."""
    folder = attempt.folder
    most = attempt.cfg.samples
    with side_channel("could not write samples of the model's answers"):
        answered = samples_of(attempt.cfg, attempt.task, folder.export, most) if most else []
        samples.write(folder.folder, samples.Samples(step, answered))


def samples_of(cfg: TrainConfig, task: Task, export: Path, most: int) -> list[samples.Sample]:
    rows = list(task.sampled_rows(most))
    if not rows:
        return task.samples(export, most)
    from train.tasks import predictor  # loads datasets, which tasks without rows do not need

    assert isinstance(cfg.data, RecordsConfig)
    return predictor.samples_of(rows, export, seq_len=cfg.seq_len, lengths=cfg.data.lengths)


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation without training."""

    metrics: dict[str, float]
    rows: int
    eval_s: float
    backend: str
    device: str
    precision: str


def evaluate_alone(
    cfg: TrainConfig, stop: StopRequest, *, step: int | None, load: Callable[[Network], None]
) -> Evaluated:
    """Evaluate the model that training would start from, as training evaluates it. `load` may replace its weights.

    Every rank must call this with a separate, empty cfg.run_dir. `step` is the step of the weights. Raises StoppedEarly
    if a rank is asked to stop.
    """
    with stop.nothing_to_save():
        check_launch(cfg.instance, launched())
        task = build_task(cfg)
        task.only_evaluates()
        plan = make_plan(
            cfg, world_size=launched().world_size, rows=launched().world_size, seq_len=task.seq_len
        )
    with begin(Attempt(cfg, plan, task, RunFolder(cfg.run_dir), {}, stop, saves=False)) as attempt:
        backend = attempt.join()
        try:
            evaluated = evaluate_model(attempt, backend, step, load)
        except AGREED:
            backend.close()
            raise
        backend.close()
    if evaluated is None:
        raise StoppedEarly(stop.signal or "another rank")
    return evaluated


def evaluate_model(
    attempt: Attempt, backend: Backend, step: int | None, load: Callable[[Network], None]
) -> Evaluated | None:
    """Build the model and evaluate it. Returns None if a rank is asked to stop."""
    cfg = attempt.cfg
    task = attempt.task
    world = backend.world
    world.run_on_local_rank0(task.verify_data)
    world.agree(lambda: check_same_data(world.gather(task.data_id)))
    for remark in task.remarks:
        logger.info(remark)

    def build() -> Network:
        steps = world.all_gather_object(step)
        check(
            len(set(steps)) == 1,
            f"ranks read steps {shortlist(set(steps))}: the run is still training; try again",
        )
        model = task.build_model()
        load(model)
        return model

    torch.manual_seed(cfg.seed)  # makes weights that the checkpoint lacks the same on every rank
    model = world.agree(build)
    options = {"accumulation": 1, "lengths": num_lengths(task)}
    engine = build_engine(cfg.parallel, cfg.optim, backend, model, task.loss, **options)
    began_s = time.perf_counter()
    measured = measure(attempt, backend, engine, Votes(world, attempt.stop), is_first=True)
    if measured is None:
        return None
    device = {
        "backend": backend.name,
        "device": backend.device_name,
        "precision": backend.precision,
    }
    return Evaluated(measured[0], task.eval_rows, time.perf_counter() - began_s, **device)


def num_lengths(task: Task) -> int:
    """Return the number of lengths of a task's batches."""
    if task.buckets is None:
        return 1
    return len(task.buckets.lengths)


def measure(
    attempt: Attempt,
    backend: Backend,
    engine: Engine,
    votes: Votes,
    *,
    is_first: bool,
    is_trial: bool = False,
) -> tuple[dict[str, float], dict[str, Any], np.ndarray] | None:
    """Return the metrics of the validation data and what the task chooses by them, on all ranks.

    The third result, on rank 0, is the statistics [examples, n] behind them.

    Returns None if a rank is asked to stop, and after a trial, which runs only the last batch.
    """
    task = attempt.task
    world = backend.world
    order = eval_order(task, engine, batch_size=attempt.plan.eval_batch_size)
    batches = batches_of(task, order, attempt.plan.eval_batch_size, is_trial=is_trial)
    # They stay on the device until the end, so that the device never waits for the host.
    statistics: list[torch.Tensor] = []
    num_done = 0
    with evaluating(engine.model):
        for batch in agreed(iter(batched(backend.to_device(batches), 1)), votes):
            # the first batch triggers compilation
            attempt.watch.phase("evaluate", is_start=is_first)
            own = engine.evaluate(task.eval_statistics, batch["inputs"])
            if own is not None:
                statistics.append(own)
            num_done += 1
    # If it was stopped, it was after the same batch on all ranks.
    if num_done < len(order) or is_trial:
        return None
    merged = merged_on_rank0(backend, engine, order, statistics)

    def judge() -> tuple[dict[str, float], dict[str, Any]]:
        metrics = task.eval_metrics(merged)
        return metrics, task.choose(merged, metrics)

    return *world.run_on_rank0(judge, attempt.watch.heartbeat), merged


def batches_of(
    task: Task, order: EvalOrder | BucketEvalOrder, batch_size: int, *, is_trial: bool
) -> Batches:
    """Return the batches of an evaluation; of a trial, only the last one."""
    return Batches(
        task.eval_data(),
        deque(order, maxlen=1) if is_trial else order,
        batch_size=batch_size,
        num_workers=0,
        prefetch=1,
        pin_memory=False,
        # batches drawn together must have one shape
        multi_batch=None if task.buckets is None else 1,
    )


def merged_on_rank0(
    backend: Backend,
    engine: Engine,
    order: EvalOrder | BucketEvalOrder,
    statistics: list[torch.Tensor],
) -> np.ndarray:
    """Gather the statistics [examples, n] of all ranks on rank 0; an empty array on the others.

    The host merges the rows in the order of the data, so the metrics are the same on any number of ranks.
    """
    rows = None
    if statistics:
        rows = torch.cat(backend.to_host(statistics)).numpy()
    gathered = backend.world.gather((engine.data_rank, rows))
    parts = {data_rank: part for data_rank, part in gathered if part is not None}
    if not gathered:
        return np.empty(0)
    return order.merged([parts[data_rank] for data_rank in sorted(parts)])


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout and gradients off in the block."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train()


def agreed(batches: Iterator[list[Batch]], votes: Votes) -> Iterator[Batch]:
    """Yield single batches until a rank is asked to stop.

    The ranks vote on a batch before they compute it. If a rank cannot draw a batch, all ranks raise its error, so that
    none waits for that rank in a collective.
    """
    batch, failure = draw(batches)
    votes.cast(failure)
    votes.count()
    votes.raise_failure()
    while batch and not votes.stops:
        following, failure = draw(batches)
        votes.cast(failure)
        yield batch[0]
        votes.count()
        votes.raise_failure()
        batch = following
