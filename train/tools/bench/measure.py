"""One measurement: a real run of `train.loop` that saves nothing and stops after the timed steps."""

from __future__ import annotations

import json
import time
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from train import loop
from train.config import Failure, HubConfig, TelemetryConfig, TrainConfig, plural
from train.config.attempt import BestConfig
from train.config.train import EarlyStopConfig
from train.machine.console import say
from train.machine.environment import environment
from train.machine.launched import launched
from train.machine.memory import own_peak_bytes
from train.observe.metrics import Recorder
from train.parallel.backend import peak_device_bytes
from train.parallel.backends import Backend
from train.run import compose as cli
from train.run.attempt import OutOfMemory
from train.run.stopping import StopRequest
from train.storage.atomic_io import write_atomic
from train.storage.folders import local_path
from train.tools.alone import temporary_run
from train.tools.bench.config import BenchConfig
from train.tools.bench.speeds import Peak, TimedSteps, speeds, table

MEASURED = "measured"  # the reason why the run stops
# n of the n x n matrices that are multiplied to measure the peak
SIZES = (512, 1024, 2048, 4096, 8192)
LONG_ENOUGH_S = 0.05  # If a product takes more seconds than this, larger matrices would not reach a higher speed.
REPEATS = 8


def run(cfg: BenchConfig, settings: Sequence[str]) -> int:
    """Measure a run. Rank 0 prints the figures and writes them to cfg.output. Every rank must call this."""
    try:
        with temporary_run("bench") as (folder, stop):
            meter = Meter(cfg, stop)
            reason, step = loop.run(short_run(cfg, folder), stop, on_line=meter.on_line)
    except OutOfMemory as error:
        write(cfg, {"kind": error.kind, "reason": str(error)})
        raise
    if reason != MEASURED:
        raise Failure(f"nothing was measured: stopped on {reason} at step {step}")
    if launched().rank == 0:
        say(*table(meter.result).splitlines())
        write(cfg, {**meter.result, "settings": list(settings)})
    return cli.DONE


def write(cfg: BenchConfig, content: dict[str, Any]) -> None:
    if cfg.output is not None:
        write_atomic(local_path(cfg.output), json.dumps(content, indent=2).encode() + b"\n")


# ---- the run -------------------------------------------------------------------------------------------------------


def short_run(cfg: BenchConfig, folder: str) -> TrainConfig:
    """Return the run's settings with a log line after each window, and without evaluations, saves and exports."""
    # The run is asked to stop in the last timed step, and stops one step later.
    enough = cfg.untimed + cfg.steps + 2
    return replace(
        cfg,
        run_dir=folder,
        # The learning rate schedule depends on max_steps.
        max_steps=max(cfg.max_steps or 0, enough),
        max_examples=None,
        max_epochs=None,
        max_run_s=None,
        log_every=cfg.window,
        eval_every=None,
        export=False,
        telemetry=TelemetryConfig(trackers=[]),
        profile=False,  # Profiling would slow down steps.
        best=BestConfig(),
        early_stop=EarlyStopConfig(),
        hub=HubConfig(),
        checkpoint=replace(cfg.checkpoint, best=False, every=enough),
        data=replace(cfg.data, verify=False),
    )


@dataclass
class Meter:
    """An observer that times the windows of a measurement, stops the run after the last one, and computes figures."""

    cfg: BenchConfig
    stop: StopRequest
    windows: list[TimedSteps] = field(default_factory=list)
    line_s: float = 0.0  # time of the previous log line
    result: dict[str, Any] = field(default_factory=dict)

    def on_line(self, recorder: Recorder, kind: str, values: dict[str, Any]) -> None:
        """Handle a log line that `train.loop.run` passes."""
        if kind == "train":
            self.keep(recorder, values)
        elif kind == "summary" and values["reason"] == MEASURED:
            self.summarise(recorder)

    def keep(self, recorder: Recorder, values: dict[str, Any]) -> None:
        now_s = time.perf_counter()
        end = self.cfg.untimed + self.cfg.steps
        window = recorder.window
        if self.cfg.untimed < values["step"] <= end:
            self.windows.append(
                TimedSteps(
                    steps=window.steps,
                    wall_s=max(now_s - self.line_s - window.compile_s, 1e-9),
                    tokens=window.tokens,
                    slots=window.slots,
                    flops=window.flops,
                    wait_s=values["data_wait_s"],
                    compile_s=window.compile_s,
                )
            )
        self.line_s = now_s
        if values["step"] >= end:
            self.stop.ask(MEASURED)

    def summarise(self, recorder: Recorder) -> None:
        backend = recorder.backend
        world = recorder.world
        plan = recorder.plan
        graphs = backend.graphs()
        on_hosts = world.all_gather_object(own_peak_bytes())
        on_devices = [peak for peak in world.all_gather_object(peak_device_bytes()) if peak]
        self.result = {
            "kind": "bench",
            **speeds(self.windows, peak=peak(recorder)),
            "compile_s": graphs.compile_s,
            "graphs": graphs.compiled,
            "peak_process_bytes": max(on_hosts),
            "peak_device_bytes": max(on_devices, default=None),
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "accumulation": plan.accumulation,
            "world_size": world.size,
            "replicas": plan.replicas,
            "backend": backend.name,
            "device": backend.device_name,
            "precision": backend.precision,
            "threads": torch.get_num_threads(),
            "instance": recorder.cfg.instance.name,
            **environment(),
        }


# ---- the peak ------------------------------------------------------------------------------------------------------


def peak(recorder: Recorder) -> Peak:
    """Return the peak from the instance's settings or, if unknown, the sum of what all ranks reach simultaneously."""
    backend = recorder.backend
    world = recorder.world
    instance = recorder.cfg.instance
    known = instance.peak_flops_per_s(backend.precision)
    if known is not None:
        return Peak(known * world.size, f"conf/instance/{instance.name}.yaml")
    world.barrier()
    own, size = matmul_flops_per_s(backend)
    product = f"product of {size} x {size} matrices in {backend.precision}"
    source = f"measured here on {plural(world.size, 'rank')}: {product}"
    return Peak(world.sum([own])[0], source)


def matmul_flops_per_s(backend: Backend) -> tuple[float, int]:
    """Return the operations per second of the fastest product of two n x n matrices (2 n^3 operations), and n.

    The product uses the run's precision and number of threads, and this rank's device.
    """
    name = backend.precision.partition("_")[0]
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
    best = (0.0, 0)
    for size in SIZES:
        left, right = (torch.rand(size, size).to(backend.device, kind) for _ in range(2))
        product = partial(largest_of_product, backend, left, right)
        took_s = min(timeit.repeat(product, number=1, repeat=REPEATS))
        best = max(best, (2 * size**3 / took_s, size))
        if took_s > LONG_ENOUGH_S:
            break
    return best


def largest_of_product(backend: Backend, left: Tensor, right: Tensor) -> None:
    """Multiply two matrices, and read the maximum, which waits until the device has computed it."""
    backend.to_host([(left @ right).amax()])
