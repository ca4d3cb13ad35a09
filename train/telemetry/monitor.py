"""Readings of one machine's hardware while a run trains: utilisation, memory, FLOP/s and errors.

    neuron   neuron-monitor, see `train.telemetry.monitor_neuron`; not run on hardware
    nvidia   NVML; not run on hardware
    cpu      psutil, over the processes of the run

A thread of one process per machine reads about once a second, which costs the training nothing. Values without a source
are left out. If a source is missing or breaks, this is reported once, the host is still read, and training continues.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import pynvml

from train.telemetry import monitor_neuron
from train.telemetry.monitor_neuron import Notes, Reading, Totals

logger = logging.getLogger("train")

DEVICE = ("device_utilisation", "device_flops_per_s", "device_memory_bytes")
NAMES = (*DEVICE, "cpu_utilisation", "host_memory_bytes", "device_errors")
OVER_TIME = ("device_utilisation", "device_flops_per_s", "cpu_utilisation")  # means; the others are the latest values
CLOSE_S = 8.0  # more than a source needs to end

Source = Callable[[threading.Event], Iterator[Reading]]  # a reading about every second until the event is set


@dataclass(frozen=True)
class HardwareSample:
    """The readings since the last sample. The sample of all machines is the sum of theirs, value by value."""

    totals: Totals = field(default_factory=dict)
    num_alarms: float = 0.0

    def values(self) -> list[float]:
        """The sample as numbers, always the same count of them, for a sum over the ranks."""
        return [number for name in NAMES for number in self.totals.get(name, (0.0, 0.0))] + [self.num_alarms]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> HardwareSample:
        pairs = {name: (values[2 * index], values[2 * index + 1]) for index, name in enumerate(NAMES)}
        return cls({name: pair for name, pair in pairs.items() if pair[1]}, values[-1])

    def fields(self, *, peak_flops_per_s: float | None) -> dict[str, float]:
        """Fields of the train line: means per device or machine, as shares or bytes, and the new errors of all.

        `hardware_mfu` is the share of its peak that a device reports to have computed; the `mfu` of a train line is
        what the model needs.
        """
        known = {name: total / num for name, (total, num) in self.totals.items() if name != "device_errors"}
        flops = known.pop("device_flops_per_s", None)
        if flops is not None and peak_flops_per_s is not None:
            known["hardware_mfu"] = flops / peak_flops_per_s
        if "device_errors" in self.totals:
            known["device_errors"] = self.totals["device_errors"][0]
        return known


class Monitor:
    """A thread that reads a source and the host, and the sums of its readings. Without a source, as on all ranks of a
    machine but the first, it reads nothing. Monitors are contexts; nothing in them blocks or raises.
    """

    def __init__(self, source: Source | None = None, *, period_s: float = 1.0) -> None:
        self.source, self.period_s = source, period_s
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.spans: dict[str, list[float]] = {}  # sum * time, number * time, time
        self.latest: Totals = {}
        self.num_errors, self.counts_errors = 0, False
        self.waiting: Counter[str] = Counter()  # alarms
        self.thread = threading.Thread(target=self.watch, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        if self.source is not None:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        if self.source is not None:
            self.thread.join(CLOSE_S)

    def watch(self) -> None:
        psutil.cpu_percent()  # its next value is the mean since this call
        try:
            for reading in self.source(self.stop) if self.source is not None else ():
                self.add(reading)
                self.add(host_reading(reading.period_s))
        except Exception as error:  # a run must not fail for a reading
            logger.warning(f"monitor: {type(error).__name__}: {error}; no more readings of the devices")
        with self.lock:  # the devices are no longer read
            self.latest = {name: pair for name, pair in self.latest.items() if name not in DEVICE}
            self.counts_errors = False
        while not self.stop.wait(self.period_s):
            self.add(host_reading(self.period_s))

    def add(self, reading: Reading) -> None:
        with self.lock:
            for name, (total, num) in reading.totals.items():
                if name in OVER_TIME:
                    span = self.spans.get(name, [0.0, 0.0, 0.0])
                    added = (total * reading.period_s, num * reading.period_s, reading.period_s)
                    self.spans[name] = [a + b for a, b in zip(span, added, strict=True)]
                else:
                    self.latest[name] = (total, num)
            if reading.errors is not None:
                self.counts_errors = True
                self.num_errors += sum(reading.errors.values())
                self.waiting.update(reading.errors)
            self.waiting.update(dict.fromkeys(reading.warnings, 0))

    def read(self) -> HardwareSample:
        """Means since the last call, the latest memory, new errors, and the number of waiting alarms."""
        with self.lock:
            totals = {name: (total / time_s, num / time_s) for name, (total, num, time_s) in self.spans.items()}
            totals |= self.latest
            if self.counts_errors or self.num_errors:
                totals["device_errors"] = (self.num_errors, 1.0)
            self.spans, self.num_errors = {}, 0
            return HardwareSample(totals, float(len(self.waiting)))

    def alarms(self) -> list[str]:
        """The alarms since the last call, one line each."""
        with self.lock:
            alarms, self.waiting = self.waiting, Counter()
        return [f"{platform.node()}: {what}" + (f": {count}" if count else "") for what, count in alarms.items()]


def open_monitor(
    kind: str, *, num_devices: int, is_first_on_machine: bool, run_tag: str | None = None, period_s: float = 1.0
) -> Monitor:
    """A monitor of this machine on its first rank; on the other ranks one that reads nothing.

    `kind` is neuron, nvidia or cpu; `num_devices` is the number of ranks on this machine. `run_tag` is the
    NEURON_PROCESS_TAG that the run's processes were started with.
    """
    sources: dict[str, Source] = {
        "neuron": partial(monitor_neuron.readings, num_devices=num_devices, run_tag=run_tag, period_s=period_s),
        "nvidia": Nvidia(num_devices, period_s).readings,
        "cpu": Cpu(num_devices, period_s).readings,
    }
    return Monitor(sources[kind] if is_first_on_machine else None, period_s=period_s)


# ---- sources -------------------------------------------------------------------------------------------------------


def host_reading(period_s: float) -> Reading:
    memory = psutil.virtual_memory()
    used = {"cpu_utilisation": psutil.cpu_percent() / 100, "host_memory_bytes": float(memory.total - memory.available)}
    return Reading({name: (value, 1.0) for name, value in used.items()}, period_s)


@dataclass
class Cpu:
    """The processors and memory that the run uses. The device of a rank is its share of the machine's processors."""

    num_devices: int
    period_s: float
    used_s: dict[int, float] = field(default_factory=dict)  # processor seconds of each process so far

    def readings(self, stop: threading.Event) -> Iterator[Reading]:
        self.look()
        before_s = time.monotonic()
        while not stop.wait(self.period_s):
            busy_s, rss = self.look()
            now_s = time.monotonic()
            share = min(1.0, busy_s / (now_s - before_s) / (os.cpu_count() or 1))
            totals = {"device_utilisation": share * self.num_devices, "device_memory_bytes": rss}
            yield Reading({name: (each, self.num_devices) for name, each in totals.items()}, now_s - before_s)
            before_s = now_s

    def look(self) -> tuple[float, float]:
        """Processor seconds since the last look, and bytes in use. A page that processes share counts in each."""
        used_now_s: dict[int, float] = {}
        rss = 0.0
        for process in self.processes():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
                used_now_s[process.pid] = times.user + times.system
            except psutil.Error:  # the process has ended meanwhile
                continue
        busy_s = sum(used_s - self.used_s.get(pid, 0.0) for pid, used_s in used_now_s.items())
        self.used_s = used_now_s
        return max(0.0, busy_s), rss

    def processes(self) -> list[psutil.Process]:
        """The processes of all ranks on this machine, with their children: those of the launcher, or this one."""
        own = psutil.Process()
        launcher = own.parent() if self.num_devices > 1 else None
        return [own, *own.children(recursive=True)] if launcher is None else launcher.children(recursive=True)


