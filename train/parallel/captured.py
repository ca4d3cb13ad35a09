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
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor

from train.config import check
from train.parallel.data import DataParallel
from train.parallel.optimizers import set_learning_rate

if TYPE_CHECKING:
    from train.data.batches.loader import Batch
    from train.parallel.ddp import DDP
    from train.parallel.engine import State
    from train.parallel.pieces import Tensors

logger = logging.getLogger("train")
Inputs = dict[str, Tensor]
FIRST_CALLS = 3  # calls of a shape before its graph is recorded
MOST_GRAPHS = 64  # batches of further shapes run kernel by kernel
WAITS = "called a synchronizing CUDA operation"  # PyTorch's warning


class Captured(DataParallel):
    """Data parallelism of a single rank whose steps are CUDA graphs.

    With one micro batch a step, the whole step is one graph, which `forward_backward` runs. Otherwise there is one for
    a micro batch and one for the update. Weights, moments, counts and the learning rate stay where they are in memory.
    """

    backend: DDP

    def __init__(self, *args: Any, accumulation: int, **options: Any) -> None:
        super().__init__(*args, accumulation=accumulation, **options)
        check(
            all(isinstance(group["lr"], Tensor) for group in self.optimizer.param_groups),
            "backend.cuda_graphs=true: the rate of this optimizer is no tensor on the device; leave it out",
        )
        self.is_whole = accumulation == 1
        self.graphs = Graphs()
        self.norm = torch.zeros((), device=self.backend.device)
        self.sync.begin(0.0)

    def begin_step(self, count: float, lr: float) -> None:
        set_learning_rate(self.optimizer, lr)
        self.sync.count.copy_(torch.tensor([float(count)]), non_blocking=True)

    def forward_backward(self, batch: Batch, *, is_last: bool) -> None:
        self.backend.try_graphs(lambda: self._gradients(batch))
        with self.backend.work.timed():
            self.graphs.run(self._step if self.is_whole else self._micro_batch, batch["inputs"])

    def reduce_and_clip(self) -> Tensor:
        if not self.is_whole:
            self.graphs.run(self._update, {})
        return self.norm

    def optimizer_step(self, norm: Tensor) -> None:
        self.backend.end_step()  # the update is done

    def _step(self, inputs: Inputs) -> None:
        self.optimizer.zero_grad(set_to_none=True)  # a recording that failed leaves some
        self._micro_batch(inputs)
        self._update({})

    def _micro_batch(self, inputs: Inputs) -> None:
        with self.backend.autocast():
            loss_sum = self.loss(self.model, inputs)
        loss_sum.backward()
        self.loss_sum += loss_sum.detach()

    def _update(self, _: Inputs) -> None:
        norm = self.clip(self.sync.reduce())
        self.norm.copy_(norm)
        # Graphs of micro batches add to the same gradients, which therefore stay where they are.
        self.backend.update(self.optimizer, norm, keeps_gradients=not self.is_whole)

    def load(self, model: Tensors, optimizer: State) -> None:
        super().load(model, optimizer)
        self.graphs = Graphs()  # the moments may have moved


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

    def turn_off(self, reason: str) -> None:
        self.is_on = False
        self.recorded.clear()  # after a failed recording they would draw from a generator that nothing else reads
        logger.warning("backend.cuda_graphs: steps are sent kernel by kernel, as %s", reason)

    def record(self, function: Callable[[Inputs], None], inputs: Inputs) -> Callable[[], object]:
        """Return a function that runs `function(inputs)` in one call."""
        from transformers.utils import import_utils  # late: it takes a second

        self.pool = self.pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        # While a stream is captured, transformers makes masks that hide nothing, lest it waits for the GPU. `try_out`
        # has seen that it does not wait. Other threads may use the GPU meanwhile: one locks pages for the next batches.
        with patch.object(import_utils, "is_cuda_stream_capturing", lambda: False, create=True):
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
