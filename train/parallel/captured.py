"""Steps on one GPU as CUDA graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.

A step consists of a thousand kernels or more, which the host launches one by one. For small layers, launching a kernel
takes longer than running it. A CUDA graph records the kernels, and the host launches all of them in one call. Each
batch shape has its graph. The first steps with a shape run without one, because nothing may be compiled or tuned
during recording. The last of them also tests whether a step waits for the GPU, because such a step cannot be recorded.
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
from train.parallel.graphs import brief
from train.storage import imported

logger = logging.getLogger("train")
Inputs = dict[str, Tensor]
FIRST_CALLS = 3  # calls with a shape before its graph is recorded
MOST_GRAPHS = 64  # at most this many are kept; batches with other shapes run without a graph
WAITS = "called a synchronizing CUDA operation"  # from the text of PyTorch's warning


def captures_steps(
    cfg: BackendConfig, device: torch.device, precision: str, num_ranks: int
) -> bool:
    """Return whether steps of parallel=data run as CUDA graphs. Raises InputError if they must but cannot."""
    wanted = cfg.cuda_graphs is True
    check(
        device.type == "cuda" or not wanted,
        "backend.cuda_graphs=true needs a CUDA device; leave it out on a CPU",
    )
    check(
        num_ranks == 1 or not wanted,
        f"backend.cuda_graphs=true needs one rank, not {num_ranks}; leave it out",
    )
    is_scaled = precision == "fp16"
    check(
        not (is_scaled and wanted),
        "backend.cuda_graphs=true does not support backend.precision=fp16; leave it out",
    )
    is_possible = (
        device.type == "cuda"
        and num_ranks == 1
        and not is_scaled
        and not cfg.activation_checkpointing
    )
    # A graph repeats the Python numbers with which it was recorded. Imported user code may change its numbers in each
    # step, so graphs are opt-in for runs with such code.
    return is_possible and (wanted or (cfg.cuda_graphs is None and not imported.IMPORTED))


class Graphs:
    """The recorded CUDA graphs, by function and input shapes. They share one memory pool."""

    def __init__(self) -> None:
        self.calls = Counter[Any]()
        self.recorded: dict[Any, tuple[Inputs, Callable[[], object]]] = {}
        self.pool: Any = None
        self.is_on = True

    def run(self, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run `function` on `inputs`, or replay its graph. `function` must change tensors in place and return None."""
        shapes = tuple((name, value.shape, value.dtype) for name, value in inputs.items())
        key = (function.__name__, shapes)
        if key not in self.recorded:
            self.calls[key] += 1
            if (
                not self.is_on
                or self.calls[key] < FIRST_CALLS
                or len(self.recorded) >= MOST_GRAPHS
            ):
                return function(inputs)
            if self.calls[key] == FIRST_CALLS:
                return self.try_out(function, inputs)
            held = {name: value.clone() for name, value in inputs.items()}
            try:
                self.recorded[key] = held, self.record(function, held)
            except Exception as error:  # any operation may fail; recording runs no kernel, so the step can still run
                # ending the failed recording raises a second error
                cause = brief(error.__context__ or error)
                self.turn_off(f"one of their operations cannot be recorded ({cause})")
            if len(self.recorded) == MOST_GRAPHS:
                logger.info(
                    "backend.cuda_graphs: steps with other shapes than these %d run without",
                    MOST_GRAPHS,
                )
            # the error, and the memory of the failed recording, are freed by now
            if not self.is_on:
                return function(inputs)
        held, replay = self.recorded[key]
        for name, value in inputs.items():
            held[name].copy_(value, non_blocking=True)
        replay()
        return None

    def try_out(self, function: Callable[[Inputs], None], inputs: Inputs) -> None:
        """Run `function` without recording it. If it waits for the GPU, turn recording off."""
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
        """Drop all graphs. Call this when tensors that they use have new addresses."""
        self.calls.clear()
        self.recorded.clear()
        self.pool = None  # PyTorch frees it with the last graph

    def turn_off(self, reason: str) -> None:
        self.is_on = False
        self.recorded.clear()  # after a failure, `record` replaces the random state, but these graphs use the old one
        logger.warning("backend.cuda_graphs: steps run without CUDA graphs, because %s", reason)

    def record(self, function: Callable[[Inputs], None], inputs: Inputs) -> Callable[[], object]:
        """Record `function(inputs)`, and return a function that replays it in one call."""
        from train.models.network import with_unread_masks  # late: it imports transformers

        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        # "thread_local" lets other threads use the GPU during the recording: one of them page-locks the next batches.
        with with_unread_masks(given=False):  # `logits_of` knows better
            try:
                # The outer context restores the current stream, which a failed recording would not.
                with (
                    torch.cuda.stream(torch.cuda.current_stream()),
                    torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"),
                ):
                    function(inputs)
            except Exception:
                # the generator still belongs to the failed recording
                generator.graphsafe_set_state(before)
                raise
        return graph.replay
