"""What the hardware says of itself while a run trains: utilisation, memory, FLOP/s and errors of one machine.

    neuron   neuron-monitor, see `train.monitor_neuron`; not run on hardware
    nvidia   NVML; not run on hardware
    cpu      psutil, over the processes of the run

A thread of one process per machine reads about once a second, so that asking costs the training nothing. What has no
source is left out. A source that is missing or breaks is noted once, the host is still read, and training goes on.
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
from typing import Any

import psutil
import pynvml

from train.monitor_neuron import Neuron, Notes, Reading, Totals

logger = logging.getLogger("train")

DEVICE = ("device_utilisation", "device_flops_per_s", "device_memory_bytes")
NAMES = (*DEVICE, "cpu_utilisation", "host_memory_bytes", "device_errors")
OVER_TIME = ("device_utilisation", "device_flops_per_s", "cpu_utilisation")  # means; of the others, the latest
CLOSE_S = 8.0  # more than a source takes to end

Source = Callable[[threading.Event], Iterator[Reading]]  # a reading about every second until the event or for good


@dataclass(frozen=True)
class Sample:
    """What is known since the last one. Samples of several machines add up, value by value, to that of all."""

    totals: Totals = field(default_factory=dict)
    num_alarms: float = 0.0

    def values(self) -> list[float]:
        """Always as many, for a sum over the ranks."""
        return [number for name in NAMES for number in self.totals.get(name, (0.0, 0.0))] + [self.num_alarms]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Sample:
        pairs = {name: (values[2 * place], values[2 * place + 1]) for place, name in enumerate(NAMES)}
        return cls({name: pair for name, pair in pairs.items() if pair[1]}, values[-1])

    def fields(self, *, peak_flops_per_s: float | None) -> dict[str, float]:
        """For the train line: means of one device or machine, as shares or bytes, and the new errors of all.

        `hardware_mfu` is what the devices say they computed, as a share of the peak of one device; the `mfu` of a
        train line is what the model needs.
        """
        known = {name: total / num for name, (total, num) in self.totals.items() if name != "device_errors"}
        flops = known.pop("device_flops_per_s", None)
        if flops is not None and peak_flops_per_s is not None:
            known["hardware_mfu"] = flops / peak_flops_per_s
        if "device_errors" in self.totals:
            known["device_errors"] = self.totals["device_errors"][0]
        return known


class Monitor:
    """Used as a context; nothing here blocks or raises. This one is for ranks that leave it to another: no readings."""

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def read(self) -> Sample:
        """Means since the last call, the latest memory, new errors, and how many alarms wait to be fetched."""
        return Sample()

    def alarms(self) -> list[str]:
        """What went wrong since the last call, a line each."""
        return []


class MachineMonitor(Monitor):
    """A thread that reads a source and the host, and what it has gathered: a few numbers however long nobody asks."""

    def __init__(self, source: Source, *, period_s: float) -> None:
        self.source, self.period_s = source, period_s
        self.stop, self.lock = threading.Event(), threading.Lock()
        self.spans: dict[str, list[float]] = {}  # sum, number and time, the first two times the time
        self.latest: Totals = {}
        self.num_errors, self.counts_errors = 0, False
        self.found: Counter[str] = Counter()  # alarms

    def __enter__(self) -> Monitor:
        self.thread = threading.Thread(target=self.watch, name="monitor", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(CLOSE_S)

    def watch(self) -> None:
        psutil.cpu_percent()  # its next value is the mean since this call
        try:
            for reading in self.source(self.stop):
                self.add(reading)
                self.add(host_reading(reading.period_s))
        except Exception as error:  # no reading is worth a run
            logger.warning(f"monitor: {type(error).__name__}: {error}; no more readings of the devices")
        self.forget()
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
                self.found.update(reading.errors)
            self.found.update(dict.fromkeys(reading.warnings, 0))

    def forget(self) -> None:
        """The devices are no longer read: the last that was known of them is not said of the present."""
        with self.lock:
            self.latest = {name: pair for name, pair in self.latest.items() if name not in DEVICE}
            self.counts_errors = False

    def read(self) -> Sample:
        with self.lock:
            totals = {name: (total / time_s, num / time_s) for name, (total, num, time_s) in self.spans.items()}
            totals |= self.latest
            if self.counts_errors or self.num_errors:
                totals["device_errors"] = (self.num_errors, 1.0)
            self.spans, self.num_errors = {}, 0
            return Sample(totals, float(len(self.found)))

    def alarms(self) -> list[str]:
        with self.lock:
            found, self.found = self.found, Counter()
        return [f"{platform.node()}: {what}" + (f": {count}" if count else "") for what, count in found.items()]


def open_monitor(
    kind: str, *, num_devices: int, is_first_on_machine: bool, run_tag: str | None = None, period_s: float = 1.0
) -> Monitor:
    """A monitor of this machine on its first rank, on the others one that reads nothing.

    `kind` is neuron, nvidia or cpu; `num_devices` is the number of ranks on this machine. `run_tag` is the
    NEURON_PROCESS_TAG that the run's processes were started with.
    """
    sources: dict[str, Source] = {
        "neuron": Neuron(num_devices, run_tag, period_s).readings,
        "nvidia": Nvidia(num_devices, period_s).readings,
        "cpu": Cpu(num_devices, period_s).readings,
    }
    return MachineMonitor(sources[kind], period_s=period_s) if is_first_on_machine else Monitor()


# ---- sources -------------------------------------------------------------------------------------------------------


def host_reading(period_s: float) -> Reading:
    memory = psutil.virtual_memory()
    used = {"cpu_utilisation": psutil.cpu_percent() / 100, "host_memory_bytes": float(memory.total - memory.available)}
    return Reading({name: (value, 1.0) for name, value in used.items()}, period_s)


@dataclass
class Cpu:
    """The device of a rank is its share of the machine's processors, its memory that of its processes."""

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
        """Processor seconds since the last look, and bytes held now; a page that processes share counts in each."""
        found: dict[int, float] = {}
        rss = 0.0
        for process in self.processes():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
                found[process.pid] = times.user + times.system
            except psutil.Error:  # it ended meanwhile
                continue
        busy_s = sum(used_s - self.used_s.get(pid, 0.0) for pid, used_s in found.items())
        self.used_s = found
        return max(0.0, busy_s), rss

    def processes(self) -> list[psutil.Process]:
        """Of all ranks on this machine: a launcher's children, or this process, and theirs."""
        own = psutil.Process()
        launcher = own.parent() if self.num_devices > 1 else None
        return [own, *own.children(recursive=True)] if launcher is None else launcher.children(recursive=True)


