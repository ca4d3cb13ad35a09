"""Our loop on PyTorch/XLA and the script that a tutorial leads to, from the first step on, on the CPU.

    python -m benchmarks.xla [--rounds 3] [--steps 30] [--shape base|demo]

"naive" is a plain PyTorch/XLA script of the shape of AWS's sentiment fine-tuning sample, written afresh;
"ours" is `train.loop.run`. Same weights, sequences, masks and batch, checked by the first loss;
fp32, one process, no ranks. Every run is a separate process, because a graph is compiled once in each. The device is
waited for after steps 1, 2 and 4 and after the last only, so that working ahead of it is not punished. A read is a
transfer from the device to the host, of any number of tensors together: until it ends, nothing new is queued.
"""

from __future__ import annotations

import argparse
import json
import os
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
from benchmarks.harness import Result, measure_table, ratios, run, three
from train.config import TrainConfig
from train.system.memory import usable_cpus

VARIANTS = ("naive", "ours")
SKIPPED = 4  # first steps, in which graphs are compiled: not part of the steady ones
WAITS = (1, 2, SKIPPED)  # steps after which the device is waited for, besides the last
SAME_LOSS = 1e-4  # nats; float32 sums of a loss of about 8 in two orders differ by 1e-6
MEASURES = {
    "graphs": "graphs compiled from the first step on",
    "setup_graphs": "graphs compiled before it",
    "compile_s": "compiling from the first step on, s",
    "setup_s": "set-up before it, s",
    "first_step_s": "first step, s",
    "to_step_2_s": "start of the first step to the end of step 2, s",
    "ready_s": "the same with the set-up, s",
    "step_s": "steady step, s",
    "step_cpu_s": "steady step, CPU s",
    "executions": "executions a step",
    "reads": "reads of the device a step",
    "number_reads": "of them for one Python number",
    "peak_rss_mib": "peak memory of the process, MiB",
    "parameters": "trained parameters",
}
COMPARED = ("compile_s", "first_step_s", "to_step_2_s", "ready_s", "step_s", "step_cpu_s", "peak_rss_mib")
SHAPES = {
    "base": replace(pretraining.SHAPES["base"], vocab_size=2000, batch=2),
    "demo": pretraining.SHAPES["demo"],
}


# ---- one run, in a separate process --------------------------------------------------------------------------------


Reading = dict[str, float]


def take_reading() -> Reading:
    """Return clocks, and PyTorch/XLA's counts since the start of the process."""
    import torch_xla.debug.metrics as metrics

    def metric(name: str) -> tuple[int, float]:
        data = metrics.metric_data(name)
        return (0, 0.0) if data is None else (data[0], data[1])

    graphs, compile_ns = metric("CompileTime")
    return {
        "wall_s": time.perf_counter(),
        "cpu_s": time.process_time(),  # of all threads
        "graphs": graphs,
        "compile_s": compile_ns / 1e9,
        "executions": metric("ExecuteTime")[0],
        "reads": metric("TransferFromDeviceTime")[0],
        "number_reads": metrics.counter_value("aten::_local_scalar_dense") or 0,
    }


def between(earlier: Reading, later: Reading) -> Reading:
    return {name: later[name] - earlier[name] for name in earlier}


