"""Our loop and a tutorial-style script, both with PyTorch/XLA on the CPU, measured from the first step on.

    python -m benchmarks.xla [--rounds 3] [--steps 30] [--shape base|demo]

"naive" is a new script with the structure of AWS's sentiment fine-tuning sample; "ours" is `train.loop.run`. Both have
the same weights, sequences, masks and batch size, which the first loss confirms, and run in fp32 in one process. Every
run is a separate process, because a process compiles a graph only once. A run waits for the device only after the
fourth and the last step, so that a host that works ahead keeps its advantage.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import harness, pretraining
from benchmarks.harness import Result, answer, measure_table, ratios
from train.config import TrainConfig

VARIANTS = ("naive", "ours")
SKIPPED = 4  # the first steps, which compile graphs; later ones are steady
SAME_LOSS = 1e-4  # nats; adding float32 numbers in another order changes a loss of about 8 by 1e-6
MEASURES = {
    "graphs": "graphs compiled from the first step on",
    "setup_graphs": "graphs compiled before the first step",
    "compile_s": "compiling from the first step on, s",
    "step_s": "steady step, s",
    "executions": "executions per step",
}
COMPARED = ("compile_s", "step_s")
SHAPES = {
    "base": replace(pretraining.SHAPES["base"], vocab_size=2000, batch=2),
    "demo": pretraining.SHAPES["demo"],
}


# ---- one run, in a separate process --------------------------------------------------------------------------------


Reading = dict[str, float]


def take_reading() -> Reading:
    """Return the time, and PyTorch/XLA's counts since the process was started."""
    import torch_xla.debug.metrics as metrics

    graphs, compile_ns, _ = metrics.metric_data("CompileTime") or (0, 0.0, ())
    executions, _, _ = metrics.metric_data("ExecuteTime") or (0, 0.0, ())
    return {
        "step_s": time.perf_counter(),
        "graphs": graphs,
        "compile_s": compile_ns / 1e9,
        "executions": executions,
    }


class Meter:
    """Readings before the first step, after the skipped steps, and after the last step."""

    def __init__(self, num_steps: int, flush: Callable[[], None] = lambda: None) -> None:
        self.num_steps, self.flush, self.step = num_steps, flush, 0
        self.readings: list[Reading] = []

    def begin(self) -> None:
        if self.step in (0, SKIPPED):
            self.readings.append(take_reading())

    def end(self) -> None:
        import torch_xla.core.xla_model as xm

        self.step += 1
        if self.step in (SKIPPED, self.num_steps):
            self.flush()
            xm.wait_device_ops()
        if self.step == self.num_steps:
            self.readings.append(take_reading())

    def result(self) -> Result:
        first, steady, last = self.readings
        per_step = {name: (last[name] - steady[name]) / (self.num_steps - SKIPPED) for name in last}
        return {
            "graphs": last["graphs"] - first["graphs"],
            "setup_graphs": first["graphs"],
            "compile_s": last["compile_s"] - first["compile_s"],
            **{name: per_step[name] for name in ("step_s", "executions")},
        }


def run_naive(folder: Path, cfg: TrainConfig, num_steps: int) -> Result:
    """Train like a user who follows a tutorial and knows nothing about what is slow in PyTorch/XLA."""
    # `.to(device)` unties the decoder from the embedding, so the decoder is trained as a separate weight.
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch.utils.data import DataLoader
    from torch_xla.distributed.parallel_loader import MpDeviceLoader
    from transformers import get_linear_schedule_with_warmup

    made = torch.load(folder / "rows.pt", weights_only=True)
    meter = Meter(num_steps, flush=torch_xla.sync)  # what the loader would do at the next batch

    device = torch_xla.device()
    torch.manual_seed(cfg.seed)
    model = pretraining.transformers_model(cfg.model, made["vocab_size"]).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr)
    warmup = round(num_steps * cfg.optim.warmup_fraction)
    scheduler = get_linear_schedule_with_warmup(optimizer, max(warmup, 1), num_steps)
    batches = iter(MpDeviceLoader(DataLoader(made["rows"], batch_size=cfg.micro_batch_size), device))
    losses = []
    for _ in range(num_steps):
        meter.begin()
        loss = model(**next(batches)).loss
        loss.backward()
        xm.optimizer_step(optimizer)
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        meter.end()
    return {**meter.result(), "first_loss": losses[0]}


