"""Schedules of a pipeline beside one another: how long a rank waits, against what theory allows.

    python -m benchmarks.parallel [--stages 2] [--rounds 9] [--layers 8] [--hidden 128] [--rows 16] [--seq-len 128]

One process of one thread for each stage; there should be a core for each, or what they wait for is the core. All
contestants live in the same processes and take turns: a round is a step of each. The model is a BERT without dropout,
its rows are random, and the whole batch is the same for all contestants, however many micro batches it is cut into.

A rank's bubble is the share of the schedule's time in which it computes neither a forward nor a backward pass. It is
printed beside that of theory, (p - 1) / (v m + p - 1) for p stages, m micro batches and v parts on each rank
(https://arxiv.org/abs/2104.04473), and the tokens a second beside those of the first contestant, as the median ratio of
one round. Theory has equal stages and nothing to send.

The activations are the most bytes that autograd keeps for the backward pass at once, on the fullest rank, in a step of
their own; beside them what `held` of the configuration expects of those of the model on one rank.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from train.backend.ddp import DDP
from train.config import BackendConfig, ModelConfig, OptimConfig, PipelineConfig
from train.models.encoder import build_masked_lm
from train.parallel import build_engine

ROOT = Path(__file__).parent.parent
VOCAB_SIZE, PREDICTIONS = 2000, 19
WARM_UP = 2  # rounds that are not counted


def contestants(stages: int) -> list[tuple[str, int]]:
    """Schedule and micro batches."""
    return [
        ("gpipe", stages),
        ("gpipe", 4 * stages),
        ("1f1b", stages),
        ("1f1b", 4 * stages),
        ("interleaved", stages),
        ("interleaved", 4 * stages),
    ]


class Kept:
    """The bytes that autograd keeps, but for weights, and the most of them at once."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.users: Counter[int] = Counter()
        self.num_bytes, self.peak_bytes = 0, 0

    def __enter__(self) -> Kept:
        self.hooks = torch.autograd.graph.saved_tensors_hooks(partial(Saved, self), lambda saved: saved.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.__exit__()


class Saved:
    """A tensor for as long as autograd keeps it; several may share their memory."""

    def __init__(self, kept: Kept, tensor: torch.Tensor) -> None:
        self.kept, self.tensor, self.key = kept, tensor, tensor.untyped_storage().data_ptr()
        kept.users[self.key] += 1
        if kept.users[self.key] == 1 and self.key not in kept.weights:
            kept.num_bytes += tensor.untyped_storage().nbytes()
            kept.peak_bytes = max(kept.peak_bytes, kept.num_bytes)

    def __del__(self) -> None:
        self.kept.users[self.key] -= 1
        if not self.kept.users[self.key] and self.key not in self.kept.weights:
            self.kept.num_bytes -= self.tensor.untyped_storage().nbytes()


def rank_main(options: argparse.Namespace) -> None:
    """One stage."""
    torch.set_num_threads(1)
    backend = DDP(BackendConfig(device="cpu", precision="fp32"))
    stages = backend.world.size

    def loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
        return F.cross_entropy(logits.flatten(0, 1).float(), inputs["labels"].flatten(), reduction="sum")

    sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "num_layers": options.layers}
    cfg = ModelConfig(architecture="bert", num_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **sizes)
    engines: list[Any] = []
    taken = []
    for schedule, micro_batches in contestants(stages):
        torch.manual_seed(0)
        model = build_masked_lm(cfg, vocab_size=VOCAB_SIZE, pad_id=0, seq_len=options.seq_len)
        model.head_share = PREDICTIONS / options.seq_len
        split = PipelineConfig(stages=stages, micro_batches=micro_batches, schedule=schedule)
        own = copy.copy(backend)
        engines.append(build_engine(split, OptimConfig(), own, model, loss, accumulation=1))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB_SIZE, (options.rows, options.seq_len), generator=generator)
    positions = torch.arange(PREDICTIONS).expand(options.rows, -1) * (options.seq_len // PREDICTIONS)
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "positions": positions.contiguous()}
    batch: Any = {
        "inputs": {**inputs, "labels": ids.gather(1, positions)},
        "count": positions.numel(),
        "tokens": ids.numel(),
    }
    for _ in range(WARM_UP + options.rounds):
        own_round = []
        for engine in engines:
            backend.world.barrier()
            backend.work.take_s(), backend.span.take_s()
            began_s = time.perf_counter()
            step(engine, batch)
            backend.world.barrier()
            step_s = time.perf_counter() - began_s
            own_round.append((step_s, 1 - backend.work.take_s() / backend.span.take_s()))
        taken.append(own_round)
    own = {"rounds": taken[WARM_UP:], "kept_bytes": [kept_bytes(engine, batch) for engine in engines]}
    shares = backend.world.gather(own)
    if backend.world.rank == 0:
        torch.manual_seed(0)
        model = build_masked_lm(cfg, vocab_size=VOCAB_SIZE, pad_id=0, seq_len=options.seq_len)
        with Kept(model.parameters()) as kept:
            loss(model, batch["inputs"])
        print(json.dumps({"ranks": shares, "whole_bytes": kept.peak_bytes}))
    backend.world.barrier()


def kept_bytes(engine: Any, batch: Any) -> int:
    with Kept(engine.model.parameters()) as kept:
        step(engine, batch)
    return kept.peak_bytes


def step(engine: Any, batch: Any) -> None:
    engine.begin_step(batch["count"], 1e-4)
    engine.forward_backward(batch, is_last=True)
    engine.optimizer_step(engine.reduce_and_clip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"stages": 2, "rounds": 9, "layers": 8, "hidden": 128, "rows": 16, "seq-len": 128}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        rank_main(options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["-m", "torch.distributed.run", f"--nproc-per-node={options.stages}", f"--master-port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words, "-m", "benchmarks.parallel", *sys.argv[1:]]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    ranks = [own["rounds"] for own in result["ranks"]]
    rounds = range(options.rounds)
    sizes = f"{options.layers} layers of {options.hidden}, {options.rows} x {options.seq_len} tokens"
    print(f"{options.stages} stages, {sizes}")
    print(
        "schedule      micro batches  step ms  bubble  theory  activations MB  theory  tokens/s beside the first "
        "(quartiles)"
    )
    for index, (schedule, micro_batches) in enumerate(contestants(options.stages)):
        step_s = [ranks[0][number][index][0] for number in rounds]
        bubbles = [statistics.mean(own[number][index][1] for own in ranks) for number in rounds]
        ratios = [ranks[0][number][0][0] / ranks[0][number][index][0] for number in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cfg = PipelineConfig(stages=options.stages, micro_batches=micro_batches, schedule=schedule)
        held, most_bytes = cfg.held(options.stages), max(own["kept_bytes"][index] for own in result["ranks"])
        print(
            f"{schedule:12} {micro_batches:14} {1000 * statistics.median(step_s):8.0f} "
            f"{statistics.median(bubbles):7.1%} {cfg.bubble:7.1%} {most_bytes / 1e6:15.1f} "
            f"{result['whole_bytes'] * held.layers * held.activations / 1e6:7.1f}  "
            f"{middle:.2f} ({low:.2f} - {high:.2f})"
        )


if __name__ == "__main__":
    main()
