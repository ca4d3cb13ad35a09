"""The rules by which `backend.compile=auto` chooses to compile the encoder as one graph, each layer, or nothing.

They depend only on the configuration and the model, so all ranks make the same choice. The figures were measured on an
H100 in bf16 with PyTorch 2.11 (benchmarks/README.md): ALBERT-base's kernels take 0.67 times as long when compiled.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.config import InputError
from train.parallel.ranks import World
from train.storage import caches

if TYPE_CHECKING:
    from train.models.network import Network

logger = logging.getLogger("train")
DEVICES = ("cuda",)  # devices on which compiling saved time in measurements
# Compiling pays if a run has at least this many micro batches of each length. Without compiling, they take 3 minutes.
# Compiling takes 29 s and makes them 30 to 55 s faster.
LEAST_PASSES = 5000
# The host takes 2.5 ms to launch the kernels of a compiled layer, forward and backward. On an H100, a layer with this
# much work (tokens times the squared hidden size) runs for longer than that. With less work, the GPU would wait.
LEAST_LAYER_WORK = 1.5e10
# Seconds to compile, for one batch length, the graph that equal layers share, and a whole encoder (per layer).
LAYER_COMPILE_S, MODEL_LAYER_COMPILE_S = 20.0, 6.0


@dataclass(frozen=True)
class Workload:
    """The work of one rank, from which backend.compile=auto decides whether compiling pays."""

    passes: int = 0  # micro batches of each length; with 0, nothing is compiled
    tokens: int = 0  # tokens in the longest micro batch


def is_wanted(compile: str, device: str, work: Workload) -> bool:
    """Return whether backend.compile=auto should compile: only on DEVICES, and only if the run is long enough."""
    return compile == "auto" and device in DEVICES and work.passes >= LEAST_PASSES


def compile_fault() -> str:
    """Return why this machine cannot compile; "" if it can. It needs Triton, a C compiler and folders for kernels."""
    from torch.utils._triton import has_triton  # late: it imports Triton

    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    if not has_triton() or all(shutil.which(each) is None for each in wanted):
        return "there is no Triton or no C compiler (apt-get install gcc)"
    try:
        caches.place_kernels()
    except InputError as error:
        return str(error)
    return ""


def all_can(fault: str, world: World) -> bool:
    """Return whether all ranks can compile; if not, warn why one cannot. All ranks must call this."""
    faults = [each for each in world.all_gather_object(fault) if each]
    if faults:
        text = f"backend.compile=auto: nothing is compiled, because on {len(faults)} of {world.size} ranks {faults[0]}"
        logger.warning(text)
    return not faults


def way_of(model: Network, work: Workload, *, one_graph: bool) -> str:
    """Return what to compile: "model" (the encoder as one graph) or "layers" (each layer).

    `one_graph` allows one graph for an encoder with small layers. This saves most of the host's work, but makes all
    gradients ready at the same time, so that no all-reduce between machines can overlap with the backward pass. It
    saves nothing if steps are CUDA graphs. An encoder with one shared layer always becomes one graph, because its
    gradient is complete only at the end anyway.
    """
    is_shared = not model.separate_layers()
    is_small = work.tokens * model.network.config.hidden_size**2 < LEAST_LAYER_WORK
    return (
        "model"
        if model.encoder is not None and (is_shared or (is_small and one_graph))
        else "layers"
    )


def seconds_of(way: str, model: Network) -> float:
    """Return an estimate of the seconds that compiling for one batch length takes."""
    return (
        LAYER_COMPILE_S
        if way == "layers"
        else MODEL_LAYER_COMPILE_S * model.network.config.num_hidden_layers
    )