def run_ours(cfg: TrainConfig, num_steps: int) -> Result:
    """Run our loop with a recorder that takes readings, and with an extra step: the last one evaluates and saves."""
    import torch_xla.core.xla_model as xm  # imported before the clock starts, as in naive

    from train import loop
    from train.run.stopping import StopRequest

    meter = Meter(num_steps)  # no flush: our step sends its work to the device itself
    counts, sums = [], []

    class Metered(loop.Recorder):
        def begin_step(self) -> None:
            meter.begin()
            super().begin_step()

        def end_step(self, reads: bool, **values: Any) -> None:
            super().end_step(reads, **values)
            meter.end()
            counts.append(sum(batch["count"] for batch in values["micro_batches"]))
            if self.progress.step == 1:  # between two steps, so it is not timed
                sums.extend(xm._maybe_convert_to_cpu([self.engine.loss_sum]))

    with mock.patch.object(loop, "Recorder", Metered):
        loop.run(cfg, StopRequest())
    return {**meter.result(), "first_loss": float(sums[0]) / counts[0]}


def config(folder: Path, options: argparse.Namespace) -> TrainConfig:
    shape = SHAPES[options.shape]
    batch = [f"micro_batch_size={shape.batch}", f"global_batch_size={shape.batch}"]
    device = ["backend=xla", "backend.device=cpu", "backend.precision=fp32", f"log_every={options.log_every}"]
    return pretraining.config(folder, shape, options.steps + SKIPPED + 1, *batch, *device)


# ---- rounds of runs ------------------------------------------------------------------------------------------------


def write_data(folder: Path, options: argparse.Namespace) -> None:
    """Write prepared data for our loop and, for the naive script, the rows of the batches that our loop will draw."""
    shape = SHAPES[options.shape]
    pretraining.synthetic_data(folder, shape)
    batches = pretraining.ready_batches(folder, shape, options.steps + SKIPPED)
    rows = [
        {**row, "attention_mask": torch.ones_like(row["input_ids"])}
        for batch in batches
        for row in pretraining.plain_rows(batch)
    ]
    torch.save({"rows": rows, "vocab_size": shape.vocab_size}, folder / "rows.pt")


def compare(options: argparse.Namespace, words: list[str]) -> str:
    """Return a table of both variants' measures, and of naive / ours within a round: minimum, median, maximum.

    Raises RuntimeError unless the first step's loss is the same in both.
    """
    rounds: list[dict[str, Result]] = []
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), options)
        for number in range(options.rounds):
            own = ["benchmarks.xla", *words, "--folder", name, "--variant"]
            rounds.append({variant: answer(*own, variant, PJRT_DEVICE="CPU") for variant in VARIANTS})
            firsts = [result["first_loss"] for result in rounds[-1].values()]
            if max(firsts) - min(firsts) > SAME_LOSS:
                raise RuntimeError(f"the losses of the first step differ: {firsts}")
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    values = {name: {measure: [each[name][measure] for each in rounds] for measure in MEASURES} for name in VARIANTS}
    naive, ours = (values[variant] for variant in VARIANTS)
    compared = {measure: ratios(naive[measure], ours[measure]) for measure in COMPARED}
    return measure_table(MEASURES, {**values, "naive / ours": compared})


def main() -> None:
    parser = harness.parser(__doc__, rounds=3, steps=30)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--log-every", type=int, default=10, help="steps between our log lines; naive reads every loss")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # one run, for the processes of a round
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.log_every < 2:  # a log line resets the sum from which the first step's loss is read
        parser.error(f"--log-every {options.log_every} must be 2 or more")
    num_steps = options.steps + SKIPPED
    if options.variant is None:
        print(compare(options, sys.argv[1:]))
    elif options.variant == "naive":
        print(json.dumps(run_naive(options.folder, config(options.folder, options), num_steps)))
    else:
        print(json.dumps(run_ours(config(options.folder, options), num_steps)))


if __name__ == "__main__":
    main()
