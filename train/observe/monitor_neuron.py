"""The child process neuron-monitor, which writes a line of JSON every second, and the parser of these lines.

The parser follows the Neuron SDK's "Neuron Monitor User Guide", except where published recordings from trn1 and inf2
differ from it. It has not been run on hardware.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from train.storage.atomic_io import warn_once

TOOL, FOLDER = "neuron-monitor", "/opt/aws/neuron/bin"
RUNTIME_GROUPS = ("neuroncore_counters", "memory_used", "execution_stats")
ECC_COUNTERS = ("mem_ecc_uncorrected", "sram_ecc_uncorrected")
STOP_S = 3.0  # seconds between SIGTERM and SIGKILL for the tool
# Two error types are not read: `generic`, which grows by tens of thousands per second in recordings of healthy
# executions, and `transient`, which counts corrected errors.
TYPED_ERRORS = {
    "hardware": "hardware errors",
    "runtime": "Neuron runtime errors",
    "model": "model errors",
}
FAILED = {
    "timed_out": "executions timed out",
    "incorrect_input": "executions rejected because of their input",
    "failed_to_queue": "executions that could not be queued",
}

# by name: a sum, and the number of devices or machines summed
Totals = dict[str, tuple[float, float]]


@dataclass
class Reading:
    """One reading of the devices of a machine, from any source. Unknown values are left out."""

    totals: Totals = field(default_factory=dict)
    # new errors by device and kind; None if this source does not count them
    errors: Counter[str] | None = None
    warnings: tuple[str, ...] = ()  # alarms that are not errors

    def add(self, errors: dict[str, int]) -> None:
        """Add the error counts that are above 0."""
        self.errors = Counter(self.errors) + Counter(errors)


# ---- the child -----------------------------------------------------------------------------------------------------


def readings(
    stop: threading.Event, *, num_devices: int, run_tag: str | None, period_s: float
) -> Iterator[Reading]:
    """Start neuron-monitor and yield its readings until `stop` is set.

    `num_devices` is the number of this machine's Neuron devices that the run uses, and `run_tag` is NEURON_PROCESS_TAG
    of the run's processes. Raises OSError if the tool is missing, does not start or ends.

    The child must not outlive the run: it is terminated when this function or the interpreter ends. If the run is
    killed, the tool gets SIGPIPE when it writes its next line. There is no `preexec_fn` that ties the child to the run,
    because it could deadlock in a process with threads.
    """
    tool = shutil.which(TOOL, path=os.pathsep.join([os.environ.get("PATH", os.defpath), FOLDER]))
    if tool is None:
        raise FileNotFoundError(f"{TOOL} is neither on PATH nor in {FOLDER}")
    with tempfile.TemporaryDirectory(
        prefix="neuron-monitor-", ignore_cleanup_errors=True
    ) as folder:
        config, messages = Path(folder) / "config.json", Path(folder) / "stderr.txt"
        metrics = [{"type": name} for name in RUNTIME_GROUPS]
        wanted = {
            "period": f"{period_s:g}s",
            "neuron_runtimes": [
                {"tag_filter": ".*", "metrics": metrics}
            ],  # all processes: `ours` selects the run's
            "system_metrics": [{"type": "neuron_hw_counters"}],
        }
        config.write_text(json.dumps(wanted))
        with messages.open("wb") as stderr:
            child = subprocess.Popen(
                [tool, "-c", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        atexit.register(child.terminate)
        with child:
            try:
                assert child.stdout is not None
                parser = LineParser(num_devices, run_tag)
                for line in child.stdout:  # one line every `period_s`
                    if stop.is_set():
                        return
                    reading = parser.parse(line)
                    if reading is not None:
                        yield reading
                last = messages.read_text(errors="replace").strip().splitlines()[-1:]
                why = ", ".join(
                    [f"exit code {child.wait(STOP_S)}", *(line[:200] for line in last)]
                )
                raise ChildProcessError(f"{TOOL} ended ({why})")
            finally:
                atexit.unregister(child.terminate)
                child.terminate()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(STOP_S)
                child.kill()


# ---- a line --------------------------------------------------------------------------------------------------------


@dataclass
class LineParser:
    """The parser of the tool's lines. If a group of values is missing, null or has an error, its values are unknown."""

    num_devices: int  # the run's devices on this machine; the tool may leave out idle cores
    run_tag: str | None
    ecc: dict[tuple[int, str], int] = field(default_factory=dict)

    def parse(self, line: bytes) -> Reading | None:
        """Return the reading in a line. If the line is not a report, return None, and warn the first time."""
        reading = Reading()
        try:
            report = json.loads(line)
            counters = self.group(report.get("system_data") or {}, "neuron_hw_counters")
            if counters is not None:
                reading.add(self.new_ecc(counters))
            # only to warn: without a driver, this group has an error
            self.group(report, "neuron_hardware_info")
            self.read_processes(reading, self.ours(report.get("neuron_runtime_data") or []))
        except (
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            ArithmeticError,
            RecursionError,
        ) as error:
            if line.strip():
                warn_once(
                    "line",
                    f"{TOOL} wrote a line that is not a report; such lines are skipped: {error!r:.200}",
                )
            return None
        return reading

    def ours(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the processes with the run's tag; if there are none, those whose tag is missing or is their pid."""
        tagged = [
            entry
            for entry in entries
            if self.run_tag and entry.get("neuron_runtime_tag") == self.run_tag
        ]
        if tagged:
            return tagged
        untagged = [
            entry
            for entry in entries
            if entry.get("neuron_runtime_tag") in (None, "", str(entry.get("pid")))
        ]
        if untagged and self.run_tag:
            warn_once(
                "tag",
                f"no Neuron process has the tag {self.run_tag}: those without a tag are read instead",
            )
        return untagged

    def read_processes(self, reading: Reading, entries: list[dict[str, Any]]) -> None:
        """Add the processes to the reading. Utilisation and memory are unknown unless all processes report them."""
        # percent by core; several processes may list the same core
        busy: dict[str, float] = defaultdict(float)
        flops: list[Any] = []
        memory: list[Any] = []
        num_counted = 0
        for entry in entries:
            if entry.get("error"):
                warn_once("process", f"{TOOL} on process {entry.get('pid')}: {entry['error']}")
            counters, used, stats = (
                self.group(entry.get("report") or {}, name) or {} for name in RUNTIME_GROUPS
            )
            listed = counters.get("neuroncores_in_use")
            num_counted += listed is not None
            # The key `v3d` describes the physical cores; all other keys are core numbers.
            cores = {core: values for core, values in (listed or {}).items() if core.isdecimal()}
            for core, values in cores.items():
                busy[core] += values.get("neuroncore_utilization") or 0.0
                # The guide names the key `flops`, one recording has `effective_flops`, others have neither.
                flops.append(values.get("flops", values.get("effective_flops")))
            memory.append((used.get("neuron_runtime_used_bytes") or {}).get("neuron_device"))
            active = [
                core for core, values in cores.items() if values.get("neuroncore_utilization")
            ] or list(cores)
            name = (
                f"NeuronCore {', '.join(active)}"
                if active
                else f"Neuron process {entry.get('pid')}"
            )
            if stats:
                reading.add({f"{name}: {what}": count for what, count in errors_of(stats).items()})
        if entries and num_counted == len(entries):
            shares = [min(1.0, percent / 100) for percent in busy.values()]
            reading.totals["device_utilisation"] = (
                sum(shares),
                max(self.num_devices, sum(map(bool, shares))),
            )
            known = [value for value in flops if value is not None]
            if known:
                reading.totals["device_flops_per_s"] = (sum(known), self.num_devices)
        if memory and None not in memory:
            reading.totals["device_memory_bytes"] = (sum(memory), self.num_devices)

    def group(self, groups: dict[str, Any], name: str) -> dict[str, Any] | None:
        group: dict[str, Any] | None = groups.get(name)
        if group and group.get("error"):
            warn_once(name, f"{TOOL} could not read {name}: {group['error']}")
            return None
        return group

    def new_ecc(self, counters: dict[str, Any]) -> dict[str, int]:
        """Return the new uncorrected errors since the last line; counts in the first line may be old."""
        # The guide does not say whether the counts are totals. AWS's neuron-monitor-prometheus.py adds them up, as if
        # they were counts of one period. In both cases, a rise is new, and so is any count after a fall.
        new = {}
        for device in counters.get("neuron_devices") or []:
            for name in ECC_COUNTERS:
                index, count = device["neuron_device_index"], device.get(name)
                if count is not None:
                    before = self.ecc.get((index, name), count)
                    increase = count - before if count >= before else count
                    new[f"Neuron device {index}: uncorrected memory errors ({name})"] = increase
                    self.ecc[index, name] = count
        return new


def errors_of(stats: dict[str, Any]) -> dict[str, int]:
    """Count the failed executions of one period by cause."""
    # The tool counts failures by outcome and by type. Where both may count the same failure, the larger count is used.
    outcomes, types = stats.get("execution_summary") or {}, stats.get("error_summary") or {}
    typed = {what: types.get(name) or 0 for name, what in TYPED_ERRORS.items()}
    numeric = (
        outcomes.get("completed_with_num_err"),
        types.get("numerical"),
        types.get("numeric"),
    )
    return {
        "executions completed with numerical errors (NaN)": max(count or 0 for count in numeric),
        **typed,
        **{what: outcomes.get(name) or 0 for name, what in FAILED.items()},
        "executions completed with other errors": (outcomes.get("completed_with_err") or 0)
        - sum(typed.values()),
    }
