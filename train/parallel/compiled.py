"""Compilation of a model's encoder or layers by TorchInductor, and a folder that keeps compiled graphs for other runs.

With backend.compile=layers, layers of the same kind share one graph, even if their weights differ. Shapes are static:
each batch length has one graph for training and one for evaluation, and more if layers are frozen. `GraphBudget`
reports any graph beyond these. A graph that cannot be compiled is an error, so no code silently runs uncompiled. With
backend.compile=auto, the first micro batch tries compilation. If it fails on any rank, all ranks run uncompiled.
"""

from __future__ import annotations

import logging
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config
from torch._dynamo import lookup_backend
from torch._dynamo.callback import callback_handler

from train.config import BackendConfig, InputError, S3Config, Unreachable
from train.parallel.auto_compile import Workload, seconds_of, way_of
from train.parallel.graphs import GraphBudget, Graphs, brief
from train.parallel.ranks import World
from train.system.folders import open_folder, sha256_bytes, sha256_json

logger = logging.getLogger("train")
DIGEST_BYTES = 64  # length of the hexadecimal sha256 before the content
KEY_DIGITS = 20
FAULTS = (InputError, Unreachable, OSError)  # errors of the compile cache; a run can train without it
MOST_GRAPHS = 1024  # torch silently stops compiling a function beyond this limit; the budget warns much earlier


class TorchCompiler:
    """A wrapper of torch.compile that compiles a model in place, counts the graphs, and times their compilation."""

    def __init__(
        self,
        cfg: BackendConfig,
        facts: dict[str, Any],
        cache: KernelCache | None,
        *,
        compiles_with: str = "inductor",
        work: Workload | None = None,
    ) -> None:
        """Configure torch.compile, whose backend is `compiles_with`.

        `facts`: the device and precision, on which a model's compiled code depends. `work`: the workload on which
        backend.compile=auto bases its choice.
        """
        self.compiles_with, self.work = compiles_with, work or Workload()
        self.what = cfg.compile
        self.facts, self.cache = facts, cache
        self.is_on = True  # becomes False if the trial of backend.compile=auto fails
        self.is_trial = cfg.compile == "auto"  # becomes False when the first micro batch runs
        self.graphs_per_length = 0  # set by `compile` and `compile_loss`
        self.compiled, self.compile_s = 0, 0.0
        self.began_s: float | None = None
        self.budget = GraphBudget(lambda: self.compiled, is_fatal=False, hint="TORCH_LOGS=recompiles prints why")
        callback_handler.register_start_callback(self.begin)
        callback_handler.register_end_callback(self.end)
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
        # With optimize_ddp, torch would split graphs at DDP's buckets, which would make more graphs than expected.
        torch._dynamo.config.optimize_ddp = False

    # ---- the model -------------------------------------------------------------------------------------------------

    def compile(
        self, model: Any, *, one_graph: bool = False, norms: torch.dtype | None = None, widens: bool = False
    ) -> None:
        """Wrap the encoder or each layer, so that its first call with a new shape compiles it.

        `one_graph` allows backend.compile=auto to compile an encoder as one graph, which is less work for the host.
        `norms`: the dtype of norms; None if autocast chooses it. `widens`: norms return fp32, matrix products 16 bits.
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
        if self.cache is not None:
            weights = {name: list(weight.shape) for name, weight in model.named_parameters()}
            kind = {"compile": self.what, "norms": str(norms)}
            self.cache.load({**self.facts, **kind, "weights": weights})
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
        except Exception as error:  # any part of the compiler may fail; the warning names the cause
            cause = brief(getattr(error, "inner_exception", error))  # torch wraps the compiler's exception
        cause = world.broadcast(next(filter(None, world.gather(cause)), ""))
        if cause:
            self.is_on = False
            logger.warning("backend.compile=auto: nothing is compiled, because the first graph failed: %s", cause)

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
        if self.cache is not None:
            self.cache.save()


class KernelCache:
    """A folder of compiled graphs, to which each run adds a file with its new graphs.

    A file is a sha256 followed by the output of torch.compiler.save_cache_artifacts. Its name identifies the model and
    the graphs, so that the same file is not written twice. The files are code: anyone who can write to the folder can
    run code in the training processes (docs/security.md). On CPUs, each run still compiles the C++ kernels.
    """

    def __init__(self, location: str, s3: S3Config, *, may_write: bool, must_write: bool = False) -> None:
        """Open the folder. Of ranks with equal graphs, only one `may_write`. If `must_write`, failed writes raise."""
        self.folder, self.may_write, self.must_write = open_folder(location, s3), may_write, must_write
        self.prefix = ""  # the start of the file names, set by `load`
        self.kept: set[tuple[str, str]] = set()  # kind and key of each entry that is in a file

    def load(self, key: dict[str, Any]) -> None:
        """Load the graphs of the model that `key` identifies. Errors only warn, since other ranks may be waiting."""
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        self.prefix = f"torch_compile_{sha256_json({**versions, **key})[:KEY_DIGITS]}_"
        try:
            for name in self.folder.names(self.prefix):
                content = self.folder.read(name)
                digest, entries = content[:DIGEST_BYTES].decode(errors="replace"), content[DIGEST_BYTES:]
                if digest != sha256_bytes(entries):
                    logger.warning("%s/%s is damaged; its graphs are compiled again", self.folder.location, name)
                elif info := torch.compiler.load_cache_artifacts(entries):
                    self.kept |= entries_of(info)
        except FAULTS as error:
            logger.warning("the compile cache cannot be read, so graphs are compiled again: %s", error)

    def save(self) -> None:
        """Write the graphs that this process has compiled, except those that are already in a file."""
        # This is called once, at the end: if a process saves artifacts several times, torch can load only the last.
        artifacts = torch.compiler.save_cache_artifacts() if self.may_write else None
        if artifacts is None or not (new := entries_of(artifacts[1]) - self.kept):
            return
        name = f"{self.prefix}{sha256_json(sorted(new))[:KEY_DIGITS]}.bin"
        try:
            self.folder.write(name, sha256_bytes(artifacts[0]).encode() + artifacts[0])
        except FAULTS as error:
            if self.must_write:
                raise
            logger.warning("compiled graphs are not kept for other runs: %s", error)  # the run itself is complete


def entries_of(info: Any) -> set[tuple[str, str]]:
    """Return the kind and key of each entry that torch has saved or loaded."""
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}