class Meter:
    """Readings at the begin and the end of each of `num_steps` steps, and their results."""

    def __init__(self, num_steps: int, flush: Callable[[], None] = lambda: None) -> None:
        self.num_steps, self.flush = num_steps, flush
        self.start = take_reading()
        self.begun: list[Reading] = []
        self.ended: list[Reading] = []
        self.peak_rss_mib = 0.0

    def begin(self) -> None:
        self.begun.append(take_reading())

    def end(self) -> None:
        import torch_xla.core.xla_model as xm

        step = len(self.ended) + 1
        if step in (*WAITS, self.num_steps):
            self.flush()
            xm.wait_device_ops()
        self.ended.append(take_reading())
        if step == self.num_steps:
            status = Path("/proc/self/status").read_text()  # getrusage counts the parent's memory at the start too
            self.peak_rss_mib = int(status.split("VmHWM:")[1].split()[0]) / 1024

    def result(self) -> Result:
        first, last = self.begun[0], self.ended[self.num_steps - 1]
        setup_s = first["wall_s"] - self.start["wall_s"]
        first_s, second_s = (between(self.begun[step], self.ended[step])["wall_s"] for step in range(2))
        steady = between(self.begun[SKIPPED], last)
        per_step = {name: value / (self.num_steps - SKIPPED) for name, value in steady.items()}
        return {
            "graphs": last["graphs"] - first["graphs"],
            "setup_graphs": first["graphs"],
            "compile_s": last["compile_s"] - first["compile_s"],
            "setup_s": setup_s,
            "first_step_s": first_s,
            "to_step_2_s": first_s + second_s,
            "ready_s": setup_s + first_s + second_s,
            "step_s": per_step["wall_s"],
            "step_cpu_s": per_step["cpu_s"],
            **{name: per_step[name] for name in ("executions", "reads", "number_reads")},
            "peak_rss_mib": self.peak_rss_mib,
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
    return {
        **meter.result(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_loss": losses[0],
    }


def run_ours(cfg: TrainConfig, num_steps: int) -> Result:
    """Run the product's entry, with readings taken in its recorder, one step more: the last one evaluates and saves."""
    import torch_xla.core.xla_model as xm  # before the clock starts, as in naive

    from train import loop
    from train.run.stopping import StopRequest

    meter = Meter(num_steps)  # a step of ours ends with the work that it has queued
    counts, sums, parameters = [], [], []

    class Metered(loop.Recorder):
        def begin_step(self) -> None:
            meter.begin()
            super().begin_step()

        def end_step(self, reads: bool, **values: Any) -> None:
            super().end_step(reads, **values)
            meter.end()
            counts.append(sum(batch["count"] for batch in values["micro_batches"]))
            if self.progress.step == 1:  # between two steps, in no side's time
                parameters[:] = [parameter.numel() for parameter in self.engine.parameters]
                sums.extend(xm._maybe_convert_to_cpu([self.engine.loss_sum]))

    with mock.patch.object(loop, "Recorder", Metered):
        loop.run(cfg, StopRequest())
    return {
        **meter.result(),
        "parameters": sum(parameters),
        "first_loss": float(sums[0]) / counts[0],
    }


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


def check_same_work(results: dict[str, Result]) -> None:
    """Raise RuntimeError unless the first step's loss is the same everywhere."""
    firsts = {variant: one["first_loss"] for variant, one in results.items()}
    if max(firsts.values()) - min(firsts.values()) > SAME_LOSS:
        raise RuntimeError(f"the losses of the first step differ: {firsts}")


def compare(options: argparse.Namespace, arguments: list[str]) -> dict[str, Result]:
    """Return every measure of every variant, and naive's over ours of the same round: least, median, greatest."""
    rounds: list[dict[str, Result]] = []
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), options)
        for number in range(options.rounds):
            command = [sys.executable, "-m", "benchmarks.xla", *arguments, "--folder", name, "--variant"]
            printed = {variant: run(*command, variant, PJRT_DEVICE="CPU") for variant in options.variants}
            rounds.append({variant: json.loads(text.splitlines()[-1]) for variant, text in printed.items()})
            check_same_work(rounds[-1])
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)

    def of_rounds(variant: str, measure: str) -> list[float]:
        return [results[variant][measure] for results in rounds]

    result: dict[str, Result] = {
        variant: {measure: three(of_rounds(variant, measure)) for measure in MEASURES} for variant in options.variants
    }
    for variant in [each for each in options.variants if each != "naive" and "naive" in options.variants]:
        result[f"naive / {variant}"] = {
            measure: three(ratios(of_rounds("naive", measure), of_rounds(variant, measure))) for measure in COMPARED
        }
    return result


def main() -> None:
    parser = harness.parser(__doc__, rounds=3, steps=30)
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines of ours; naive reads at all")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # one run, for the processes of a round
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.log_every < 2:  # the loss of the first step is read from outside, as a sum since the last line
        parser.error(f"--log-every {options.log_every} must be 2 or more")
    if options.variant is None:
        result = compare(options, sys.argv[1:])
        print(measure_table(MEASURES, result))
        about = {"cpus": usable_cpus(), "omp_threads": os.environ.get("OMP_NUM_THREADS"), **vars(options)}
        print(json.dumps({**about, **result}, default=str))
        return
    cfg = config(options.folder, options)
    num_steps = options.steps + SKIPPED
    result = run_naive(options.folder, cfg, num_steps) if options.variant == "naive" else run_ours(cfg, num_steps)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
