"""The hardware monitor of one machine during a run: utilisation, memory, FLOP/s and errors.

neuron   reads neuron-monitor, see `train.observe.monitor_neuron`; not tested on hardware
nvidia   reads NVML
cpu      reads no device

All kinds also read the host's CPU and memory. One process per machine reads about once a second, in a thread that does
not slow training. Values that a kind cannot read are left out. If the devices cannot be read, one warning is logged;
the host is still read, and training continues.
"""

from __future__ import annotations

import logging
import platform
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

import psutil
import pynvml

from train.observe import monitor_neuron
from train.observe.monitor_neuron import Reading, Totals
from train.storage.atomic_io import warn_once

logger = logging.getLogger("train")

DEVICE = ("device_utilisation", "device_flops_per_s", "device_memory_bytes")
NAMES = (*DEVICE, "cpu_utilisation", "host_memory_bytes", "device_errors")
# averaged; of others, the latest is used
OVER_TIME = (
    "device_utilisation",
    "device_flops_per_s",
    "cpu_utilisation",
)
CLOSE_S = 8.0  # seconds to wait for the thread to end; sources stop sooner

# yields a reading about once a second until the event is set
Source = Callable[[threading.Event], Iterator[Reading]]


@dataclass(frozen=True)
class HardwareSample:
    """One machine's readings since its last sample. The values of several machines can be summed."""

    totals: Totals = field(default_factory=dict)
    num_alarms: float = 0.0

    def values(self) -> list[float]:
        """Return the sample as a list of fixed length, to be summed over the ranks."""
        return [number for name in NAMES for number in self.totals.get(name, (0.0, 0.0))] + [
            self.num_alarms
        ]

    @classmethod
    def from_values(cls, values: Sequence[float]) -> HardwareSample:
        pairs = {
            name: (values[2 * index], values[2 * index + 1]) for index, name in enumerate(NAMES)
        }
        return cls({name: pair for name, pair in pairs.items() if pair[1]}, values[-1])

    def fields(self, *, peak_flops_per_s: float | None) -> dict[str, float]:
        """Return the hardware fields of a train line: means per device or machine, and the total of new errors.

        `hardware_mfu` is the FLOP/s that the devices report, as a share of their peak. `mfu` counts only the FLOPs that
        the model needs.
        """
        known = {
            name: total / num
            for name, (total, num) in self.totals.items()
            if name != "device_errors"
        }
        flops = known.pop("device_flops_per_s", None)
        if flops is not None and peak_flops_per_s is not None:
            known["hardware_mfu"] = flops / peak_flops_per_s
        if "device_errors" in self.totals:
            known["device_errors"] = self.totals["device_errors"][0]
        return known


class Monitor:
    """A thread that reads the devices (through a source) and the host, and collects the readings.

    Only the first rank of a machine has a source; without one, a monitor reads nothing. A monitor is a context manager.
    Its methods neither block training nor raise.
    """

    def __init__(self, source: Source | None = None, *, period_s: float = 1.0) -> None:
        self.source, self.period_s = source, period_s
        self.stop, self.lock = threading.Event(), threading.Lock()
        # OVER_TIME values since the last sample
        self.series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.latest: Totals = {}
        # errors since the last sample; None if no source counts them
        self.num_errors: float | None = None
        # alarms since the last call to `alarms`, and their counts
        self.waiting: Counter[str] = Counter()
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
        psutil.cpu_percent()  # the next call returns the mean since this one
        try:
            for reading in self.source(self.stop) if self.source is not None else ():
                self.add(reading)
                self.add(host_reading())
        except Exception as error:  # a failed reading must never fail a run
            logger.warning(
                f"monitor: {type(error).__name__}: {error}; devices are no longer read; training continues"
            )
        with self.lock:
            self.latest = {name: pair for name, pair in self.latest.items() if name not in DEVICE}
            self.num_errors = self.num_errors or None
        while not self.stop.wait(self.period_s):
            self.add(host_reading())

    def add(self, reading: Reading) -> None:
        with self.lock:
            for name, (total, num) in reading.totals.items():
                # fails for a huge integer, which ends the source, not the run
                pair = (
                    float(total),
                    float(num),
                )
                if name in OVER_TIME:
                    self.series[name].append(pair)
                else:
                    self.latest[name] = pair
            if reading.errors is not None:
                self.num_errors = (self.num_errors or 0.0) + float(sum(reading.errors.values()))
                self.waiting.update(reading.errors)
            self.waiting.update(dict.fromkeys(reading.warnings, 0))

    def read(self) -> HardwareSample:
        """Return a sample: means since the last call, the latest memory use, new errors and the number of alarms."""
        with self.lock:
            totals = dict(self.latest)
            for name, pairs in self.series.items():
                totals[name] = (fmean(total for total, _ in pairs), fmean(num for _, num in pairs))
            if self.num_errors is not None:
                totals["device_errors"] = (self.num_errors, 1.0)
                self.num_errors = 0.0
            self.series.clear()
            return HardwareSample(totals, float(len(self.waiting)))

    def alarms(self) -> list[str]:
        """Return the alarms since the last call, one line each."""
        with self.lock:
            alarms, self.waiting = self.waiting, Counter()
        return [
            f"{platform.node()}: {what}" + (f": {count}" if count else "")
            for what, count in alarms.items()
        ]


