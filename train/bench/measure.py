"""One measurement: a real run by `train.loop` that saves nothing and stops once its steps are timed."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from train import loop
from train.attempt.attempt import OutOfMemory
from train.attempt.preempt import StoppedEarly, StopRequest
from train.backend.base import peak_device_bytes
from train.bench.config import BenchConfig
from train.bench.peak import matmul_flops_per_s
from train.bench.speeds import GIB, Peak, TimedSteps, cost, speeds, table
from train.cli import compose as cli
from train.config import Failure, HubConfig, InputError, TrainConfig, check
from train.config.attempt import BestConfig
from train.config.train import EarlyStopConfig
from train.host import machine
from train.host.environment import environment
from train.host.launched import Launched, launched
from train.host.memory import limit_allocations, own_peak_bytes, total_memory_bytes
from train.host.processes import owner_name
from train.ranks import AGREED
from train.report.texts import plural
from train.storage.atomic_io import write_atomic
from train.telemetry.metrics import Recorder

logger = logging.getLogger("train")
MEASURED = "measured"  # the reason why the run stops
OTHERS_END_S = 10.0  # for the other ranks of this machine to leave the run folder


def run(cfg: BenchConfig, settings: Sequence[str]) -> int:
    """Measure, write the figures to cfg.output, print them on rank 0. Every rank calls it."""
    launch = launched()
    try:
        with own_folder(launch) as folder:
            result = measured(cfg, folder)
    except InputError:
        raise
    except Exception as error:
        if isinstance(error, (StoppedEarly, *AGREED)) and not isinstance(error, OutOfMemory):
            raise Failure(f"nothing was measured: {error}") from error
        end_apart(error, cfg, launch)
        raise
    if launch.rank == 0:
        print(table(result), flush=True)
        write(cfg, {**result, "settings": list(settings)})
    return cli.DONE


def end_apart(error: Exception, cfg: BenchConfig, launch: Launched) -> None:
    """End this rank for an error of its own: the others may wait for it for ever. A single process returns."""
    if isinstance(error, OutOfMemory):
        write(cfg, {"kind": error.kind, "reason": str(error)})
    if launch.world_size > 1:
        logger.exception("rank %d: %s", launch.rank, error)
        logging.shutdown()
        os._exit(cli.FAILED)


def write(cfg: BenchConfig, content: dict[str, Any]) -> None:
    if cfg.output is not None:
        write_atomic(Path(cfg.output), json.dumps(content, indent=2).encode() + b"\n")


# ---- the run -------------------------------------------------------------------------------------------------------


def measured(cfg: BenchConfig, folder: Path) -> dict[str, Any]:
    """The figures, on rank 0; empty on the others."""
    with StopRequest() as stop:
        meter = Meter(cfg, stop)
        reason, step = loop.run(short_run(cfg, folder), stop, on_line=meter.on_line)
    if reason != MEASURED:
        raise Failure(f"stopped on {reason} at step {step}")
    return meter.result


def short_run(cfg: BenchConfig, folder: Path) -> TrainConfig:
    """The same run without evaluations, saves and exports, with a line after each window. Its schedule is that of the
    whole run, so that its numbers stay as usual.
    """
    enough = cfg.untimed + cfg.steps + 2  # the last step that is timed asks for the end, which is after the next one
    return replace(
        cfg,
        run_dir=str(folder),
        max_steps=max(cfg.max_steps or 0, enough),
        max_examples=None,
        max_epochs=None,
        max_run_s=None,
        log_every=cfg.window,
        eval_every=None,
        collect_graphs=False,
        export=False,
        tensorboard=False,
        profile=False,  # it would slow the steps that it traces
        best=BestConfig(),
        early_stop=EarlyStopConfig(),
        hub=HubConfig(),
        checkpoint=replace(cfg.checkpoint, best=False, every=enough),
        data=replace(cfg.data, verify=False),
    )


@dataclass
class Meter:
    """Keeps the lines of a measurement as windows, stops the run after the last of them, and makes the figures."""

    cfg: BenchConfig
    stop: StopRequest
    windows: list[TimedSteps] = field(default_factory=list)
    line_s: float | None = None  # time of the last line
    result: dict[str, Any] = field(default_factory=dict)

    def on_line(self, recorder: Recorder, kind: str, values: dict[str, Any]) -> None:
        """See `train.loop.run`."""
        if kind == "start":
            limit_gib = self.cfg.max_memory_gib
            if limit_gib is not None and recorder.backend.monitor_kind == "cpu":  # others map more than they use
                limit_allocations(round(limit_gib * GIB))
        elif kind == "train":
            self.keep(recorder, values)
        elif kind == "summary" and values["reason"] == MEASURED:
            self.summarise(recorder)

    def keep(self, recorder: Recorder, values: dict[str, Any]) -> None:
        window, now_s = recorder.window, time.perf_counter()
        before_s, self.line_s = self.line_s, now_s
        end = self.cfg.untimed + self.cfg.steps
        if before_s is not None and self.cfg.untimed < values["step"] <= end:
            wall_s = max(now_s - before_s - window.compile_s, 1e-9)
            wait_s, compile_s = values["data_wait_s"], window.compile_s
            self.windows.append(
                TimedSteps(window.steps, wall_s, window.tokens, window.slots, window.flops, wait_s, compile_s)
            )
        if values["step"] >= end:
            self.stop.ask(MEASURED)

    def summarise(self, recorder: Recorder) -> None:
        backend, world, plan, instance = recorder.backend, recorder.world, recorder.plan, recorder.cfg.instance
        graphs = backend.graphs()
        peaks = world.all_gather_object((own_peak_bytes(), peak_device_bytes()))
        of_devices = [device for _, device in peaks if device is not None]
        result = speeds(self.windows, global_batch_size=plan.global_batch_size, peak=peak(recorder))
        sequences_per_s = result["sequences_per_s"]["median"]
        self.result = {
            "kind": "bench",
            **result,
            "compile_s": graphs.compile_s,
            "graphs": graphs.compiled,
            "peak_process_bytes": max(host for host, _ in peaks),
            "peak_device_bytes": max(of_devices) if of_devices else None,
            **cost(instance, machines=world.num_machines, sequences_per_s=sequences_per_s),
            "global_batch_size": plan.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "accumulation": plan.accumulation,
            "world_size": world.size,
            "replicas": plan.replicas,
            "machines": world.num_machines,
            "timed_steps": sum(each.steps for each in self.windows),
            "untimed_steps": self.cfg.untimed,
            "windows": len(self.windows),
            "parameters": sum(weight.numel() for weight in recorder.engine.model.parameters() if weight.requires_grad),
            "backend": backend.name,
            "device": backend.device_name,
            "precision": backend.precision,
            "threads": torch.get_num_threads(),
            "memory_bytes": total_memory_bytes(),
            "instance": instance.name,
            "instance_type": machine.instance_type() or None,
            **environment(),
        }


def peak(recorder: Recorder) -> Peak:
    """The instance's, or else what all ranks measure side by side."""
    backend, world, instance = recorder.backend, recorder.world, recorder.cfg.instance
    known = instance.peak_flops_per_s(backend.precision)
    if known is not None:
        return Peak(known * world.size, f"conf/instance/{instance.name}.yaml: {instance.source}")
    world.barrier()
    own, size = matmul_flops_per_s(backend)
    total = world.sum([own])[0]
    device = plural(torch.get_num_threads(), "thread") if backend.device.type == "cpu" else backend.device_name
    ranks = f", {world.size} ranks side by side" if world.size > 1 else ""
    return Peak(total, f"measured here: product of {size} x {size} matrices in {backend.precision} on {device}{ranks}")


# ---- the folder ----------------------------------------------------------------------------------------------------


@contextmanager
def own_folder(launch: Launched) -> Iterator[Path]:
    """A run folder for the ranks of this machine, which is removed at the end."""
    first = os.getppid() if launch.is_under_torchrun else os.getpid()
    path = Path(tempfile.gettempdir()) / f"baretrain-bench-{owner_name(first or os.getpid())}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    check(is_ours, f"{path} is not a folder that only this user may use; remove it, or set TMPDIR")
    try:
        yield path
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # which other ranks may do too
        raise
    if launch.local_rank == 0:
        until_s = time.monotonic() + OTHERS_END_S
        while len(list(path.glob("log/exit_rank_*.json"))) < launch.local_world_size and time.monotonic() < until_s:
            time.sleep(0.05)
        shutil.rmtree(path)
