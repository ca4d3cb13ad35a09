"""CUDA graphs as far as a CPU can have them: operations are recorded, and replayed without the Python code around them.

As on a GPU, a replay repeats the numbers of the recording and uses the memory of the recording; recording computes
nothing; and what waits for the device cannot be recorded. Memory that was allocated in a recording is NaN when a replay
begins, because on a GPU other graphs use the same pool.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.parallel import captured

# operations that return when the device has computed a value
WAITS = ("_local_scalar_dense", "equal", "nonzero")


def tensors_in(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Tape:
    """A CUDA graph."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]] = []
        self.before: dict[
            int, tuple[Any, Any]
        ] = {}  # memory from before the recording, and what it held
        self.made: dict[int, Any] = {}  # memory that was allocated in the recording

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute a part of the recording."""
        given = {place(each): each.untyped_storage() for each in tensors_in((args, kwargs))}
        for key, memory in given.items():
            if key not in self.made and key not in self.before:
                self.before[key] = memory, memory.clone()
        result = func(*args, **kwargs)
        fresh = [
            (n, each) for n, each in enumerate(tensors_in(result)) if place(each) not in given
        ]
        self.made |= {place(each): each.untyped_storage() for _, each in fresh}
        self.calls.append((func, args, kwargs, fresh))
        return result

    def capture_begin(self, **_: Any) -> None:
        self.random = torch.get_rng_state()
        Recording.tape = self

    def capture_end(self) -> None:
        Recording.tape = None
        torch.set_rng_state(self.random)
        for memory, held in self.before.values():
            memory.copy_(held)

    @torch.no_grad()
    def replay(self) -> None:
        for memory in self.made.values():
            memory.fill_(255)  # NaN, if it is read as floats
        for func, args, kwargs, fresh in self.calls:
            results = tensors_in(func(*args, **kwargs))
            for number, tensor in fresh:
                tensor.copy_(results[number])


class Recording(TorchDispatchMode):
    """What `torch.cuda.graph` returns. The tape may change within the context, and within a backward pass."""

    tape: Tape | None = None

    def __init__(self, tape: Tape, **_: Any) -> None:
        super().__init__()
        self.cuda_graph = tape

    def __enter__(self) -> Any:
        self.cuda_graph.capture_begin()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.cuda_graph.capture_end()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if Recording.tape is None:  # between two graphs
            return func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in WAITS:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing")
        return Recording.tape.call(func, args, kwargs or {})


class Watch(TorchDispatchMode):
    """Warn about operations that wait for the device, as PyTorch's debug mode does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            warnings.warn(captured.WAITS, stacklevel=2)
        return func(*args, **(kwargs or {}))


def put_tapes(patch: pytest.MonkeyPatch) -> None:
    """Replace CUDA graphs by tapes."""
    watching = ExitStack()
    generator = SimpleNamespace(
        clone_state=torch.get_rng_state, graphsafe_set_state=torch.set_rng_state
    )
    for name, value in {
        "CUDAGraph": Tape,
        "graph": Recording,
        "graph_pool_handle": object,
        "default_generators": [generator],
        "current_device": lambda: 0,
        "current_stream": lambda: None,
        "stream": lambda _: nullcontext(),
        "is_current_stream_capturing": lambda: Recording.tape is not None,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda mode: (
            watching.enter_context(Watch()) if mode else watching.close()
        ),
    }.items():
        patch.setattr(torch.cuda, name, value)
