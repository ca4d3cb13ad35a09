"""The table of tasks.

Each task is a package in this folder that defines SPEC, which is listed in TASKS. Reading the table does not import
torch, so configurations can be composed without it. The module that SPEC names needs torch, and is imported only if a
run has the task.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

from train.config import RecordsConfig, TaskConfig, TrainConfig, check, check_choice
from train.tasks import classify, mlm, multilabel, ner, qa, regress
from train.tasks.spec import LOSS, Metric, Task, TaskSpec

__all__ = [
    "TASKS",
    "Metric",
    "Task",
    "TaskSpec",
    "best_metric",
    "build_task",
    "class_of",
    "scores_of",
    "spec_of",
]

TASKS: dict[str, TaskSpec] = {
    "mlm": mlm.SPEC,
    "classify": classify.SPEC,
    "qa": qa.SPEC,
    "multilabel": multilabel.SPEC,
    "regress": regress.SPEC,
    "ner": ner.SPEC,
}


def spec_of(cfg: TaskConfig) -> TaskSpec:
    """Return a task's spec. Raises InputError if there is none, or if the settings belong to another task."""
    check_choice("task.kind", cfg.kind, tuple(TASKS))
    spec = TASKS[cfg.kind]
    check(
        type(cfg) is spec.settings,
        f"task.kind={cfg.kind} does not match the settings of task; use task={cfg.kind}",
    )
    return spec


def scores_of(kind: str, splits: Iterable[str] = ()) -> dict[str, Metric]:
    """Return the metrics that a task declares, by name, also with the prefixes of further validation `splits`.

    Everything else in an evaluation is no score. Of an unknown task, only the loss is known.
    """
    declared = TASKS[kind].metrics if kind in TASKS else (LOSS,)
    prefixes = ("", *(f"{split}_" for split in splits))
    return {
        f"{prefix}{metric.name}": replace(metric, name=prefix + metric.name)
        for prefix in prefixes
        for metric in declared
    }


def best_metric(cfg: TrainConfig) -> Metric:
    """Return the metric that best.metric names."""
    splits = cfg.data.more_validation if isinstance(cfg.data, RecordsConfig) else ()
    return scores_of(cfg.task.kind, splits).get(cfg.best.metric, Metric(cfg.best.metric, None))


def class_of(spec: TaskSpec) -> Any:
    """Return the class of a task. This imports torch."""
    module, _, name = spec.module.partition(":")
    return getattr(import_module(module), name or "TASK")


def build_task(cfg: TrainConfig) -> Task:
    """Return a run's task after opening and checking its data. Raises InputError if the data is unsuitable."""
    task: Task = class_of(spec_of(cfg.task)).of_run(cfg)
    check(
        cfg.best.metric in task.metrics,
        f"best.metric={cfg.best.metric} must be one of this task's metrics: {', '.join(task.metrics)}",
    )
    check(
        best_metric(cfg).sign != 0,
        f"best.metric={cfg.best.metric} has no direction: declare in the task's SPEC whether higher is better",
    )
    return task