def open_monitor(
    kind: str,
    *,
    num_devices: int,
    is_first_on_machine: bool,
    run_tag: str | None = None,
    period_s: float = 1.0,
) -> Monitor:
    """Return a machine's monitor on its first rank, an idle one on its other ranks. `run_tag` is NEURON_PROCESS_TAG."""
    sources: dict[str, Source] = {
        "neuron": partial(
            monitor_neuron.readings, num_devices=num_devices, run_tag=run_tag, period_s=period_s
        ),
        "nvidia": partial(nvidia_readings, num_devices=num_devices, period_s=period_s),
        "cpu": lambda _stop: iter(()),
    }
    return Monitor(sources[kind] if is_first_on_machine else None, period_s=period_s)


# ---- sources -------------------------------------------------------------------------------------------------------


def host_reading() -> Reading:
    memory = psutil.virtual_memory()
    used = {
        "cpu_utilisation": psutil.cpu_percent() / 100,
        "host_memory_bytes": float(memory.total - memory.available),
    }
    return Reading({name: (value, 1.0) for name, value in used.items()})


def nvidia_readings(
    stop: threading.Event, *, num_devices: int, period_s: float
) -> Iterator[Reading]:
    """Yield NVML's readings of the first `num_devices` GPUs that CUDA lists. NVML does not count FLOPs."""
    pynvml.nvmlInit()
    errors_before: dict[int, int] = {}  # uncorrected memory errors by GPU index
    hot: set[int] = set()

    def ask(call: Callable[..., Any], *arguments: Any) -> Any:
        """Return NVML's answer. If the device or the driver does not support the call, warn once and return None."""
        try:
            return call(*arguments)
        except pynvml.NVMLError as error:
            warn_once(
                call.__name__, f"NVML: {call.__name__}: {error}; the report will lack this value"
            )
            return None

    heat = (
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown
        | pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    )
    uncorrected = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
    try:
        gpus = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in cuda_uuids()[:num_devices]]
        while not stop.wait(period_s):
            reading, shares, held = Reading(), [], []
            for index, gpu in enumerate(gpus):
                if (rates := ask(pynvml.nvmlDeviceGetUtilizationRates, gpu)) is not None:
                    shares.append(rates.gpu / 100)
                if (memory := ask(pynvml.nvmlDeviceGetMemoryInfo, gpu)) is not None:
                    held.append(float(memory.used))
                if (
                    count := ask(pynvml.nvmlDeviceGetTotalEccErrors, gpu, *uncorrected)
                ) is not None:
                    reading.add(
                        {
                            f"GPU {index}: uncorrected memory errors": count
                            - errors_before.get(index, count)
                        }
                    )
                    errors_before[index] = count
                reasons = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu) or 0
                # reported once per GPU, since throttling comes and goes
                if reasons & heat and index not in hot:
                    hot.add(index)
                    reading.warnings += (f"GPU {index}: thermal throttling",)
            for name, values in (("device_utilisation", shares), ("device_memory_bytes", held)):
                if values:
                    reading.totals[name] = (sum(values), len(values))
            yield reading
    finally:
        pynvml.nvmlShutdown()


def cuda_uuids() -> list[str]:
    """Return the UUIDs of the GPUs that CUDA lists, in CUDA's order and NVML's format."""
    import torch  # imported late: most kinds of monitor do not need it

    return [
        f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        for index in range(torch.cuda.device_count())
    ]
