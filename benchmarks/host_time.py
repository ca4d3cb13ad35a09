"""The host's time for a step of BERT-base (bf16, not compiled, 32 x 128), recorded or, with --plain, kernel by kernel.

    torchrun --nproc-per-node=8 benchmarks/host_time.py [--plain]

Prints the median of the host's milliseconds. Each step begins when the device has nothing left to do, so no step waits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from train.config import BackendConfig, DataParallelConfig, OptimConfig
from train.models.heads import PaddedEncoder, logits_of
from train.parallel.backend import Backend
from train.parallel.captured import FIRST_CALLS
from train.parallel.ddp import DDP
from train.parallel.engines import Engine, build_engine

SHAPE = (32, 128)
FIRST = (
    FIRST_CALLS + 3
)  # steps before those that are timed; the last of them is the first to be only replayed
STEPS = 30
MOST_MS = 3  # if recorded


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = logits_of(model, inputs).float()
    return nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum")


class Steps:
    """Training steps of BERT-base on rows of zeros."""

    def __init__(self, backend: Backend) -> None:
        config = AutoConfig.for_model("bert")
        model = PaddedEncoder(
            AutoModelForSequenceClassification.from_config(config, trust_remote_code=False)
        )
        self.engine: Engine = build_engine(
            DataParallelConfig(), OptimConfig(), backend, model, loss_of, accumulation=1
        )
        zeros = torch.zeros(SHAPE, dtype=torch.long, device=backend.device)
        self.inputs = {"input_ids": zeros, "token_type_ids": zeros, "labels": zeros[:, 0]}

    def run(self) -> float:
        """Take a step. Returns the host's seconds."""
        began_s = time.perf_counter()
        batch: Any = {"inputs": self.inputs}
        self.engine.begin_step(float(SHAPE[0]), 1e-5)
        self.engine.forward_backward(batch, is_last=True)
        self.engine.optimizer_step(self.engine.reduce_and_clip())
        return time.perf_counter() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plain", action="store_true")
    is_recorded = not parser.parse_args().plain
    backend = DDP(BackendConfig(precision="bf16", cuda_graphs=is_recorded))
    steps = Steps(backend)
    taken_s = []
    for number in range(FIRST + STEPS):
        torch.cuda.synchronize()
        step_s = steps.run()
        if number >= FIRST:
            taken_s.append(step_s)
    if steps.engine.failure:
        raise steps.engine.failure
    host_ms = statistics.median(taken_s) * 1000
    is_good = host_ms < MOST_MS or not is_recorded
    if backend.world.rank == 0:
        word = "ok " if is_good else "BAD"
        print(f"{word} host {host_ms:.2f} ms a step, recorded: {is_recorded}", flush=True)
    del steps
    backend.close()
    return int(not is_good)


if __name__ == "__main__":
    sys.exit(main())
