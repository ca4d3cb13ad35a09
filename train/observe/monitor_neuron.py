"""The child process neuron-monitor, which writes a line of JSON every second.

The reader follows the Neuron SDK's "Neuron Monitor User Guide". It has not been run on hardware.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

TOOL, FOLDER = "neuron-monitor", "/opt/aws/neuron/bin"
METRICS = [{"type": "neuroncore_counters"}, {"type": "memory_used"}]

# By name: a sum, and the number of devices or machines summed. Unknown values are left out.
Totals = dict[str, tuple[float, float]]


def readings(
    stop: threading.Event, *, num_devices: int, run_tag: str | None, period_s: float
) -> Iterator[Totals]:
    """Start neuron-monitor and yield its readings until `stop` is set.

    `num_devices` is the number of this machine's Neuron devices that the run uses, and `run_tag` is NEURON_PROCESS_TAG
    of the run's processes. Raises OSError if the tool is missing, does not start or ends.

    The child ends with this function or the interpreter. If the run is killed, the tool gets SIGPIPE when it writes its
    next line.
    """
    tool = shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), FOLDER]))
    if tool is None:
        raise FileNotFoundError(f"{TOOL} is neither on PATH nor in {FOLDER}")
    # `totals_of` selects the run's processes
    runtimes = [{"tag_filter": ".*", "metrics": METRICS}]
    wanted = {"period": f"{period_s:g}s", "neuron_runtimes": runtimes, "system_metrics": []}
    with tempfile.TemporaryDirectory(prefix=f"{TOOL}-") as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(wanted))
        child = subprocess.Popen(
            [tool, "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        atexit.register(child.kill)
        with child:
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    if stop.is_set():
                        return
                    # no such values
                    with suppress(ValueError, KeyError, TypeError, AttributeError):
                        yield totals_of(json.loads(line), num_devices=num_devices, run_tag=run_tag)
                raise ChildProcessError(f"{TOOL} ended (exit code {child.wait()})")
            finally:
                atexit.unregister(child.kill)
                child.kill()


def totals_of(report: dict[str, Any], *, num_devices: int, run_tag: str | None) -> Totals:
    """Return the utilisation and memory of the run's processes; of all processes if none has the run's tag.

    Raises an error if one of them lacks a value.
    """
    entries = report["neuron_runtime_data"]
    tagged = [entry for entry in entries if entry["neuron_runtime_tag"] == run_tag]
    busy: Counter[str] = Counter()  # percent by core; several processes may list the same core
    memory_bytes = 0
    for entry in tagged or entries:
        groups = entry["report"]
        for core, values in groups["neuroncore_counters"]["neuroncores_in_use"].items():
            if core.isdecimal():  # `v3d` describes the physical cores
                busy[core] += values["neuroncore_utilization"]
        memory_bytes += groups["memory_used"]["neuron_runtime_used_bytes"]["neuron_device"]
    share = sum(min(1.0, percent / 100) for percent in busy.values())
    return {
        "device_utilisation": (share, num_devices),  # the tool may leave out idle cores
        "device_memory_bytes": (memory_bytes, num_devices),
    }
