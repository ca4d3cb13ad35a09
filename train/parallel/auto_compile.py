"""The choice of `backend.compile=auto`: the encoder as one graph, each layer, or nothing.

It follows from the configuration and the model, so that all ranks choose alike. Figures are of one H100 in bf16 with
PyTorch 2.11 (benchmarks/README.md): compiled kernels of ALBERT-base take 0.67 of the uncompiled ones' time.
"""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.parallel.ranks import World

if TYPE_CHECKING:
    from train.models.network import Network

logger = logging.getLogger("train")
DEVICES = ("cuda",)  # devices on which compiling was seen to pay
LEAST_PASSES = 5000  # micro batches of one length: 3 minutes, of which 30 to 55 s are saved for 29 s of compiling
# The host sends the kernels of a compiled layer in 2.5 ms, forward and backward. A layer with this much work, in tokens
# times the square of the width, takes longer than that on an H100; smaller ones would leave it waiting.
LEAST_LAYER_WORK = 1.5e10
LAYER_COMPILE_S, MODEL_LAYER_COMPILE_S = (
    20.0,
    6.0,
)  # seconds per length: the part that equal layers share; each layer of a whole encoder


@dataclass(frozen=True)
class Workload:
    """The work of a rank that decides whether compiling is repaid."""

    passes: int = 0  # micro batches of each length; 0: nothing can be compiled
    tokens: int = 0  # of the longest micro batch


def is_wanted(compile: str, device: str, work: Workload) -> bool:
    """Return whether a run compiles: backend.compile=auto, a device of `DEVICES`, long enough; ranks agree later."""
    return compile == "auto" and device in DEVICES and work.passes >= LEAST_PASSES


def can_compile() -> bool:
    """Return whether this machine has Triton, and the C compiler that Triton needs."""
    from torch.utils._triton import has_triton  # late: it imports Triton

    wanted = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang"]
    return has_triton() and any(shutil.which(each) is not None for each in wanted)


def all_can(can: bool, world: World) -> bool:
    """Return whether all ranks can compile; a warning names how many cannot. All ranks call it."""
    blind = world.sum([not can])[0]
    if blind:
        logger.warning(
            f"backend.compile=auto: nothing is compiled, as {blind:g} of {world.size} ranks have no Triton or no C "
            "compiler (apt-get install gcc)"
        )
    return not blind


def way_of(model: Network, work: Workload, *, one_graph: bool) -> str:
    """Return the part of a model to compile: "model", its encoder as one graph, or "layers".

    `one_graph`: whether an encoder of small layers becomes one graph. That saves the host most of its work, but all
    gradients appear at its end, so that no exchange between machines overlaps with it. It is of no use where a step is
    a CUDA graph. A shared layer has its gradient at the end anyway.
    """
    is_shared = not model.separate_layers()
    is_small = work.tokens * model.network.config.hidden_size**2 < LEAST_LAYER_WORK
    return "model" if model.encoder is not None and (is_shared or (is_small and one_graph)) else "layers"


def seconds_of(way: str, model: Network) -> float:
    """Return about how many seconds the graphs of one length take to compile."""
    return LAYER_COMPILE_S if way == "layers" else MODEL_LAYER_COMPILE_S * model.network.config.num_hidden_layers
