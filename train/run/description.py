"""The description of a run, at its start: in its folder and in the log."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import nn

from train.config import Plan, check, plural
from train.machine.memory import total_memory_bytes
from train.models.memory_estimate import GIB, advice, state_gib
from train.models.model_sizes import shape_of_model
from train.tasks import Task

if TYPE_CHECKING:
    from train.parallel.backends import Backend
    from train.run.attempt import Attempt

logger = logging.getLogger("train")


def describe(attempt: Attempt, backend: Backend, model: nn.Module) -> None:
    """Describe the run in its folder and the log. Raises InputError if a rank does not see the folder."""
    task = attempt.task
    folder = attempt.folder
    world = backend.world
    facts = {  # the resolved configuration, for environment.json
        "plan": asdict(attempt.plan),
        "seq_len": task.seq_len,
        "parameters": sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        "device": backend.device_name,
        "precision": backend.precision,
        "backend": backend.name,
        "compile": backend.compiles,
        "world_size": world.size,
        "threads": torch.get_num_threads(),
        **task.facts,
    }
    memory = memory_note(attempt, backend, model)

    def write() -> None:
        folder.describe(attempt.cfg, attempt.identity, facts, task.details)
        task.describe_model(model, folder.folder)

    if attempt.saves and not folder.is_remote:
        num_blind = world.sum([not attempt.sees_owner()])[0]
        where = f"run_dir={folder.location} of rank 0; it must be a shared folder"
        check(num_blind == 0, f"{num_blind:g} ranks do not see {where}")
    attempt.is_described = True
    world.run_on_rank0(write)
    for remark in (*task.remarks, *batch_remarks(attempt.plan, task, backend), memory):
        if remark:
            logger.info(remark)


def batch_remarks(plan: Plan, task: Task, backend: Backend) -> list[str]:
    """Return lines on the batches, the data, and the rows that each epoch leaves out."""
    world = backend.world
    each = "rank"
    if plan.replicas != world.size:
        each = f"group of {world.size // plan.replicas} ranks"
    sizes = f"{plan.micro_batch_size} x {plan.accumulation} per {each}"
    ranks = f"{world.num_machines} x {world.local_size} ranks"
    device = f"{backend.name} on {backend.device_name}, {backend.precision}"
    steps = f"{plan.global_batch_size} sequences per step ({sizes})"
    rows = f"{task.train_rows:,} rows for training, {task.eval_rows:,} for validation"
    remarks = [f"{device}: {ranks}, {steps}", rows, task.summary()]
    left = task.train_rows % plan.global_batch_size
    if left:
        remarks.append(
            f"an epoch is {plan.steps_per_epoch:,} steps: {left:,} of {task.train_rows:,} rows do not fill a batch and "
            "are left out; each epoch leaves out different rows"
        )
    return remarks


def memory_note(attempt: Attempt, backend: Backend, model: nn.Module) -> str | None:
    """Return a note on the memory that a rank's model state needs; None for a model whose sizes are unknown.

    On CPUs, raises InputError if this machine has less memory than its ranks need.
    """
    cfg = attempt.cfg
    world = backend.world
    shape = shape_of_model(model)
    if shape is None:
        return None
    needed_gib = state_gib(
        cfg,
        shape,
        world_size=world.size,
        ranks_per_machine=world.local_size,
        precision=backend.precision,
    )
    note = f"weights, gradients and moments take {needed_gib:.3g} GiB of memory per rank"
    if backend.monitor_kind == "cpu":
        limit_gib = total_memory_bytes() / GIB
        check(
            world.local_size * needed_gib < limit_gib,
            f"{note}; this machine or container has too little, {limit_gib:,.3g} GiB for "
            f"{plural(world.local_size, 'rank')}; {advice(cfg, world_size=world.size)}",
        )
    return note