class Nvidia:
    """The devices that CUDA shows the run, by NVML, which counts no FLOPs. Not run on hardware."""

    def __init__(self, num_devices: int, period_s: float) -> None:
        self.num_devices, self.period_s = num_devices, period_s
        self.note = Notes()
        self.ecc: dict[int, int] = {}
        self.hot: set[int] = set()

    def readings(self, stop: threading.Event) -> Iterator[Reading]:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.warning(f"NVML: {error}: no readings of the GPUs; training continues")
            return
        try:
            handles = visible(os.environ.get("CUDA_VISIBLE_DEVICES"))[: self.num_devices]
            if len(handles) < self.num_devices:
                self.note("count", f"NVML finds {len(handles)} of {self.num_devices} GPUs; the others are left out")
            while not stop.wait(self.period_s):
                yield self.look(handles)
        finally:
            pynvml.nvmlShutdown()

    def look(self, handles: list[Any]) -> Reading:
        reading, shares, held = Reading(period_s=self.period_s), [], []
        for index, handle in enumerate(handles):
            rates = self.ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
            shares += [] if rates is None else [rates.gpu / 100]
            memory = self.ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
            held += [] if memory is None else [float(memory.used)]
            which = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
            count = self.ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, *which)
            if count is not None:
                reading.add({f"GPU {index}: uncorrected memory errors": count - self.ecc.get(index, count)})
                self.ecc[index] = count
            heat = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
            reasons = self.ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
            if reasons & heat and index not in self.hot:  # reported once, since it may come and go
                self.hot.add(index)
                reading.warnings += (f"GPU {index}: slowed down by its temperature",)
        for name, values in (("device_utilisation", shares), ("device_memory_bytes", held)):
            if values:
                reading.totals[name] = (sum(values), len(values))
        return reading

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """NVML's answer; None if the device or the driver has none, which is reported once."""
        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            self.note(call.__name__, f"NVML: {call.__name__}: {error}; left out")
            return None


def visible(names: str | None) -> list[Any]:
    """NVML's handles of the devices that CUDA_VISIBLE_DEVICES names, by number or by the start of a UUID; None: all.

    As in CUDA, names after one that does not exist are ignored. Numbers are those of CUDA only if it counts in the
    order of the bus (CUDA_DEVICE_ORDER=PCI_BUS_ID) or all devices are alike.
    """
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if names is None:
        return handles
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    shown: list[Any] = []
    for name in (part.strip() for part in names.split(",")):
        numbered = name.isdecimal() and int(name) < len(handles)
        named = [index for index, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
        if not numbered and len(named) != 1:
            break
        shown.append(handles[int(name) if numbered else named[0]])
    return shown