class Nvidia:
    """The devices that CUDA shows the run, as NVML sees them; it counts no FLOPs. Not run on hardware."""

    def __init__(self, num_devices: int, period_s: float) -> None:
        self.num_devices, self.period_s = num_devices, period_s
        self.note = Notes()
        self.ecc: dict[int, int] = {}
        self.hot: set[int] = set()

    def readings(self, stop: threading.Event) -> Iterator[Reading]:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            logger.warning(f"NVML: {error}: no readings of the GPUs; training goes on")
            return
        try:
            handles = visible(os.environ.get("CUDA_VISIBLE_DEVICES"))[: self.num_devices]
            if len(handles) < self.num_devices:
                self.note("found", f"NVML finds {len(handles)} of {self.num_devices} GPUs; the others are left out")
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
            if reasons & heat and index not in self.hot:  # once, since it may come and go
                self.hot.add(index)
                reading.warnings += (f"GPU {index}: slowed down by its temperature",)
        for name, values in (("device_utilisation", shares), ("device_memory_bytes", held)):
            if values:
                reading.totals[name] = (sum(values), len(values))
        return reading

    def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What NVML answers; None, with a note at the first, where the device or the driver does not know."""
        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            self.note(call.__name__, f"NVML: {call.__name__}: {error}; left out")
            return None


def visible(names: str | None) -> list[Any]:
    """NVML's handles of the devices that CUDA_VISIBLE_DEVICES names, by number or by the start of a UUID; None: all.

    As in CUDA, what follows a name that there is not does not count. Numbers are those of CUDA only where it counts in
    the order of the bus (CUDA_DEVICE_ORDER=PCI_BUS_ID) or all devices are alike.
    """
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if names is None:
        return handles
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    found: list[Any] = []
    for name in (part.strip() for part in names.split(",")):
        numbered = name.isdecimal() and int(name) < len(handles)
        named = [place for place, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
        if not numbered and len(named) != 1:
            break
        found.append(handles[int(name) if numbered else named[0]])
    return found
