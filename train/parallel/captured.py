"""Steps of one GPU as CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.

A host sends a step's kernels one after another, a thousand or more; for small layers that takes longer than the GPU
needs to run them. A CUDA graph is a recording of these calls, which the host sends in one call. Each shape of a batch
has a graph. The first steps of a shape run kernel by kernel, as the recording may not compile or tune anything; the
last of them shows whether a step waits for the GPU, which no recording can.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train.config import BackendConfig, check
from train.system import imported

logger = logging.getLogger("train")
Inputs = dict[str, Tensor]
FIRST_CALLS = 3  # calls of a shape before its graph is recorded
MOST_GRAPHS = 64  # batches of further shapes run kernel by kernel
WAITS = "called a synchronizing CUDA operation"  # PyTorch's warning


def captures_steps(cfg: BackendConfig, device: torch.device, precision: str, num_ranks: int) -> bool:
    """Return whether the steps of parallel=data run as CUDA graphs.

    Raises InputError if cfg asks for it and they cannot.
    """
    wanted = cfg.cuda_graphs is True
    check(device.type == "cuda" or not wanted, "backend.cuda_graphs=true needs a CUDA device; leave it out on a CPU")
    check(num_ranks == 1 or not wanted, f"backend.cuda_graphs=true is for one rank, not {num_ranks}; leave it out")
    is_scaled = precision == "fp16"
    check(not (is_scaled and wanted), "backend.cuda_graphs=true is not for backend.precision=fp16; leave it out")
    is_possible = device.type == "cuda" and num_ranks == 1 and not is_scaled and not cfg.activation_checkpointing
    # Numbers of Python that change from step to step would stay as they were recorded: users' code may have some.
    return is_possible and (wanted or (cfg.cuda_graphs is None and not imported.IMPORTED))


class Graphs:
    """The recorded calls, by function and by shapes of its inputs. Their memory is shared."""

    def __init__(self) -> None:
        self.calls = Counter[Any]()
        self.recorded: dict[Any, tuple[Inputs, Callable[[], object]]] = {}
        self.pool: Any = None
        self.is_on = True

    def run(self, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run `function`, which changes tensors in place and returns nothing, on `inputs`."""
        shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        key = (function.__name__, shapes)
        if key not in self.recorded:
            self.calls[key] += 1
            if not self.is_on or self.calls[key] < FIRST_CALLS or len(self.recorded) >= MOST_GRAPHS:
                return function(inputs)
            if self.calls[key] == FIRST_CALLS:
                return self.try_out(function, inputs)
            held = {name: value.clone() for name, value in inputs.items()}
            try:
                self.recorded[key] = held, self.record(function, held)
            except Exception as error:  # of any operation: a recording runs nothing, so the step can still be taken
                first = error.__context__ or error  # the recording's end fails after it
                cause = f"{type(first).__name__}: {str(first).strip().partition(chr(10))[0]}"
                self.turn_off(f"one of their operations cannot be recorded ({cause})")
                return function(inputs)
        held, replay = self.recorded[key]
        for name, value in inputs.items():
            held[name].copy_(value, non_blocking=True)
        replay()
        return None

    def try_out(self, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run `function`, and record nothing from now on if it waits for the GPU."""
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
            self.turn_off(f"they wait for the GPU at {waits[0].filename}:{waits[0].lineno}")

    def forget(self) -> None:
        """Drop what is recorded: tensors that it uses have moved."""
        self.calls.clear()
        self.recorded.clear()
        self.pool = None  # PyTorch frees it with the last graph

    def turn_off(self, reason: str) -> None:
        self.is_on = False
        self.recorded.clear()  # after a failed recording they would draw from a generator that nothing else reads
        logger.warning("backend.cuda_graphs: steps are sent kernel by kernel, as %s", reason)

    def record(self, function: Callable[[Inputs], None], inputs: Inputs) -> Callable[[], object]:
        """Return a function that runs `function(inputs)` in one call."""
        from train.models.network import with_usual_masks  # late: it imports transformers

        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        # Other threads may use the GPU meanwhile: one locks pages for the next batches.
        with with_usual_masks():
            try:
                # A recording that fails would leave its stream as the current one.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
                ):
                    function(inputs)
            except Exception:
                generator.graphsafe_set_state(before)  # otherwise it would still count for the recording
                raise
        return graph.replay
