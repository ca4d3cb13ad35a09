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
from train.tasks.spec import Metric, Task, TaskSpec

__all__ = ["TASKS", "Metric", "Task", "TaskSpec", "best_metric", "build_task", "class_of", "metric_of", "spec_of"]

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
    check(type(cfg) is spec.settings, f"task.kind={cfg.kind} does not match the settings of task; use task={cfg.kind}")
    return spec


def metric_of(kind: str, name: str, splits: Iterable[str] = ()) -> Metric:
    """Return a task's metric. `name` may begin with a split. An undeclared metric has higher_is_better=None."""
    declared = {metric.name: metric for metric in TASKS[kind].metrics} if kind in TASKS else {}
    names = [name, *(name.removeprefix(f"{split}_") for split in splits)]
    return next((replace(declared[each], name=name) for each in names if each in declared), Metric(name, None))


def best_metric(cfg: TrainConfig) -> Metric:
    """Return the metric that best.metric names."""
    splits = cfg.data.more_validation if isinstance(cfg.data, RecordsConfig) else ()
    return metric_of(cfg.task.kind, cfg.best.metric, splits)


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
