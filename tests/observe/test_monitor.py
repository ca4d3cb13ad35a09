"""The monitor: what it reads from each source, what it leaves out, and that nothing it finds stops a run.

`recorded/monitor` holds neuron-monitor lines of the shape that the Neuron SDK's guide documents, with made-up values;
`effective_flops.jsonl` has the keys that published recordings show instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pynvml
import pytest
from running import eventually

from train.observe import monitor
from train.observe.monitor import Monitor, hardware_fields, open_monitor
from train.observe.monitor_neuron import Totals, totals_of

RECORDED = Path(__file__).parent.parent / "recorded" / "monitor"
PERIOD_S = 0.02
DEADLINE_S = 90.0  # never waited for unless a test fails
HOST_ALONE = {"cpu_utilisation", "host_memory_bytes"}


def recorded(name: str) -> bytes:
    return (RECORDED / f"{name}.jsonl").read_bytes().splitlines()[0]


def monitored(*readings: Totals) -> list[float]:
    """What a monitor says after these readings."""
    watch = Monitor()
    watch.readings.extend(readings)
    return watch.read()


def test_readings_are_means_over_time_and_machines_and_errors_are_added_up():
    first = monitored(
        {"device_utilisation": (2.0, 2), "device_memory_bytes": (3e9, 2), "device_errors": (2, 1)},
        {"device_utilisation": (1.0, 2), "device_memory_bytes": (3e9, 2), "device_errors": (1, 1)},
    )
    second = monitored({"device_utilisation": (0.5, 1), "device_memory_bytes": (1e9, 1)})
    sums = [sum(parts) for parts in zip(first, second, Monitor().read(), strict=True)]
    expected = {"device_utilisation": 2 / 3, "device_memory_bytes": 4e9 / 3, "device_errors": 3}
    assert hardware_fields(sums) == pytest.approx(expected)
    assert hardware_fields(Monitor().read()) == {}  # what has no source is left out


@pytest.mark.parametrize(
    ("name", "devices", "run_tag", "utilisation", "memory_bytes"),
    [
        ("trn1", 2, "run_a", 1.04, 14e9),
        ("trn2", 4, "run_a", 0.82, None),  # two of the four idle, and not listed
        ("effective_flops", 1, None, None, None),
    ],
)
def test_lines_of_neuron_monitor_give_the_figures_of_all_ranks(
    name, devices, run_tag, utilisation, memory_bytes
):
    report = json.loads(recorded(name))
    totals = totals_of(report, num_devices=devices, run_tag=run_tag)
    assert {num for _, num in totals.values()} == {devices}
    if utilisation is not None:
        assert totals["device_utilisation"][0] == pytest.approx(utilisation)
    if memory_bytes is not None:
        assert totals["device_memory_bytes"][0] == memory_bytes


# ---- the tool ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a neuron-monitor on PATH that writes a line again and again, and does not end by itself."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "line").write_bytes(recorded("trn1") + b"\n")
    (folder / "neuron-monitor").write_text(
        f"#!{sys.executable} -IS\n"
        "import json, os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "assert sys.argv[1] == '-c' and json.load(open(sys.argv[2]))['period']\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        f"line = open({str(folder / 'line')!r}, 'rb').read()\n"
        "while True: os.write(1, line); time.sleep(0.02)\n"
    )
    (folder / "neuron-monitor").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    yield tmp_path / "pid"
    pid = tmp_path / "pid"
    if pid.is_file() and psutil.pid_exists(int(pid.read_text())):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def opened(kind: str = "neuron", *, num_devices: int = 2) -> Monitor:
    return open_monitor(
        kind, num_devices=num_devices, is_first_on_machine=True, run_tag="run_a", period_s=PERIOD_S
    )


def fields_with(watch: Monitor, name: str) -> dict[str, float]:
    """Return the fields of the first reading that has the one named."""

    def known_fields() -> dict[str, float] | None:
        fields = hardware_fields(watch.read())
        return fields if name in fields else None

    fields: dict[str, float] = eventually(known_fields)
    return fields


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_tool_does_not_outlive_a_run_that_is_killed(tool):
    run = (
        "import os, signal, sys, time\n"
        "from train.observe.monitor import open_monitor\n"
        "watch = open_monitor('neuron', num_devices=2, is_first_on_machine=True, run_tag='run_a').__enter__()\n"
        "while not watch.read()[0]: time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", run], cwd=RECORDED.parents[2], timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    eventually(lambda: is_gone(int(tool.read_text())))


@pytest.mark.parametrize(
    ("tool_says", "kind", "said"),
    [
        (None, "neuron", "neither on PATH"),
        (b"#!/bin/sh\necho panic\n", "neuron", "ended (exit code 0)"),
        (None, "nvidia", "NVML"),
    ],
)
def test_a_tool_or_driver_that_fails_is_one_note_and_the_host_is_still_read(
    tool_says, kind, said, log, tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("train.observe.monitor_neuron.FOLDER", str(tmp_path))
    missing = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=missing))
    if tool_says is not None:
        (tmp_path / "neuron-monitor").write_bytes(tool_says)
        (tmp_path / "neuron-monitor").chmod(0o755)
    with opened(kind) as watch:
        assert set(fields_with(watch, "cpu_utilisation")) == HOST_ALONE
    (note,) = log.records
    assert said in note.message and "training continues" in note.message


def test_without_a_device_the_host_is_read_by_one_rank_of_a_machine(log):
    with opened("cpu", num_devices=1) as watch:
        fields = fields_with(watch, "cpu_utilisation")
    assert set(fields) == HOST_ALONE and 0 <= fields["cpu_utilisation"] <= 1
    total = psutil.virtual_memory().total
    assert psutil.Process().memory_info().rss < fields["host_memory_bytes"] < total
    with open_monitor("neuron", num_devices=2, is_first_on_machine=False) as watch:
        assert not watch.thread.is_alive() and hardware_fields(watch.read()) == {}
    assert not log.records


# ---- NVML ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Return three devices, in the order of NVML; their keys are what they answer."""
    in_cudas_order = ["ab02", "aa01", "cc03"]
    monkeypatch.setattr(monitor, "cuda_uuids", lambda: in_cudas_order)
    devices = {
        "GPU-aa01": {"gpu": 80, "used": 10_000, "ecc": 7},
        "GPU-ab02": {"gpu": 40, "used": 30_000, "ecc": 0},
        "GPU-cc03": {"gpu": 0, "used": 50_000, "ecc": 0},
    }

    def errors(device: dict[str, Any], *_: int) -> int:
        if "ecc" not in device:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(device["ecc"])

    def values(device: dict[str, Any]) -> SimpleNamespace:
        return SimpleNamespace(**device)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", values)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", values)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEccErrors", errors)

    known = dict(devices)

    def handle(uuid: str) -> dict[str, Any]:
        if uuid not in known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return known[uuid]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", devices.clear)
    return devices


