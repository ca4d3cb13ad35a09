"""Steps on GPUs as CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.

A step consists of a thousand kernels or more, which the host launches one by one. For small layers, launching a kernel
takes longer than running it. A CUDA graph records the kernels, and the host launches all of them in one call. Each
batch shape has its graph. The first steps with a shape run without one, because nothing may be compiled or tuned
during recording. The last of them also tests whether a step waits for the GPU, because such a step cannot be recorded.
Before a graph is used, its replay must equal the plain step (`proof`). A shape whose step waits, cannot be recorded or
replays wrongly runs without a graph; the others keep theirs.

No graph sends anything to other ranks. A backward pass that sends gradients is therefore a row of graphs, and the host
sends between them what the graph before has made. Each rank proves its own graphs, and sends nothing meanwhile.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from train.config import BackendConfig, InputError, check, plural
from train.machine import versions
from train.parallel.graphs import brief
from train.parallel.proof import are_finite, listed
from train.storage import imported

if TYPE_CHECKING:
    from train.parallel.proof import Before, Proof, Results

logger = logging.getLogger("train")
Inputs = dict[str, Tensor]
FIRST_CALLS = 3  # calls with a shape before its graph is recorded
MOST_GRAPHS = 64  # at most this many are kept; batches with other shapes run without a graph
MOST_DRAWN = 2**32  # random numbers of a graph, in PyTorch before this release:
COUNTS_IN_64_BITS = (2, 10)
# Lets other threads use the GPU: one of them page-locks the next batches.
ERROR_MODE = "thread_local"
WAITS = "called a synchronizing CUDA operation"  # from the text of PyTorch's warning


def captures_steps(cfg: BackendConfig, device: torch.device, precision: str) -> bool:
    """Return whether steps of parallel=data run as CUDA graphs. Raises InputError if they must but cannot."""
    wanted = cfg.cuda_graphs is True
    check(
        device.type == "cuda" or not wanted,
        "backend.cuda_graphs=true needs a CUDA device; leave it out on a CPU",
    )
    is_scaled = precision == "fp16"
    check(
        not (is_scaled and wanted),
        "backend.cuda_graphs=true does not support backend.precision=fp16; leave it out",
    )
    is_possible = device.type == "cuda" and not is_scaled and not cfg.activation_checkpointing
    # A graph repeats the Python numbers with which it was recorded. Imported user code may change its numbers in each
    # step, so graphs are opt-in for runs with such code.
    return is_possible and (wanted or (cfg.cuda_graphs is None and not imported.IMPORTED))


def too_random(
    model: Any, inputs: Inputs, *, precision: str, version: str = torch.__version__
) -> str:
    """Return why PyTorch cannot record a step with so many random numbers; "" if it can.

    Before release 2.10, a CUDA graph counts them in 32 bits (https://github.com/pytorch/pytorch/pull/164515).
    """
    reads_all = precision == "fp32" or "attention_mask" in inputs
    ids = inputs.get("input_ids")
    is_old = versions.release(version) < COUNTS_IN_64_BITS
    if not (is_old and reads_all and ids is not None and hasattr(model, "drawn_numbers")):
        return ""
    drawn = model.drawn_numbers(*ids.shape)
    if drawn < MOST_DRAWN:
        return ""
    return (
        f"attention's dropout draws {drawn:,} random numbers, and a graph of PyTorch {version} counts up to "
        f"{MOST_DRAWN:,}; lower micro_batch_size, or use PyTorch 2.10"
    )


class Graphs:
    """The recorded CUDA graphs, by function and input shapes. They share one memory pool.

    A key is a function and the shapes of its inputs. `run` does this with its calls:

        before FIRST_CALLS    runs the function
        FIRST_CALLS           runs it, and tests whether it waits for the GPU (`try_out`)
        the next finite one   runs it, records it and proves its graph (`add`)
        later ones            replay the graph, which is in `recorded`

    A key in `plain` only runs the function: it waits for the GPU, cannot be recorded, or was replayed wrongly. `forget`
    and a failed recording let the other keys begin at call 1. After `give_up`, all keys only run the function.
    """

    def __init__(self, proof: Proof, *, must: bool = False) -> None:
        """Store `proof`, which compares replays with plain steps. `must`: a step without a graph ends the run."""
        self.proof = proof
        self.must = must
        self.calls = Counter[Any]()
        self.recorded: dict[Any, Recording] = {}
        self.plain = set[Any]()  # keys that run without a graph for good
        self.pool: Any = None
        self.recorder: Recorder | None = None  # while a step is recorded
        self.is_on = True
        self.num_reported = 0

    def run(self, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run `function` on `inputs`, or replay its graph. `function` must change tensors in place and return None."""
        shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        key = (function.__name__, shapes)
        if key in self.recorded:
            self.recorded[key].run(inputs)
            return
        self.calls[key] += 1
        calls = self.calls[key]
        is_full = len(self.recorded) >= MOST_GRAPHS
        if not self.is_on or key in self.plain or is_full or calls < FIRST_CALLS:
            function(inputs)
        elif calls == FIRST_CALLS:
            self.try_out(key, function, inputs)
        else:
            with self.proof.engine.sync.held():
                self.add(key, function, inputs)

    def outside(self, action: Callable[[], None]) -> None:
        """Run `action` outside of all graphs: now, or whenever the step that is being recorded is replayed."""
        if self.recorder is None:
            action()
        else:
            self.recorder.cut(action)

    def try_out(self, key: Any, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run `function` without recording it. If it waits for the GPU, it is never recorded."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                function(inputs)
            finally:
                torch.cuda.set_sync_debug_mode(before)
        waits = [each for each in caught if WAITS in str(each.message)]
        for each in caught:
            if each not in waits and "Synchronization debug mode" not in str(each.message):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        if waits:
            self.leave(key, f"it waits for the GPU at {waits[0].filename}:{waits[0].lineno}")

    def add(self, key: Any, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run `function` on `inputs`, and keep its graph if a replay equals the plain run.

        Each run begins from the same state. The last one counts:

            plain, not finite                               the next batch will tell: not a number equals no other
            plain, failed recording, plain again            no graph
            plain, recording, wrong replay, plain again     no graph
            plain, recording, equal replay                  the graph is kept
        """
        before = self.proof.begin()
        function(inputs)
        plain = self.proof.results()
        if are_finite(plain):
            self.proof.rewind(before)
            fault = self.try_record(key, function, inputs)
            fault = fault or self.try_replay(key, inputs, before=before, plain=plain)
            if fault:
                self.proof.rewind(before)
                self.leave(key, fault)
                function(inputs)
        self.proof.end(before)

    def try_record(self, key: Any, function: Callable[[Inputs], None], inputs: Inputs) -> str:
        """Record `function`. Returns why it cannot be recorded; "" if it was.

        When this returns, the error and the memory of a failed recording are freed.
        """
        engine = self.proof.engine
        excess = too_random(engine.model, inputs, precision=engine.backend.precision)
        if excess:
            return excess
        held = {name: value.clone() for name, value in inputs.items()}
        try:
            with self.proof.other_numbers():
                replay = self.record(function, held)
        # any operation may fail; recording runs no kernel, so the step can still run
        except Exception as error:
            # ending the failed recording raises a second error
            cause = brief(error.__context__ or error)
        else:
            self.recorded[key] = Recording(held, replay)
            return ""
        # The other graphs use the random state that `record` has replaced: they are recorded anew.
        self.forget()
        return f"an operation cannot be recorded ({cause})"

    def try_replay(self, key: Any, inputs: Inputs, *, before: Before, plain: Results) -> str:
        """Replay a new graph. Drops it and returns the difference if it leaves other results than `plain`; else ""."""
        self.recorded[key].run(inputs)
        fault = self.proof.fault(before, plain)
        if fault:
            del self.recorded[key]
        elif len(self.recorded) == MOST_GRAPHS:
            logger.info(
                "backend.cuda_graphs: steps with other shapes than these %d run without",
                MOST_GRAPHS,
            )
        return fault

    def forget(self) -> None:
        """Drop all graphs. Call this when tensors that they use have new addresses."""
        self.calls.clear()
        self.recorded.clear()
        self.pool = None  # PyTorch frees it with the last graph

    def leave(self, key: Any, reason: str) -> None:
        """Run a shape without a graph from now on. If it must have one, the next vote ends the run on all ranks."""
        self.plain.add(key)
        name, shapes = key
        what = name.strip("_").replace("_", " ")
        if shapes:
            what += f" {list(shapes[0][1])}"
        if self.must:
            self.proof.engine.failure = InputError(
                f"backend.cuda_graphs=true, but the {what} cannot run as a CUDA graph: {reason}; leave it out to run "
                "such steps without"
            )
        logger.warning("backend.cuda_graphs: the %s runs without a CUDA graph: %s", what, reason)

    @property
    def can_give_up(self) -> bool:
        """True if there are graphs, and the run may continue without them."""
        return self.pool is not None and not self.must

    def give_up(self) -> None:
        """Drop all graphs for good, because the device has too little memory for them."""
        self.is_on = False
        self.forget()
        logger.warning(
            "backend.cuda_graphs: the device ran out of memory; steps run without CUDA graphs from here on"
        )

    def report(self) -> None:
        """Log once that the replays of new graphs equal plain steps."""
        if len(self.recorded) > self.num_reported:
            self.num_reported = len(self.recorded)
            logger.info(
                "backend.cuda_graphs: %s recorded; replays equal plain steps (%s)",
                plural(self.num_reported, "graph"),
                listed(self.proof.worst),
            )

    def record(self, function: Callable[[Inputs], None], inputs: Inputs) -> Callable[[], object]:
        """Record `function(inputs)`, and return a function that replays it."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        before = generator.clone_state()
        recorder = Recorder(self.pool)
        self.recorder = recorder
        try:
            # The outer context restores the current stream, which a failed recording would not.
            with torch.cuda.stream(torch.cuda.current_stream()), recorder.capture:
                function(inputs)
        except Exception:
            # the generator still belongs to the failed recording
            generator.graphsafe_set_state(before)
            release(device, self.pool)
            raise
        finally:
            self.recorder = None
        recorder.parts.append(recorder.capture.cuda_graph.replay)
        return recorder.replay


class Recorder:
    """A row of CUDA graphs in one memory pool, with actions of the host between them.

    The graphs may use each other's memory, because they are always replayed one after another.
    """

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.parts: list[Callable[[], object]] = []
        first = torch.cuda.CUDAGraph()
        self.capture = torch.cuda.graph(first, pool=pool, capture_error_mode=ERROR_MODE)

    def cut(self, action: Callable[[], None]) -> None:
        """End a graph and begin the next one. Call this in the thread in which the recording began."""
        graph = self.capture.cuda_graph
        graph.capture_end()
        self.parts += [graph.replay, action]
        self.capture.cuda_graph = torch.cuda.CUDAGraph()
        self.capture.cuda_graph.capture_begin(pool=self.pool, capture_error_mode=ERROR_MODE)

    def replay(self) -> None:
        for part in self.parts:
            part()


@dataclass(frozen=True)
class Recording:
    """A recorded step: the call that replays it, and the tensors that it reads."""

    held: Inputs
    replay: Callable[[], object]

    def run(self, inputs: Inputs) -> None:
        for name, value in inputs.items():
            self.held[name].copy_(value, non_blocking=True)
        self.replay()


def release(device: int, pool: Any) -> None:
    """Free a pool's share of a failed recording, as torch._inductor.cudagraph_trees does.

    If an operation was not allowed, PyTorch raises before it ends the use of the pool, and would never free it.
    """
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # the recording has ended, so its graph frees the memory
    torch._C._cuda_releasePool(device, pool)
