"""The hardware monitor of one machine during a run: utilisation, memory and uncorrected memory errors.

neuron   reads neuron-monitor, see `train.observe.monitor_neuron`; not tested on hardware
nvidia   reads NVML
cpu      reads no device

All kinds also read the host's CPU and memory. One process per machine reads about once a second, in a thread that does
not slow training. Values that a kind cannot read are left out. If the devices cannot be read, one warning is logged;
the host is still read, and training continues.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import psutil
import pynvml

from train.observe import monitor_neuron
from train.observe.monitor_neuron import Totals

logger = logging.getLogger("train")

MEANS = ("device_utilisation", "device_memory_bytes", "cpu_utilisation", "host_memory_bytes")
ERRORS = "device_errors"
CLOSE_S = 8.0  # seconds to wait for the thread to end; sources stop sooner
UNCORRECTED = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)

# yields once a second until the event is set
Source = Callable[[threading.Event], Iterator[Totals]]


class Monitor:
    """A thread that reads the devices (through a source) and the host, and collects the readings.

    Only the first rank of a machine has a source; without one, a monitor reads nothing. A monitor is a context manager.
    Its methods neither block training nor raise.
    """

    def __init__(self, source: Source | None = None, *, period_s: float = 1.0) -> None:
        self.source = source
        self.period_s = period_s
        self.stop = threading.Event()
        self.readings: deque[Totals] = deque()  # since the last call to `read`
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
            assert self.source is not None
            for reading in self.source(self.stop):
                self.readings.append(reading | host_reading())
        except Exception as error:  # a failed reading must never fail a run
            logger.warning(
                f"monitor: {type(error).__name__}: {error}; devices are no longer read; training continues"
            )
        while not self.stop.wait(self.period_s):
            self.readings.append(host_reading())

    def read(self) -> list[float]:
        """Return the readings since the last call as numbers for `hardware_fields`, to be summed over machines."""
        readings = [self.readings.popleft() for _ in range(len(self.readings))]
        numbers: list[float] = []
        for name in MEANS:
            pairs = [reading[name] for reading in readings if name in reading]
            mean = (0.0, 0.0)  # of totals, and of numbers of devices
            if pairs:
                totals, nums = zip(*pairs, strict=True)
                mean = (fmean(totals), fmean(nums))
            numbers += mean
        errors = [reading[ERRORS][0] for reading in readings if ERRORS in reading]
        numbers.append(sum(errors))
        numbers.append(float(len(errors)))
        return numbers


def hardware_fields(sums: Sequence[float]) -> dict[str, float]:
    """Return the fields of a train line from sums over machines: means per device or machine, and all new errors."""
    *means, errors, num_errors = sums
    known = {}
    for name, total, num in zip(MEANS, means[::2], means[1::2], strict=True):
        if num:
            known[name] = total / num
    if num_errors:
        known[ERRORS] = errors
    return known


def open_monitor(
    kind: str,
    *,
    num_devices: int,
    is_first_on_machine: bool,
    run_tag: str | None = None,
    period_s: float = 1.0,
) -> Monitor:
    """Return a machine's monitor on its first rank, an idle one on its other ranks. `run_tag` is NEURON_PROCESS_TAG."""
    if not is_first_on_machine:
        return Monitor()
    sources: dict[str, Source] = {
        "neuron": partial(
            monitor_neuron.readings, num_devices=num_devices, run_tag=run_tag, period_s=period_s
        ),
        "nvidia": partial(nvidia_readings, num_devices=num_devices, period_s=period_s),
        "cpu": lambda _stop: iter(()),
    }
    return Monitor(sources[kind], period_s=period_s)


# ---- sources -------------------------------------------------------------------------------------------------------


def host_reading() -> Totals:
    memory = psutil.virtual_memory()
    return {
        "cpu_utilisation": (psutil.cpu_percent() / 100, 1),
        "host_memory_bytes": (memory.total - memory.available, 1),
    }


def nvidia_readings(
    stop: threading.Event, *, num_devices: int, period_s: float
) -> Iterator[Totals]:
    """Yield NVML's readings of the first `num_devices` GPUs that CUDA lists."""
    pynvml.nvmlInit()
    try:
        gpus = [handle_of(uuid) for uuid in cuda_uuids()[:num_devices]]
        # Errors of before the run are not the run's.
        before = asked(gpus, pynvml.nvmlDeviceGetTotalEccErrors, *UNCORRECTED)
        while not stop.wait(period_s):
            rates = asked(gpus, pynvml.nvmlDeviceGetUtilizationRates)
            memories = asked(gpus, pynvml.nvmlDeviceGetMemoryInfo)
            errors = asked(gpus, pynvml.nvmlDeviceGetTotalEccErrors, *UNCORRECTED)
            reading: Totals = {}
            if rates:
                reading["device_utilisation"] = (sum(each.gpu for each in rates) / 100, len(rates))
            if memories:
                reading["device_memory_bytes"] = (sum(each.used for each in memories), len(gpus))
            if errors:
                reading[ERRORS] = (sum(errors) - sum(before), 1)
            before = errors
            yield reading
    finally:
        pynvml.nvmlShutdown()


def asked(gpus: Sequence[Any], call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return NVML's answer for each GPU; [] if a device or the driver does not support the call."""
    try:
        return [call(gpu, *arguments) for gpu in gpus]
    except pynvml.NVMLError:
        return []


def handle_of(uuid: str) -> Any:
    """Return NVML's handle of a GPU, or of a part of one (MIG), whose UUID has another prefix."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError_NotFound:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def cuda_uuids() -> list[str]:
    """Return the UUIDs of the devices that CUDA lists, in CUDA's order, without NVML's prefix."""
    import torch  # imported late: most kinds of monitor do not need it

    devices = range(torch.cuda.device_count())
    return [str(torch.cuda.get_device_properties(index).uuid) for index in devices]
