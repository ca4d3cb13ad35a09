"""The tasks: what a run learns. `table` lists them, and `spec` says what each of them defines."""

from train.tasks.spec import LOSS, Metric, Task, TaskSpec
from train.tasks.table import TASKS, best_metric, build_task, class_of, scores_of, spec_of

__all__ = [
    "LOSS",
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