def test_a_part_of_a_gpu_is_found_by_its_own_uuid(gpus, monkeypatch):
    with pytest.raises(pynvml.NVMLError_NotFound):
        monitor.handle_of("no such device")
    monkeypatch.setattr(monitor, "cuda_uuids", lambda: ["dd04"])
    gpus["MIG-dd04"] = {"used": 7_000}
    handle_of_gpu = pynvml.nvmlDeviceGetHandleByUUID

    def handle(uuid: str) -> Any:
        return gpus["MIG-dd04"] if uuid == "MIG-dd04" else handle_of_gpu(uuid)

    def no_rates(_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", handle)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", no_rates)
    with opened("nvidia", num_devices=1) as watch:
        fields = fields_with(watch, "device_memory_bytes")
    assert fields["device_memory_bytes"] == 7_000
    assert "device_utilisation" not in fields and "device_errors" not in fields


def test_nvml_gives_the_devices_of_the_run_and_its_new_errors(gpus, log):
    first = gpus["GPU-aa01"]
    with opened("nvidia", num_devices=2) as watch:
        fields = fields_with(watch, "device_utilisation")
        first["ecc"] = 9
        eventually(lambda: hardware_fields(watch.read()).get("device_errors") == 2)
    assert fields["device_utilisation"] == pytest.approx(0.6)
    assert fields["device_memory_bytes"] == 20_000
    assert fields["device_errors"] == 0  # errors of before the run are not the run's
    assert not gpus and not log.records  # it was shut down
