"""Our loop on PyTorch/XLA beside the script that a tutorial leads to, from the first step on, on the CPU.

    python -m benchmarks.xla [--rounds 3] [--steps 30] [--shape base|demo] [--depth 12] [--accumulation 4]

"naive" is a plain PyTorch/XLA script of the shape of AWS's sentiment fine-tuning sample, written afresh: transformers'
model moved to the device, torch's AdamW, MpDeviceLoader, a [batch, seq] mask of ones, labels at every position, a
warm-up from 0, the loss read at every step. "unrolled" and "scan" are `train.loop.run` with that backend.layers.
Same weights, sequences, masks and batch, checked by the losses; fp32, one process, no ranks.

Every run is a process of its own, because a graph is compiled once in each; rounds interleave the variants. The device
is waited for after steps 1, 2 and 4 and after the last only, so that working ahead of it is not punished. A read is a
transfer from the device to the host, of any number of tensors at once: until it is answered, nothing new is queued.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import memory_mib, num_cpus, run, spread, table, three
from train.cli import compose as cli
from train.config import TrainConfig

VARIANTS = ("naive", "unrolled", "scan")
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


@dataclass(frozen=True)
class Shape:
    model: str
    vocab_size: int
    seq_len: int
    batch: int  # sequences in a micro batch


SHAPES = {
    "base": Shape("albert_base", 2000, 128, 2),
    "demo": Shape("albert_tiny", 2000, 64, 32),
}


# ---- one run, in a process of its own ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """Clocks, and PyTorch/XLA's counts since the start of the process."""

    wall_s: float
    cpu_s: float  # of all threads
    graphs: int
    compile_s: float
    executions: int
    reads: int
    number_reads: int


def take_reading() -> Reading:
    import torch_xla.debug.metrics as metrics

    def metric(name: str) -> tuple[int, float]:
        answer = metrics.metric_data(name)
        return (0, 0.0) if answer is None else (answer[0], answer[1])

    graphs, compile_ns = metric("CompileTime")
    return Reading(
        wall_s=time.perf_counter(),
        cpu_s=time.process_time(),
        graphs=graphs,
        compile_s=compile_ns / 1e9,
        executions=metric("ExecuteTime")[0],
        reads=metric("TransferFromDeviceTime")[0],
        number_reads=metrics.counter_value("aten::_local_scalar_dense") or 0,
    )


class Meter:
    """Readings at the begin and the end of each of `num_steps` steps, and what they come to."""

    def __init__(self, num_steps: int, flush: Callable[[], None]) -> None:
        self.num_steps, self.flush = num_steps, flush
        self.start = take_reading()
        self.begun: list[Reading] = []
        self.ended: list[Reading] = []
        self.peak_rss_mib: float | None = None

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
            self.peak_rss_mib = memory_mib("VmHWM")

    def result(self) -> dict[str, Any]:
        first, last = self.begun[0], self.ended[self.num_steps - 1]
        steady = self.begun[SKIPPED]
        steps = self.num_steps - SKIPPED
        pairs = list(zip(self.begun, self.ended, strict=True))
        setup_s = first.wall_s - self.start.wall_s
        first_s, second_s = (end.wall_s - begin.wall_s for begin, end in pairs[:2])
        return {
            "graphs": last.graphs - first.graphs,
            "setup_graphs": first.graphs,
            "graphs_afterwards": take_reading().graphs - last.graphs,
            "compile_s": last.compile_s - first.compile_s,
            "setup_s": setup_s,
            "first_step_s": first_s,
            "to_step_2_s": first_s + second_s,
            "ready_s": setup_s + first_s + second_s,
            "step_s": (last.wall_s - steady.wall_s) / steps,
            "step_cpu_s": (last.cpu_s - steady.cpu_s) / steps,
            "executions": (last.executions - steady.executions) / steps,
            "reads": (last.reads - steady.reads) / steps,
            "number_reads": (last.number_reads - steady.number_reads) / steps,
            "reads_of_steps": [end.reads - begin.reads for begin, end in pairs[SKIPPED : self.num_steps]],
            "peak_rss_mib": self.peak_rss_mib,
        }


