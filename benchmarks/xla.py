"""Our loop on PyTorch/XLA and the script that a tutorial leads to, from the first step on, on the CPU.

    python -m benchmarks.xla [--rounds 3] [--steps 30] [--shape base|demo]

"naive" is a plain PyTorch/XLA script of the shape of AWS's sentiment fine-tuning sample, written afresh;
"ours" is `train.loop.run`. Same weights, sequences, masks and batch, checked by the first loss;
fp32, one process, no ranks. Every run is a separate process, because a graph is compiled once in each. The device is
waited for after the fourth step and after the last only, so that working ahead of it is not punished.
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
SKIPPED = 4  # first steps, in which graphs are compiled: not part of the steady ones
SAME_LOSS = 1e-4  # nats; float32 sums of a loss of about 8 in two orders differ by 1e-6
MEASURES = {
    "graphs": "graphs compiled from the first step on",
    "setup_graphs": "graphs compiled before it",
    "compile_s": "compiling from the first step on, s",
    "step_s": "steady step, s",
    "executions": "executions a step",
}
COMPARED = ("compile_s", "step_s")
SHAPES = {
    "base": replace(pretraining.SHAPES["base"], vocab_size=2000, batch=2),
    "demo": pretraining.SHAPES["demo"],
}


# ---- one run, in a separate process --------------------------------------------------------------------------------


Reading = dict[str, float]


def take_reading() -> Reading:
    """Return the clock, and PyTorch/XLA's counts since the start of the process."""
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
    """Readings before the first step, after the skipped ones, and after the last of `num_steps`."""

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
    """Train as a user who follows a tutorial, with all that PyTorch/XLA makes of it."""
    # The decoder, tied to the embedding until `.to(device)`, is trained as a separate weight.
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch.utils.data import DataLoader
    from torch_xla.distributed.parallel_loader import MpDeviceLoader
    from transformers import get_linear_schedule_with_warmup

    made = torch.load(folder / "rows.pt", weights_only=True)
    meter = Meter(num_steps, flush=torch_xla.sync)  # does what the loader would at the next batch

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
    """Run the product's entry, with readings taken in its recorder, one step more: the last one evaluates and saves."""
    import torch_xla.core.xla_model as xm  # before the clock starts, as in naive

    from train import loop
    from train.run.stopping import StopRequest

    meter = Meter(num_steps)  # a step of ours ends with the work that it has queued
    counts, sums = [], []

    class Metered(loop.Recorder):
        def begin_step(self) -> None:
            meter.begin()
            super().begin_step()

        def end_step(self, reads: bool, **values: Any) -> None:
            super().end_step(reads, **values)
            meter.end()
            counts.append(sum(batch["count"] for batch in values["micro_batches"]))
            if self.progress.step == 1:  # between two steps, in no side's time
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
    """Write the prepared data for our loop, and the batches that it will draw as plain rows for the naive script."""
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
    """Return every measure of both variants, and naive's over ours of the same round: least, median, greatest.

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
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines of ours; naive reads at all")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # one run, for the processes of a round
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.log_every < 2:  # the loss of the first step is read from outside, as a sum since the last line
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
