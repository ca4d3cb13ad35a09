"""Compilation of a model's encoder or layers by TorchInductor.

With backend.compile=layers, layers of the same kind share one graph, even if their weights differ. Shapes are static:
each batch length has one graph for training and one for evaluation, and more if layers are frozen. `GraphBudget`
reports any graph beyond these. A graph that cannot be compiled is an error, so no code silently runs uncompiled.

With backend.compile=auto, the first micro batch tries compilation. If it fails on any rank, all ranks run uncompiled.
Its rules depend only on the configuration and the model, so all ranks make the same choice. Their figures were measured
on an H100 in bf16 with PyTorch 2.11 (benchmarks/README.md): compiled kernels of ALBERT-base take 0.67 times as long.
Importing this module imports no compiler.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from train.config import BackendConfig, InputError, check
from train.parallel.graphs import GraphBudget, Graphs, brief
from train.parallel.ranks import World
from train.storage import caches

if TYPE_CHECKING:
    from train.models.network import Network

logger = logging.getLogger("train")
MOST_GRAPHS = 1024  # torch silently stops compiling a function beyond this limit; the budget warns much earlier
DEVICES = ("cuda",)  # devices on which compiling saved time in measurements
# Compiling pays if a run has at least this many micro batches of each length. Without compiling, they take 3 minutes.
# Compiling takes 29 s and makes them 30 to 55 s faster.
LEAST_PASSES = 5000
# The host takes 2.5 ms to launch the kernels of a compiled layer, forward and backward. On an H100, a layer with this
# much work (tokens times the squared hidden size) runs for longer than that. With less work, the GPU would wait.
LEAST_LAYER_WORK = 1.5e10


@dataclass(frozen=True)
class Workload:
    """The work of one rank, from which backend.compile=auto decides whether compiling pays."""

    passes: int = 0  # micro batches of each length; with 0, nothing is compiled
    tokens: int = 0  # tokens in the longest micro batch


class TorchCompiler:
    """A wrapper of torch.compile that compiles a model in place, counts the graphs, and times their compilation."""

    def __init__(self, cfg: BackendConfig, *, work: Workload) -> None:
        """Configure torch.compile. `work` is what backend.compile=auto bases its choice on."""
        import torch._dynamo.config
        from torch._dynamo.callback import callback_handler

        self.work = work
        self.what = cfg.compile
        self.is_on = True  # becomes False if the trial of backend.compile=auto fails
        self.is_trial = cfg.compile == "auto"  # becomes False when the first micro batch runs
        self.graphs_per_length = 0  # set by `compile` and `compile_loss`
        self.compiled = 0
        self.compile_s = 0.0
        self.began_s: float | None = None
        self.budget = GraphBudget(
            lambda: self.compiled,
            is_fatal=False,
            hint="TORCH_LOGS=recompiles prints why",
        )
        self.callbacks = callback_handler
        self.callbacks.register_start_callback(self.begin)
        self.callbacks.register_end_callback(self.end)
        torch._dynamo.config.recompile_limit = MOST_GRAPHS
        torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
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
            logger.info("backend.compile=auto chose backend.compile=%s", self.what)
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
            if self.is_on:
                return compiled(*args, **kwargs)
            return function(*args, **kwargs)

        return run

    def try_first(self, micro_batch: Callable[[], object], world: World) -> None:
        """Run the first micro batch. If it fails on any rank, all ranks continue uncompiled."""
        self.is_trial = False
        own = ""
        try:
            micro_batch()
        except (
            Exception
        ) as error:  # any part of the compiler may fail; the warning names the cause
            # torch wraps the compiler's exception.
            own = brief(getattr(error, "inner_exception", error))
        for cause in world.all_gather_object(own):
            if cause:
                self.is_on = False
                text = (
                    "backend.compile=auto: nothing is compiled, because the first graph failed: %s"
                )
                logger.warning(text, cause)
                return

    def build(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph. torch calls this once for each graph."""
        from torch._dynamo import lookup_backend

        self.compiled += 1
        built: Callable[..., Any] = lookup_backend("inductor")(graph, inputs)
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
        self.callbacks.remove_start_callback(self.begin)
        self.callbacks.remove_end_callback(self.end)


def open_compiler(
    cfg: BackendConfig, device: str, work: Workload, world: World
) -> TorchCompiler | None:
    """Return the compiler of this run; None if nothing is compiled. All ranks must call this once they have joined.

    Raises InputError if the machine cannot compile what backend.compile demands. With backend.compile=auto, no rank
    compiles if one cannot.
    """
    if cfg.compile == "none":
        return None
    if cfg.compile == "auto":
        if device not in DEVICES or work.passes < LEAST_PASSES:
            return None
        faults = [fault for fault in world.all_gather_object(compile_fault()) if fault]
        if faults:
            logger.warning(
                "backend.compile=auto: nothing is compiled, because on %d of %d ranks %s",
                len(faults),
                world.size,
                faults[0],
            )
            return None
    else:
        world.agree(lambda: check_can_compile(cfg, device))
    return TorchCompiler(cfg, work=work)


def check_can_compile(cfg: BackendConfig, device: str) -> None:
    """Raise InputError if this machine cannot compile. Sets the folders of kernels."""
    cxx = os.environ.get("CXX", "g++")
    check(
        device != "cpu" or shutil.which(cxx) is not None,
        f"backend.compile={cfg.compile} needs a C++ compiler for a CPU, and there is no {cxx} here: apt-get "
        "install g++, set CXX, or leave backend.compile out",
    )
    caches.place_kernels()


def compile_fault() -> str:
    """Return why this machine cannot compile; "" if it can. It needs Triton, a C compiler and folders for kernels."""
    from torch.utils._triton import has_triton  # late: it imports Triton

    compilers = ["gcc", "clang"]
    if os.environ.get("CC"):
        compilers = [os.environ["CC"]]
    if not has_triton() or not any(map(shutil.which, compilers)):
        return "there is no Triton or no C compiler (apt-get install gcc)"
    try:
        caches.place_kernels()
    except InputError as error:
        return str(error)
    return ""


def way_of(model: Network, work: Workload, *, one_graph: bool) -> str:
    """Return what to compile: "model" (the encoder as one graph) or "layers" (each layer).

    `one_graph` allows one graph for an encoder with small layers. This saves most of the host's work, but makes all
    gradients ready at the same time, so that no all-reduce between machines can overlap with the backward pass. It
    saves nothing if steps are CUDA graphs. An encoder with one shared layer always becomes one graph, because its
    gradient is complete only at the end anyway.
    """
    if model.encoder is None:
        return "layers"
    is_shared = not model.separate_layers()
    is_small = work.tokens * model.network.config.hidden_size**2 < LEAST_LAYER_WORK
    if is_shared or (is_small and one_graph):
        return "model"
    return "layers"