def run_naive(folder: Path, cfg: TrainConfig, num_steps: int) -> dict[str, Any]:
    """What a user writes who follows a tutorial. Nothing is done about what PyTorch/XLA makes of it: the decoder, tied
    to the embedding until `.to(device)`, is trained as a weight of its own.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch.utils.data import DataLoader
    from torch_xla.distributed.parallel_loader import MpDeviceLoader
    from transformers import AlbertConfig, AlbertForMaskedLM, get_linear_schedule_with_warmup

    made = torch.load(folder / "rows.pt", weights_only=True)
    meter = Meter(num_steps, flush=torch_xla.sync)  # what the loader would do at the next batch
    batch, sizes = cfg.micro_batch_size or 1, cfg.model
    accumulation = (cfg.global_batch_size or batch) // batch

    device = torch_xla.device()
    torch.manual_seed(cfg.seed)
    model = AlbertForMaskedLM(
        AlbertConfig(
            vocab_size=made["vocab_size"],
            embedding_size=sizes.embedding_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr)
    warmup = round(num_steps * cfg.optim.warmup_fraction)
    scheduler = get_linear_schedule_with_warmup(optimizer, max(warmup, 1), num_steps)
    batches = iter(MpDeviceLoader(DataLoader(made["rows"], batch_size=batch), device))
    losses = []
    for _ in range(num_steps):
        meter.begin()
        for _ in range(accumulation):
            loss = model(**next(batches)).loss
            (loss / accumulation).backward()
            if len(losses) % accumulation == accumulation - 1:
                xm.optimizer_step(optimizer)
                optimizer.zero_grad()
                scheduler.step()
            losses.append(loss.item())
        meter.end()
    weighted = sum(a * b for a, b in zip(losses, made["counts"][:accumulation], strict=False))
    return {
        **meter.result(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "first_loss": weighted / sum(made["counts"][:accumulation]),
    }


def run_ours(cfg: TrainConfig, num_steps: int) -> dict[str, Any]:
    """The product's own entry, with readings taken in its recorder. It runs for one step more: its last one evaluates
    and saves.
    """
    import torch_xla.core.xla_model as xm  # before the clock starts, as in naive

    from train import loop
    from train.attempt.preempt import StopRequest

    meter = Meter(num_steps, flush=lambda: None)  # a step of ours ends with what it has queued
    engines, counts, sums = [], [], []

    class Metered(loop.Recorder):
        def begin_step(self) -> None:
            meter.begin()
            super().begin_step()

        def end_step(self, reads: bool, **values: Any) -> None:
            super().end_step(reads, **values)
            meter.end()
            counts.append(sum(batch["count"] for batch in values["micro_batches"]))
            if self.progress.step <= 2:  # between two steps, in nobody's time: the loss so far
                sums.extend(xm._maybe_convert_to_cpu([engines[0].loss_sum]))

    def build_engine(*args: Any, **kwargs: Any) -> Any:
        engines.append(kept[1](*args, **kwargs))
        return engines[0]

    kept = loop.Recorder, loop.build_engine
    loop.Recorder, loop.build_engine = Metered, build_engine  # type: ignore[misc]
    try:
        loop.run(cfg, StopRequest())
    finally:
        loop.Recorder, loop.build_engine = kept  # type: ignore[misc]
    written = (json.loads(line) for line in (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines())
    windows = [line["loss"] for line in written if line["kind"] == "train"]
    early = [float(total) / seen for total, seen in zip(sums, itertools.accumulate(counts), strict=False)]
    return {
        **meter.result(),
        "parameters": sum(parameter.numel() for parameter in engines[0].parameters),
        "first_loss": early[0],
        "losses": [*early, *windows],
    }


def config(folder: Path, variant: str, options: argparse.Namespace) -> TrainConfig:
    shape = SHAPES[options.shape]
    return cli.load_config(
        TrainConfig,
        [
            f"model={shape.model}",
            *([f"model.num_layers={options.depth}"] if options.depth else []),
            f"data.path={folder / 'data'}",
            f"run_dir={tempfile.mkdtemp(dir=folder)}/run",
            f"micro_batch_size={shape.batch}",
            f"global_batch_size={shape.batch * options.accumulation}",
            f"max_steps={options.steps + SKIPPED + 1}",
            f"log_every={options.log_every}",
            "data.num_workers=0",  # masks are drawn in the process that is measured
            "eval_every=null",
            "eval_examples=1",
            "checkpoint.every=1000000",
            "export=false",
            "backend=xla",
            "backend.device=cpu",
            "backend.precision=fp32",
            *([] if variant == "naive" else [f"backend.layers={variant}"]),
            "optim.lr=1e-4",
        ],
    )


# ---- rounds of runs ------------------------------------------------------------------------------------------------


def write_data(folder: Path, options: argparse.Namespace) -> None:
    """The prepared data for our loop, and the batches that it will draw as plain rows for the naive script."""
    from benchmarks import step  # hides torch_xla from its process: not for the processes that are measured

    shape, rows, counts = SHAPES[options.shape], [], []
    (folder / "data").mkdir()
    step.synthetic_data(folder / "data", shape)
    for batch in step.ready_batches(folder, shape, (options.steps + SKIPPED) * options.accumulation):
        inputs = batch["inputs"]
        columns = (inputs["input_ids"], inputs["token_type_ids"], step.full_labels(inputs))
        for ids, segments, labels in zip(*columns, strict=True):
            ones = torch.ones_like(ids)
            rows.append({"input_ids": ids, "attention_mask": ones, "token_type_ids": segments, "labels": labels})
        counts.append(batch["count"])
    torch.save({"rows": rows, "counts": counts, "vocab_size": shape.vocab_size}, folder / "rows.pt")


def run_apart(folder: Path, variant: str, arguments: list[str]) -> dict[str, Any]:
    """One variant in a fresh process."""
    command = (sys.executable, "-m", "benchmarks.xla", *arguments, "--variant", variant, "--folder", str(folder))
    answer: dict[str, Any] = json.loads(run(*command, PJRT_DEVICE="CPU").splitlines()[-1])
    return answer


def check_same_work(answer: dict[str, dict[str, Any]]) -> None:
    """Raises RuntimeError unless the first step's loss is the same everywhere, and those of our variants always."""
    firsts = {variant: one["first_loss"] for variant, one in answer.items()}
    if max(firsts.values()) - min(firsts.values()) > SAME_LOSS:
        raise RuntimeError(f"the losses of the first step differ: {firsts}")
    ours = [one["losses"] for one in answer.values() if "losses" in one]
    if any(max(losses) - min(losses) > SAME_LOSS for losses in zip(*ours, strict=True)):
        raise RuntimeError(f"the losses of our variants differ: {ours}")


