"""Evaluations: the same numbers on any number of ranks, each example counted once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from train.attempt.attempt import Attempt
from train.config import InputError, Unreachable, lower_is_better
from train.data.batches.loader import Batches, failure_of
from train.feed import eval_order
from train.telemetry.metrics import Recorder

if TYPE_CHECKING:
    from train.backend import Backend
    from train.parallel import Engine


def evaluate(attempt: Attempt, backend: Backend, engine: Engine, recorder: Recorder) -> float | None:
    """Run an evaluation and record it. Gives its score, lower being better: see config.BestConfig."""
    began_s = time.perf_counter()
    measured = measure(attempt, backend, engine, is_first=recorder.is_first_evaluation)
    if measured is None:
        return None
    metrics, rows = measured
    recorder.evaluation(recorder.progress.step, metrics, time.perf_counter() - began_s)
    best, step = attempt.cfg.best, recorder.progress.step
    score = metrics[best.metric] if lower_is_better(best.metric) else -metrics[best.metric]
    if recorder.progress.saw(score, best.metric, min_delta=attempt.cfg.early_stop.min_delta):
        failure = backend.world.first_rank_does(lambda: write(attempt, rows, step), attempt.watch.beat)
        if failure is not None:
            recorder.alarm(f"the predictions of this evaluation are not written: {failure}")
    return score


def write(attempt: Attempt, rows: np.ndarray, step: int) -> str | None:
    """Write predictions and tables of an evaluation. Gives why that failed, if it did: a full disk is no reason to stop
    training.
    """
    try:
        attempt.task.write_evaluation(rows, attempt.folder.folder, step=step)
    except (InputError, Unreachable, OSError) as error:
        return str(error)
    return None


def measure(
    attempt: Attempt, backend: Backend, engine: Engine, *, is_first: bool
) -> tuple[dict[str, float], np.ndarray] | None:
    """Metrics over the validation data on all ranks, and on rank 0 the statistics [examples, n] that they are from.
    None where only the graph is wanted: a batch for each rank, whose numbers mean nothing.
    """
    cfg, plan, task = attempt.cfg, attempt.plan, attempt.task
    batch_size = cfg.eval_batch_size or plan.micro_batch_size
    order = eval_order(task, engine, batch_size=batch_size, collects=cfg.collect_graphs)
    failure: Exception | None = None
    statistics = []  # left on the device until the end, so that it never waits for the host
    engine.model.eval()
    try:
        batches = Batches(
            task.eval_data(),
            order,
            batch_size=batch_size,
            num_workers=0,
            prefetch=1,
            pin_memory=False,
            most_together=None if task.buckets is None else 1,  # those drawn together have one shape
        )
        with torch.no_grad():
            for batch in backend.feed(batches):
                attempt.watch.phase("evaluate", is_start=is_first)  # the first one compiles
                if failure := failure_of([batch]):
                    break
                own = engine.evaluate(task.eval_statistics, batch["inputs"])
                if own is not None:
                    statistics.append(own)
    except InputError as error:
        failure = error
    engine.model.train()
    if backend.world.sum([failure is not None])[0]:
        backend.world.raise_failure(failure)
    rows = torch.cat(backend.read(statistics)).numpy() if statistics else None
    shares = backend.world.gather((engine.data_rank, rows))
    if cfg.collect_graphs:
        return None
    by_data_rank = {data_rank: share for data_rank, share in shares if share is not None}
    # On the host, in the order of the data: the same numbers on any number of ranks.
    merged = order.merged([by_data_rank[data_rank] for data_rank in sorted(by_data_rank)]) if shares else np.empty(0)
    return backend.world.first_rank_does(lambda: task.eval_metrics(merged), attempt.watch.beat), merged
