"""Compilation of a model's encoder or layers by TorchInductor, and a folder of compiled graphs for later machines.

Compiled by layers, equal layers are compiled once: ALBERT's shared layer, and the one graph that layers of other
encoders have in common. Shapes are static: each length of a batch has one graph for training and one for evaluation,
and more if layers are frozen. Every graph beyond those is named (`GraphBudget`), and code never silently runs
uncompiled: a graph that cannot be compiled is an error. With backend.compile=auto the first micro batch shows whether
it can, and all ranks run uncompiled if one cannot.
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
from train.parallel.graphs import GraphBudget, Graphs
from train.parallel.ranks import World
from train.system.folders import open_folder, sha256_bytes, sha256_json

logger = logging.getLogger("train")
DIGEST_BYTES = 64  # of the sha256 before the content, in hexadecimal digits
KEY_DIGITS = 20
FAULTS = (InputError, Unreachable, OSError)  # faults of the folder, without which a run can train
AUTO = "auto"
MOST_GRAPHS = 1024  # limit per function, after which torch silently runs uncompiled: the budget warns much earlier


class TorchCompiler:
    """Compiles a model in place, counts its graphs and times them."""

    def __init__(
        self,
        cfg: BackendConfig,
        facts: dict[str, Any],
        cache: KernelCache | None,
        *,
        compiles_with: str = "inductor",
        work: Workload | None = None,
    ) -> None:
        """Set torch up; `facts` identify compiled code of the same model, `compiles_with` names torch's compiler.

        `work`: the work by which backend.compile=auto decides.
        """
        self.compiles_with, self.work = compiles_with, work or Workload()
        self.what = cfg.compile
        self.facts, self.cache = facts, cache
        self.is_on = True  # until a first graph of backend.compile=auto fails
        self.is_trial = cfg.compile == AUTO  # until the first micro batch has shown that graphs can be compiled
        self.graphs_per_length = 0  # known with the model
        self.compiled, self.compile_s = 0, 0.0
        self.began_s: float | None = None
        self.budget = GraphBudget(lambda: self.compiled, is_fatal=False, hint="TORCH_LOGS=recompiles prints why")
        callback_handler.register_start_callback(self.begin)
        callback_handler.register_end_callback(self.end)
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = MOST_GRAPHS
        # torch would cut graphs at the sizes of DDP's buckets, into more graphs than are counted.
        torch._dynamo.config.optimize_ddp = False

    # ---- the model -------------------------------------------------------------------------------------------------

    def compile(
        self, model: Any, *, one_graph: bool = False, norms: torch.dtype | None = None, widens: bool = False
    ) -> None:
        """Have the model's encoder, or each of its layers, compiled when it is first called with a shape.

        `one_graph`: whether backend.compile=auto may make one graph of an encoder to relieve the host; `norms`: the
        dtype that norms return; `widens`: it is fp32 while products return 16 bits.
        """
        if self.what == AUTO:
            self.what = way_of(model, self.work, one_graph=one_graph)
            part = "the encoder as one graph" if self.what == "model" else "each layer"
            logger.info(
                f"backend.compile=auto compiles {part} (backend.compile={self.what}): about "
                f"{seconds_of(self.what, model):.0f} s for each length, of which this run has "
                + ("many micro batches" if self.work.passes == sys.maxsize else f"{self.work.passes:,} micro batches")
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
        """Return a loss of logits, compiled: one more graph for each length, in training."""
        self.graphs_per_length += 1
        return self.optimised(loss)

    def expect(self, lengths: int) -> None:
        """Set the number of graphs from the number of different lengths of batches."""
        self.budget.limit = self.graphs_per_length * lengths
        self.budget.start()

    def optimised(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = torch.compile(function, backend=self.build, fullgraph=True, dynamic=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            return (compiled if self.is_on else function)(*args, **kwargs)

        return run

    def try_first(self, micro_batch: Callable[[], object], world: World) -> None:
        """Run a first micro batch; if it fails on any rank, all continue uncompiled."""
        self.is_trial, cause = False, ""
        try:
            micro_batch()
        except Exception as error:  # of any part of the compiler; the cause is named
            inner = getattr(error, "inner_exception", error)  # torch wraps what a compiler raised
            cause = f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"
        cause = world.broadcast(next(filter(None, world.gather(cause)), ""))
        if cause:
            self.is_on = False
            logger.warning("backend.compile=auto: nothing is compiled, as the first graph failed: %s", cause)

    def build(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph; torch calls this for each."""
        self.compiled += 1
        built: Callable[..., Any] = lookup_backend(self.compiles_with)(graph, inputs)
        return built

    # ---- what it took ----------------------------------------------------------------------------------------------

    def begin(self, *_: object) -> None:
        self.began_s = time.perf_counter()

    def end(self, *_: object) -> None:
        """Add the time of one compilation. A graph has several: its backward pass is compiled at the first call."""
        if self.began_s is not None:
            self.compile_s += time.perf_counter() - self.began_s
        self.began_s = None

    def is_busy(self) -> bool:
        """Return whether a graph is being compiled. Any thread may ask."""
        return self.began_s is not None

    def graphs(self) -> Graphs:
        return Graphs(self.compiled, self.compile_s, 0)

    def close(self) -> None:
        self.budget.check()  # of the last evaluation
        callback_handler.remove_start_callback(self.begin)
        callback_handler.remove_end_callback(self.end)
        if self.cache is not None:
            self.cache.save()


class KernelCache:
    """A folder of files with the compiled graphs that runs have added, each after its sha256.

    The content is what torch.compiler.save_cache_artifacts writes. A file's name identifies model and graphs, so that
    nothing is written twice. The files are code: whoever may write to the folder may run code in the training
    (docs/security.md). Kernels of CPUs are compiled by the C++ compiler again.
    """

    def __init__(self, location: str, s3: S3Config, *, may_write: bool, must_write: bool = False) -> None:
        """`may_write` is set on one of the ranks that compile the same; `must_write`: fail if graphs cannot be kept."""
        self.folder, self.may_write, self.must_write = open_folder(location, s3), may_write, must_write
        self.prefix = ""  # of the files' names; known with the model
        self.kept: set[tuple[str, str]] = set()  # kind and key of each entry that is in a file

    def load(self, key: dict[str, Any]) -> None:
        """Load a model's graphs, found by `key`. It raises nothing, as other ranks would wait for this one."""
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
            logger.warning("kept graphs cannot be read and are compiled again: %s", error)

    def save(self) -> None:
        """Write the graphs that this process has compiled and no file holds."""
        # Call it once, at the end: torch loads only the last of several contents that it makes in one process.
        artifacts = torch.compiler.save_cache_artifacts() if self.may_write else None
        if artifacts is None or not (new := entries_of(artifacts[1]) - self.kept):
            return
        name = f"{self.prefix}{sha256_json(sorted(new))[:KEY_DIGITS]}.bin"
        try:
            self.folder.write(name, sha256_bytes(artifacts[0]).encode() + artifacts[0])
        except FAULTS as error:
            if self.must_write:
                raise
            logger.warning("compiled graphs are not kept for others: %s", error)  # the run itself is complete


def entries_of(info: Any) -> set[tuple[str, str]]:
    """Return kind and key of the entries that torch has saved or loaded."""
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}