def compare(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Every measure of every variant, and naive's over ours of the same round: least, median, greatest."""
    rounds: list[dict[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder, options)
        for number in range(options.rounds):
            rounds.append({variant: run_apart(folder, variant, arguments) for variant in options.variants})
            check_same_work(rounds[-1])
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    result: dict[str, Any] = {
        **{key: value for key, value in vars(options).items() if key not in ("variant", "folder")},
        "cpus": num_cpus(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    for variant in options.variants:
        answer = [round_[variant] for round_ in rounds]
        known = [measure for measure in (*MEASURES, "graphs_afterwards") if answer[0][measure] is not None]
        result[variant] = {measure: three([one[measure] for one in answer]) for measure in known}
        result[variant]["reads_of_steps"] = answer[0]["reads_of_steps"]
        result[variant]["first_loss"] = answer[0]["first_loss"]
    for variant in ours(options):
        result[f"naive / {variant}"] = {
            measure: three([round_["naive"][measure] / round_[variant][measure] for round_ in rounds])
            for measure in COMPARED
            if measure in result[variant]
        }
    return result


def ours(options: argparse.Namespace) -> list[str]:
    """The variants to compare with naive; none without it."""
    return [variant for variant in options.variants if variant != "naive" and "naive" in options.variants]


def table_of(result: dict[str, Any], columns: list[str]) -> str:
    rows = [(label, *(cell(result[column].get(name)) for column in columns)) for name, label in MEASURES.items()]
    return table(("", *columns), rows)


def cell(values: tuple[float, float, float] | None) -> str:
    return "" if values is None else spread(values, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help=f"steady steps of each run, after the first {SKIPPED}")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--depth", type=int, help="layers; left out: the model's own number")
    parser.add_argument("--accumulation", type=int, default=1, help="micro batches in a step")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines of ours; naive reads at all")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)  # one run, for the processes of a round
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.log_every < 3:  # the losses of the first two steps are read from outside, as sums since the last line
        parser.error(f"--log-every {options.log_every} must be 3 or more")
    if options.variant is None:
        result = compare(options, sys.argv[1:])
        print(table_of(result, [*options.variants, *(f"naive / {variant}" for variant in ours(options))]))
        print(json.dumps(result))
        return
    cfg = config(options.folder, options.variant, options)
    num_steps = options.steps + SKIPPED
    answer = run_naive(options.folder, cfg, num_steps) if options.variant == "naive" else run_ours(cfg, num_steps)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
