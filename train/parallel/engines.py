"""The ways to split a model and a step over ranks: a table of engines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from train.config import OptimConfig, ParallelConfig, check_choice
from train.parallel.engine import Engine, LossFunction, State, Statistics

if TYPE_CHECKING:
    from train.parallel.backends import Backend

__all__ = ["ENGINES", "Engine", "LossFunction", "State", "Statistics", "build_engine"]


def build_engine(
    cfg: ParallelConfig,
    optim: OptimConfig,
    backend: Backend,
    model: nn.Module,
    loss: LossFunction,
    *,
    accumulation: int,
    lengths: int = 1,
) -> Engine:
    """Return the engine for these settings.

    `accumulation` is the count of micro batches per step and rank, `lengths` the count of their shapes.
    """
    check_choice("parallel.name", cfg.name, tuple(ENGINES))
    module: Any = import_module(ENGINES[cfg.name])  # a run imports only the engine that it uses
    engine: Engine = module.build(cfg, optim, backend, model, loss, accumulation=accumulation, lengths=lengths)
    return engine


ENGINES = {  # the module of each engine, which has a function `build`
    "data": "train.parallel.data",
    "fsdp": "train.parallel.fsdp",
    "pipeline": "train.parallel.pipeline",
}
