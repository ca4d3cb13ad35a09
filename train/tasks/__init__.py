"""What is learnt: the table of tasks.

A task is a package of this folder with a SPEC and its line in TASKS. The table is read to compose a configuration,
without torch: the functions of the spec import the modules that need it.
"""

from __future__ import annotations

from train.config import TaskConfig, TrainConfig, check, check_choice
from train.tasks import classify, mlm, ner, qa
from train.tasks.spec import Task, TaskSpec

__all__ = ["TASKS", "Task", "TaskSpec", "build_task", "spec_of"]

TASKS: dict[str, TaskSpec] = {
    "mlm": mlm.SPEC,
    "classify": classify.SPEC,
    "qa": qa.SPEC,
    "ner": ner.SPEC,
}


def spec_of(cfg: TaskConfig) -> TaskSpec:
    """The entry of a task. InputError if there is none, or the settings are another task's."""
    check_choice("task.kind", cfg.kind, tuple(TASKS))
    spec = TASKS[cfg.kind]
    check(
        type(cfg) is spec.settings, f"task.kind={cfg.kind} does not go with the settings beside it; use task={cfg.kind}"
    )
    return spec


def build_task(cfg: TrainConfig) -> Task:
    """The task of a run, its data opened and checked. InputError for data that the task cannot learn from."""
    task = spec_of(cfg.task).build(cfg)
    check(
        cfg.best.metric in task.metrics,
        f"best.metric={cfg.best.metric} must be one of this task's metrics: {', '.join(task.metrics)}",
    )
    return task
