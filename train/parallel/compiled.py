"""Compilation of a model's encoder or layers by TorchInductor.

With backend.compile=layers, layers of the same kind share one graph, even if their weights differ. Shapes are static:
each batch length has one graph for training and one for evaluation, and more if layers are frozen. `GraphBudget`
reports any graph beyond these. A graph that cannot be compiled is an error, so no code silently runs uncompiled. With
backend.compile=auto, the first micro batch tries compilation. If it fails on any rank, all ranks run uncompiled.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config
from torch._dynamo import lookup_backend
from torch._dynamo.callback import callback_handler

from train.config import BackendConfig
from train.parallel.auto_compile import Workload, seconds_of, way_of
from train.parallel.graphs import GraphBudget, Graphs, brief
from train.parallel.ranks import World

logger = logging.getLogger("train")
MOST_GRAPHS = 1024  # torch silently stops compiling a function beyond this limit; the budget warns much earlier


class TorchCompiler:
    """A wrapper of torch.compile that compiles a model in place, counts the graphs, and times their compilation."""

    def __init__(
        self,
        cfg: BackendConfig,
        *,
        compiles_with: str = "inductor",
        work: Workload | None = None,
    ) -> None:
        """Configure torch.compile, whose backend is `compiles_with`.

        `work` is the workload on which backend.compile=auto bases its choice.
        """
        self.compiles_with, self.work = compiles_with, work or Workload()
        self.what = cfg.compile
        self.is_on = True  # becomes False if the trial of backend.compile=auto fails
        self.is_trial = cfg.compile == "auto"  # becomes False when the first micro batch runs
        self.graphs_per_length = 0  # set by `compile` and `compile_loss`
        self.compiled, self.compile_s = 0, 0.0
        self.began_s: float | None = None
        self.budget = GraphBudget(
            lambda: self.compiled, is_fatal=False, hint="TORCH_LOGS=recompiles prints why"
        )
        callback_handler.register_start_callback(self.begin)
        callback_handler.register_end_callback(self.end)
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = (
            MOST_GRAPHS
        )
        # With optimize_ddp, torch would split graphs at DDP's buckets, which would make more graphs than expected.
        torch._dynamo.config.optimize_ddp = False

    # ---- the model -------------------------------------------------------------------------------------------------

    def compile(self, model: Any, *, one_graph: bool = False, widens: bool = False) -> None:
        """Wrap the encoder or each layer, so that its first call with a new shape compiles it.

        `one_graph` allows backend.compile=auto to compile an encoder as one graph, which is less work for the host.
        `widens`: norms return fp32, matrix products 16 bits.
        """
        if self.what == "auto":
            self.what = way_of(model, self.work, one_graph=one_graph)
            part = "the encoder as one graph" if self.what == "model" else "each layer"
            logger.info(
                f"backend.compile=auto compiles {part} (backend.compile={self.what}): about "
                f"{seconds_of(self.what, model):.0f} s for each batch length, and there are "
                + ("many" if self.work.passes == sys.maxsize else f"{self.work.passes:,}")
                + " micro batches of each"
            )
        if self.what == "model":
            self.graphs_per_length += model.compile_encoder(self.optimised)
        else:
            self.graphs_per_length += model.compile_layers(self.optimised, widens=widens)

    def compile_loss(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled loss function of logits. It adds one training graph for each batch length."""
        self.graphs_per_length += 1
        return self.optimised(loss)

    def expect(self, lengths: int) -> None:
        """Begin to count graphs. The budget is the number needed for `lengths` batch lengths."""
        self.budget.limit = self.graphs_per_length * lengths
        self.budget.start()

    def optimised(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function, backend=self.build, fullgraph=True, dynamic=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            return (compiled if self.is_on else function)(*args, **kwargs)

        return run

    def try_first(self, micro_batch: Callable[[], object], world: World) -> None:
        """Run the first micro batch. If it fails on any rank, all ranks continue uncompiled."""
        self.is_trial, cause = False, ""
        try:
            micro_batch()
        except (
            Exception
        ) as error:  # any part of the compiler may fail; the warning names the cause
            # torch wraps the compiler's exception
            cause = brief(getattr(error, "inner_exception", error))
        cause = world.broadcast(next(filter(None, world.gather(cause)), ""))
        if cause:
            self.is_on = False
            logger.warning(
                "backend.compile=auto: nothing is compiled, because the first graph failed: %s",
                cause,
            )

    def build(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph. torch calls this once for each graph."""
        self.compiled += 1
        built: Callable[..., Any] = lookup_backend(self.compiles_with)(graph, inputs)
        return built

    # ---- counts and times ------------------------------------------------------------------------------------------

    def begin(self, *_: object) -> None:
        self.began_s = time.perf_counter()

    def end(self, *_: object) -> None:
        """Add the time of one compilation. A graph needs several: its backward pass is compiled on its first run."""
        if self.began_s is not None:
            self.compile_s += time.perf_counter() - self.began_s
        self.began_s = None

    def is_busy(self) -> bool:
        """Return whether a graph is being compiled. Any thread may call it."""
        return self.began_s is not None

    def graphs(self) -> Graphs:
        return Graphs(self.compiled, self.compile_s, 0)

    def close(self) -> None:
        self.budget.check()  # the last evaluation may have compiled graphs
        callback_handler.remove_start_callback(self.begin)
        callback_handler.remove_end_callback(self.end)
