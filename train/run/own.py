"""The user's own tasks, optimizers and schedules: the tables in an `--import` file are added to the program's tables.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from train.config import check
from train.parallel.optim import OPTIMIZERS, SCHEDULES, OptimizerSpec
from train.run.help import add_option
from train.storage import imported
from train.tasks import TASKS, TaskSpec

# For each table name: the program's table, the type of its entries, and the key that chooses an entry.
TABLES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "TASKS": (TASKS, TaskSpec, "task"),
    "OPTIMIZERS": (OPTIMIZERS, OptimizerSpec, "optim"),
    "SCHEDULES": (SCHEDULES, Callable, "optim.schedule"),
}


def take(given: str) -> None:
    """Import a file and add its entries. Raises InputError if it has no table, or an entry is invalid or not new."""
    module = imported.load(given)
    own = {name: vars(module)[name] for name in TABLES if name in vars(module)}
    check(
        bool(own),
        f"{imported.FLAG} {given}: it has no table; define one of {', '.join(TABLES)}, as {{name: entry}}",
    )
    for table, entries in own.items():
        known, kind, key = TABLES[table]
        where = f"{imported.FLAG} {given}: {table}"
        check(isinstance(entries, dict), f"{where} must be a table, as {{name: entry}}")
        for name, entry in entries.items():
            if known.get(name) is entry:  # this file was imported before
                continue
            check(
                isinstance(entry, kind),
                f"{where}: {name} must be of type {kind.__name__}, not {entry!r}",
            )
            check(name not in known, f"{where}: {key}={name} exists already; choose another name")
            if not callable(entry):
                check_name(entry, key, name, where)
                add_option(key, name, entry.settings)
            known[name] = entry


def check_name(spec: Any, group: str, name: str, where: str) -> None:
    """Raise InputError unless the settings of a task or an optimizer have its name as `kind` or `name`."""
    field = "kind" if group == "task" else "name"
    named = getattr(spec.settings, field, None)
    check(
        named == name,
        f"{where}: {spec.settings.__name__} must have {field}: str = {name!r}, not {named!r}",
    )
