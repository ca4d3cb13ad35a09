"""Evaluations, whose numbers are the same on any number of ranks: each example is counted once.

Ranks compute statistics of each row; rank 0 puts them in the order of the data and computes the metrics in float64
(`eval_metrics` of the task). A masked language model hides the tokens by the epoch EVAL_EPOCH
(train/data/batches/loader.py), whatever the step. Numbers are equal to the bit only for the same eval_batch_size, since
a product may add up in another order in a batch of another size; by default it is the micro batch, which may follow
from the number of ranks (train/config/plan.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from train.config import InputError, TrainConfig, Unreachable, check, make_plan, shortlist
from train.data.batches.loader import Batch, Batches, batched
from train.observe.metrics import Recorder
from train.parallel.backends import Backend, open_backend
from train.parallel.engines import Engine, build_engine
from train.parallel.ranks import AGREED
from train.run.attempt import Attempt, begin
from train.run.feed import check_same_data, draw, eval_order
from train.run.stopping import StoppedEarly, StopRequest, Votes
from train.system import samples
from train.system.folders import Folder
from train.system.launched import check_launch, launched
from train.system.run_folder import RunFolder
from train.tasks import best_metric, build_task

if TYPE_CHECKING:
    from train.models.network import Network

logger = logging.getLogger("train")


def evaluate(attempt: Attempt, backend: Backend, engine: Engine, recorder: Recorder) -> float | None:
    """Run an evaluation and record it. Returns its score, lower being better: see config.BestConfig.

    Returns None if a rank is asked to stop meanwhile: then the run owes the evaluation.
    """
    began_s = time.perf_counter()
    votes = Votes(backend.world, attempt.stop)
    measured = measure(attempt, backend, engine, votes, is_first=recorder.is_first_evaluation)
    recorder.progress.owes_evaluation = votes.counted.stops > 0 and measured is None
    if measured is None:
        return None
    metrics, rows = measured
    recorder.evaluation(recorder.progress.step, metrics, time.perf_counter() - began_s)
    best, step = attempt.cfg.best, recorder.progress.step
    if step == 0:  # a baseline is never the best: there is no checkpoint of it, and no patience begins with it
        return None
    score = -best_metric(attempt.cfg).sign * metrics[best.metric]
    if recorder.progress.saw(score, best.metric, min_delta=attempt.cfg.early_stop.min_delta):

        def write() -> str | None:  # returns a failure: a full disk is no reason to stop training
            try:
                attempt.task.write_evaluation(rows, attempt.folder.folder, step=step)
            except (InputError, Unreachable, OSError) as error:
                return str(error)
            return None

        failure = backend.world.run_on_rank0(write, attempt.watch.heartbeat)
        if failure is not None:
            recorder.alarm(f"the predictions of this evaluation are not written: {failure}")
    return score


def write_samples(attempt: Attempt, step: int) -> None:
    """Write some validation examples with the answers of the model exported at `step`; on rank 0."""
    # The run is complete without them, and has ended: a failure is one line of the log.
    folder, most = attempt.folder, attempt.cfg.samples
    try:
        answered = attempt.task.samples(folder.export, folder.folder, most) if most else []
        samples.write(folder.folder, samples.Samples(step, answered))
    except (InputError, Unreachable, OSError) as error:
        logger.warning("no samples of the model's answers are written: %s", error)


@dataclass(frozen=True)
class Evaluated:
    """An evaluation without training."""

    metrics: dict[str, float]
    rows: int
    eval_s: float
    backend: str
    device: str
    precision: str


def evaluate_alone(
    cfg: TrainConfig, stop: StopRequest, *, run: Folder | None, step: int | None, load: Callable[[Network], None]
) -> Evaluated:
    """Evaluate the model that training would begin with, whose weights `load` may replace, as training evaluates.

    Every rank calls it, with an empty cfg.run_dir of its own. `run`: the folder of the run that trained it, and `step`
    that of its weights. Raises StoppedEarly if a rank is asked to stop.
    """
    with stop.nothing_to_save():
        check_launch(cfg.instance, launched())
        task = build_task(cfg)
        task.only_evaluates(run)
        plan = make_plan(cfg, world_size=launched().world_size, rows=launched().world_size, seq_len=task.seq_len)
    with begin(Attempt(cfg, plan, task, RunFolder(cfg.run_dir), {}, stop, saves=False)) as attempt:
        attempt.watch.phase("join", is_start=True)
        with stop.nothing_to_save():
            backend = open_backend(cfg.backend, cfg.instance, cfg.s3)
        attempt.watch.compiles = backend.compilers.are_busy
        attempt.joined(backend.world)
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
    """Build the model and evaluate it. None if a rank is asked to stop."""
    cfg, task, world = attempt.cfg, attempt.task, backend.world
    world.run_on_local_rank0(task.verify_data)
    world.agree(lambda: check_same_data(world.gather(task.data_id)))
    for remark in task.remarks:
        logger.info(remark)

    def build() -> Network:
        steps = world.all_gather_object(step)
        check(len(set(steps)) == 1, f"ranks read steps {shortlist(set(steps))}: the run is being trained; try again")
        model = task.build_model()
        load(model)
        return model

    torch.manual_seed(cfg.seed)  # what a checkpoint lacks is the same on every rank
    model = world.agree(build)
    lengths = 1 if task.buckets is None else len(task.buckets.lengths)
    engine = build_engine(cfg.parallel, cfg.optim, backend, model, task.loss, accumulation=1, lengths=lengths)
    began_s = time.perf_counter()
    measured = measure(attempt, backend, engine, Votes(world, attempt.stop), is_first=True)
    if measured is None:
        return None
    device = {"backend": backend.name, "device": backend.device_name, "precision": backend.precision}
    return Evaluated(measured[0], task.eval_rows, time.perf_counter() - began_s, **device)


def measure(
    attempt: Attempt, backend: Backend, engine: Engine, votes: Votes, *, is_first: bool
) -> tuple[dict[str, float], np.ndarray] | None:
    """Return metrics over the validation data on all ranks, and on rank 0 their statistics [examples, n].

    Returns None if a rank is asked to stop, and if only the graph is wanted: a batch for each rank, whose numbers mean
    nothing.
    """
    plan, task = attempt.plan, attempt.task
    batch_size = plan.eval_batch_size
    order = eval_order(task, engine, batch_size=batch_size, collects=backend.collects)
    batches = Batches(
        task.eval_data(),
        order,
        batch_size=batch_size,
        num_workers=0,
        prefetch=1,
        pin_memory=False,
        multi_batch=None if task.buckets is None else 1,  # batches that are drawn together have one shape
    )
    statistics = []  # left on the device until the end, so that it never waits for the host
    num_done = 0
    engine.model.eval()
    try:
        for batch in agreed(iter(batched(backend.to_device(batches), 1)), votes):
            attempt.watch.phase("evaluate", is_start=is_first)  # the first one compiles
            with torch.no_grad():
                own = engine.evaluate(task.eval_statistics, batch["inputs"])
            if own is not None:
                statistics.append(own)
            num_done += 1
    finally:
        engine.model.train()
    if num_done < len(order):  # the ranks have equally many
        return None
    rows = torch.cat(backend.to_host(statistics)).numpy() if statistics else None
    gathered = backend.world.gather((engine.data_rank, rows))
    if backend.collects:
        return None
    by_data_rank = {data_rank: part for data_rank, part in gathered if part is not None}
    # It is on the host, in the order of the data: the same numbers on any number of ranks.
    merged = order.merged([by_data_rank[data_rank] for data_rank in sorted(by_data_rank)]) if gathered else np.empty(0)
    return backend.world.run_on_rank0(lambda: task.eval_metrics(merged), attempt.watch.heartbeat), merged


def agreed(batches: Iterator[list[Batch]], votes: Votes) -> Iterator[Batch]:
    """Yield the single batches, until a rank is asked to stop.

    Each is drawn while the ranks vote on the previous one: no rank computes alone while another has failed to draw,
    which all ranks raise.
    """
    batch, failure = draw(batches)
    votes.cast(failure)
    votes.count()
    votes.raise_failure()
    while batch and not votes.counted.stops:
        following, failure = draw(batches)
        votes.cast(failure)
        yield batch[0]
        votes.count()
        votes.raise_failure()
        batch = following
