"""A comparison of pipeline schedules: how long a rank waits, and how long it would wait in theory.

    python -m benchmarks.parallel [--stages 2] [--rounds 9] [--layers 8] [--hidden 128] [--rows 16] [--seq-len 128]

Each stage is a process with one thread and needs a free core, because a stage without one delays the others. All
contestants run in the same processes and take turns: a round is one step of each. The model is a BERT without dropout,
its rows are random, and all contestants have the same global batch, whatever their number of micro batches.

The table shows the measured bubble of a rank next to the theoretical one, (p - 1) / (v m + p - 1) for p stages, m micro
batches and v parts per rank (https://arxiv.org/abs/2104.04473), and the maximum of the bytes that autograd saves on a
rank next to the prediction of the configuration's `held`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import harness
from benchmarks.harness import answer, table, torchrun
from benchmarks.pretraining import Kept, train_step
from train.config import BackendConfig, ModelConfig, OptimConfig, PipelineConfig
from train.models.encoder import build_masked_lm
from train.parallel.ddp import DDP
from train.parallel.engines import build_engine

VOCAB_SIZE, PREDICTIONS = 2000, 19
WARM_UP = 2  # rounds that are not counted
HEAD = ("schedule", "micro batches", "step, ms", "bubble", "theory", "activations, MB", "expected")


def contestants(stages: int) -> list[PipelineConfig]:
    return [
        PipelineConfig(stages=stages, micro_batches=number, schedule=schedule)
        for schedule in ("gpipe", "1f1b", "interleaved")
        for number in (stages, 4 * stages)
    ]


def rank_main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    backend = DDP(BackendConfig(device="cpu", precision="fp32"))

    def loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(inputs["input_ids"], inputs["token_type_ids"], inputs["positions"])
        return F.cross_entropy(logits.flatten(0, 1).float(), inputs["labels"].flatten(), reduction="sum")

    sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden, "num_layers": options.layers}
    cfg = ModelConfig(architecture="bert", num_heads=4, hidden_dropout=0.0, attention_dropout=0.0, **sizes)

    def build_model() -> Any:
        torch.manual_seed(0)
        model = build_masked_lm(cfg, vocab_size=VOCAB_SIZE, pad_id=0, seq_len=options.seq_len)
        model.head_share = PREDICTIONS / options.seq_len
        return model

    engines: list[Any] = [
        build_engine(split, OptimConfig(), copy.copy(backend), build_model(), loss, accumulation=1)
        for split in contestants(backend.world.size)
    ]
    batch, taken = make_batch(options), []
    for _ in range(WARM_UP + options.rounds):
        own_round = []
        for engine in engines:
            backend.world.barrier()
            backend.work.take_s(), backend.span.take_s()
            began_s = time.perf_counter()
            train_step(engine, batch)
            backend.world.barrier()
            step_s = time.perf_counter() - began_s
            own_round.append((step_s, 1 - backend.work.take_s() / backend.span.take_s()))
        taken.append(own_round)
    kept_bytes = []
    for engine in engines:
        with Kept(engine.model.parameters()) as kept:
            train_step(engine, batch)
        kept_bytes.append(kept.peak_bytes)
    of_ranks = backend.world.gather({"rounds": taken[WARM_UP:], "kept_bytes": kept_bytes})
    if backend.world.rank == 0:
        whole = build_model()
        with Kept(whole.parameters()) as kept:
            loss(whole, batch["inputs"])
        print(json.dumps({"ranks": of_ranks, "whole_bytes": kept.peak_bytes}))
    backend.world.barrier()


def make_batch(options: argparse.Namespace) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB_SIZE, (options.rows, options.seq_len), generator=generator)
    positions = torch.arange(PREDICTIONS).expand(options.rows, -1) * (options.seq_len // PREDICTIONS)
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "positions": positions.contiguous()}
    labels = ids.gather(1, positions)
    return {"inputs": {**inputs, "labels": labels}, "count": positions.numel(), "tokens": ids.numel()}


def main() -> None:
    options = harness.parser(__doc__, stages=2, rounds=9, layers=8, hidden=128, rows=16, seq_len=128).parse_args()
    if "WORLD_SIZE" in os.environ:
        rank_main(options)
        return
    words = torchrun(options.stages, "benchmarks.parallel", *sys.argv[1:])
    result = answer(*words, OMP_NUM_THREADS="1")
    ranks = [own["rounds"] for own in result["ranks"]]
    sizes = f"{options.layers} layers of {options.hidden}, {options.rows} x {options.seq_len} tokens"
    print(f"{options.stages} stages, {sizes}\n")
    rows = []
    for index, cfg in enumerate(contestants(options.stages)):
        bubbles = [statistics.mean(steps[index][1] for steps in of_ranks) for of_ranks in zip(*ranks, strict=True)]
        held, most_bytes = cfg.held(options.stages), max(own["kept_bytes"][index] for own in result["ranks"])
        step_ms = f"{1000 * statistics.median(steps[index][0] for steps in ranks[0]):.0f}"
        expected = result["whole_bytes"] * held.layers * held.activations
        shares = (f"{share:.1%}" for share in (statistics.median(bubbles), cfg.bubble))
        sizes = (f"{size / 1e6:.1f}" for size in (most_bytes, expected))
        rows.append((cfg.schedule, str(cfg.micro_batches), step_ms, *shares, *sizes))
    print(table(HEAD, rows))


if __name__ == "__main__":
    main()
