"""The monitor: what it reads from each source, what it leaves out, and that nothing it finds stops a run.

`recorded/monitor` holds neuron-monitor lines of the shape that the Neuron SDK's guide documents, with made-up values;
`effective_flops.jsonl` has the keys that published recordings show instead.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pynvml
import pytest
from running import eventually

from train.observe import monitor
from train.observe.monitor import HardwareSample, Monitor, open_monitor
from train.observe.monitor_neuron import LineParser, Reading

RECORDED = Path(__file__).parent.parent / "recorded" / "monitor"
PERIOD_S = 0.02
DEADLINE_S = 90.0  # never waited for unless a test fails
HOST_ALONE = {"cpu_utilisation", "host_memory_bytes"}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.storage.atomic_io.said", set())


def recorded(name: str) -> list[bytes]:
    return (RECORDED / f"{name}.jsonl").read_bytes().splitlines()


def parse(name: str, *, num_devices: int = 2, run_tag: str | None = "run_a") -> list[Reading]:
    parser = LineParser(num_devices, run_tag)
    result = [parser.parse(line) for line in recorded(name)]
    return [reading for reading in result if reading is not None]


def gathered(*readings: Reading) -> HardwareSample:
    """What a monitor says after these readings."""
    watch = Monitor()
    for reading in readings:
        watch.add(reading)
    return watch.read()


# ---- samples -------------------------------------------------------------------------------------------------------


def test_machines_added_up_are_one_machine_with_all_devices():
    a = {
        "device_utilisation": (1.2, 2.0),
        "device_memory_bytes": (3e9, 2.0),
        "device_flops_per_s": (5e13, 2.0),
    }
    b = {
        "device_utilisation": (0.4, 1.0),
        "device_memory_bytes": (1e9, 1.0),
        "device_flops_per_s": (2e13, 1.0),
    }
    first, second = (
        gathered(Reading(a, errors=Counter(x=2))),
        gathered(Reading(b, errors=Counter(y=1))),
    )
    nothing = HardwareSample().values()  # of the ranks that have no monitor
    added = [sum(parts) for parts in zip(first.values(), second.values(), nothing, strict=True)]
    assert added[-1] == 2
    expected = {"device_utilisation": 1.6 / 3, "device_memory_bytes": 4e9 / 3, "device_errors": 3}
    expected["hardware_mfu"] = 7e13 / (3 * 95e12)
    assert HardwareSample.from_values(added).fields(peak_flops_per_s=95e12) == pytest.approx(
        expected
    )
    assert HardwareSample().fields(peak_flops_per_s=1e12) == {}  # what has no source is left out
    assert (
        gathered(Reading({"device_flops_per_s": (1e12, 1.0)})).fields(peak_flops_per_s=None) == {}
    )


def test_utilisation_is_a_mean_over_time_memory_the_latest_and_an_alarm_told_once():
    watch = Monitor()
    for share, memory, errors in ((1.0, 5.0, 2), (1.0, 6.0, 0), (0.25, 7.0, 1)):
        totals = {"device_utilisation": (share, 1.0), "device_memory_bytes": (memory, 1.0)}
        watch.add(Reading(totals, Counter(x=errors)))
    expected = {"device_utilisation": 0.75, "device_memory_bytes": 7.0, "device_errors": 3}
    assert watch.read().fields(peak_flops_per_s=None) == expected
    assert watch.alarms() == [f"{platform.node()}: x: 3"]
    assert watch.read().fields(peak_flops_per_s=None) == {
        "device_memory_bytes": 7.0,
        "device_errors": 0,
    }
    assert watch.alarms() == [] and watch.read().num_alarms == 0


# ---- neuron-monitor's lines ----------------------------------------------------------------------------------------


def test_lines_give_the_figures_of_all_ranks():
    expected = {"device_utilisation": 0.52, "device_memory_bytes": 7e9, "device_errors": 0}
    expected["hardware_mfu"] = 5e13 / (2 * 95e12)
    assert gathered(*parse("trn1")).fields(peak_flops_per_s=95e12) == pytest.approx(expected)
    (trn2,) = parse("trn2", num_devices=4)
    # two of the four idle, and not listed
    assert trn2.totals["device_utilisation"] == (
        pytest.approx(0.82),
        4,
    )
    assert trn2.totals["device_flops_per_s"] == (98e12, 4)
    # with other keys, and generic errors
    (of_a_recording,) = parse("effective_flops", num_devices=1, run_tag=None)
    assert (
        of_a_recording.totals["device_flops_per_s"] == (875590474948, 1)
        and of_a_recording.errors == {}
    )


def test_errors_are_counted_once_by_kind_and_core_and_memory_errors_when_they_rise():
    for spelling in ("numerical", "numeric"):
        (reading,) = parse(spelling)
        assert reading.errors == {
            "NeuronCore 1: executions completed with numerical errors (NaN)": 2
        }
    first, second = parse("errors")
    assert (
        first.errors
        == {
            "NeuronCore 0: hardware errors": 1,
            "NeuronCore 0: Neuron runtime errors": 2,
            "NeuronCore 0: executions timed out": 1,
            "NeuronCore 0: executions completed with other errors": 1,  # four failed, three of them have a type
        }
    )
    assert second.errors == {
        "Neuron device 0: uncorrected memory errors (sram_ecc_uncorrected)": 1
    }
    parser = LineParser(1, None)
    devices = [
        {"neuron_devices": [{"neuron_device_index": 0, "mem_ecc_uncorrected": n}]}
        for n in (4, 5, 2, 2, 0)
    ]
    # totals, or of one period
    assert [sum(parser.new_ecc(each).values()) for each in devices] == [
        0,
        1,
        2,
        0,
        0,
    ]


def test_groups_that_are_missing_null_or_carry_an_error_are_left_out(log):
    first, second = parse("broken_groups")
    # a sum over one of two ranks would be neither's nor both's
    assert first.totals == {} and second.totals == {}
    assert first.errors == {"Neuron process 1001: executions timed out": 1}
    assert second.errors is None
    assert "could not read counters" in log.text and "Neuron Driver is not installed" in log.text


def test_runs_are_told_apart_by_their_tag(log):
    # another run's devices are nobody's guess
    assert parse("trn1", run_tag="run_b")[0].totals == {}
    # its only process has no tag but its number
    assert parse("effective_flops", run_tag="run_b")[0].totals != {}
    assert log.text.count("no Neuron process has the tag run_b") == 1


# ---- the tool ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts a neuron-monitor on PATH that writes the given lines one by one, then ends or repeats the last for ever."""

    def make(*parts: bytes, repeats: bool = True, ignores: str = "", says: str = "") -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "lines").write_bytes(b"\n".join(parts) + b"\n")
        (folder / "neuron-monitor").write_text(
            f"#!{sys.executable} -IS\n"
            "import json, os, signal, sys, time\n"
            f"if {ignores == 'SIGTERM'}: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "def write(part):\n"
            "    try: os.write(1, part)\n"
            "    except BrokenPipeError:\n"
            f"        if {ignores != 'SIGPIPE'}: raise\n"
            "assert sys.argv[1] == '-c' and json.load(open(sys.argv[2]))['period']\n"
            f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
            f"lines = open({str(folder / 'lines')!r}, 'rb').readlines()\n"
            f"for line in lines: write(line[:40]); time.sleep(0.005); write(line[40:])\n"
            f"sys.stderr.write({says!r})\n"
            f"while {repeats}: time.sleep(0.02); write(lines[-1])\n"
            "sys.exit(3)\n"
        )
        (folder / "neuron-monitor").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    yield make
    pid = tmp_path / "pid"
    if pid.is_file() and psutil.pid_exists(int(pid.read_text())):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def opened(kind: str = "neuron", *, num_devices: int = 2) -> Monitor:
    return open_monitor(
        kind, num_devices=num_devices, is_first_on_machine=True, run_tag="run_a", period_s=PERIOD_S
    )


def fields_with(watch: Monitor, name: str) -> dict[str, float]:
    """Those of the first sample that has the one named."""

    def known_fields() -> dict[str, float] | None:
        fields = watch.read().fields(peak_flops_per_s=95e12)
        return fields if name in fields else None

    fields: dict[str, float] = eventually(known_fields)
    return fields


def child_of(tmp_path: Path) -> int:
    pid = tmp_path / "pid"
    return int(eventually(lambda: pid.is_file() and pid.read_text()))


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("ignores", ["", "SIGTERM"])
def test_a_tool_gives_readings_and_is_gone_after_close(tool, tmp_path, log, monkeypatch, ignores):
    monkeypatch.setattr("train.observe.monitor_neuron.STOP_S", 0.1 if ignores else 3.0)
    tool(*recorded("trn1"), ignores=ignores)
    with opened() as watch:
        fields = fields_with(watch, "device_utilisation") | fields_with(watch, "cpu_utilisation")
        pid = child_of(tmp_path)
    assert fields["device_utilisation"] == pytest.approx(0.52)
    assert fields["device_memory_bytes"] == 7e9 and fields["host_memory_bytes"] > 0
    assert not psutil.pid_exists(pid) and not log.records


def test_garbage_and_the_end_of_a_tool_are_each_noted_once_and_its_readings_stop(tool, log):
    good = recorded("trn1")[0]
    tool(
        good,
        b"panic: runtime error",
        good[:100],
        b"",
        good,
        good,
        repeats=False,
        says="first\ndriver went away",
    )
    with opened() as watch:
        eventually(lambda: len(log.records) == 2)
        fields_with(watch, "device_utilisation")
        eventually(lambda: "device_memory_bytes" not in watch.read().fields(peak_flops_per_s=None))
        assert set(fields_with(watch, "cpu_utilisation")) == HOST_ALONE  # which is still read
    garbage, ended = log.records
    assert garbage.message.startswith("neuron-monitor wrote a line that is not a report")
    assert "ended (exit code 3, driver went away)" in ended.message


@pytest.mark.parametrize(
    ("kind", "said"),
    [("neuron", "neither on PATH"), ("not to be run", "Exec format"), ("nvidia", "NVML")],
)
def test_a_missing_tool_or_driver_is_one_note(kind, said, log, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("train.observe.monitor_neuron.FOLDER", str(tmp_path))
    missing = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=missing))
    if kind == "not to be run":
        (tmp_path / "neuron-monitor").write_bytes(b"\x7fELF of another machine")
        (tmp_path / "neuron-monitor").chmod(0o755)
    with opened("nvidia" if kind == "nvidia" else "neuron") as watch:
        assert set(fields_with(watch, "cpu_utilisation")) == HOST_ALONE
        assert watch.alarms() == []
    (note,) = log.records
    assert said in note.message and "training continues" in note.message


def test_without_a_device_the_host_is_read_by_one_rank_of_a_machine(log):
    with opened("cpu", num_devices=1) as watch:
        fields = fields_with(watch, "cpu_utilisation")
    assert set(fields) == HOST_ALONE and 0 <= fields["cpu_utilisation"] <= 1
    assert (
        psutil.Process().memory_info().rss
        < fields["host_memory_bytes"]
        < psutil.virtual_memory().total
    )
    num_threads = threading.active_count()
    with open_monitor("neuron", num_devices=2, is_first_on_machine=False) as watch:
        assert threading.active_count() == num_threads
        assert watch.read() == HardwareSample() and watch.alarms() == []
    assert not log.records


@pytest.mark.parametrize("how", ["killed", "left"])
def test_the_tool_does_not_outlive_a_run_that_never_closes_it(tool, tmp_path, how):
    tool(*recorded("trn1"), ignores="" if how == "killed" else "SIGPIPE")
    run = (
        "import os, signal, sys, time\n"
        "from train.observe.monitor import open_monitor\n"
        "watch = open_monitor('neuron', num_devices=2, is_first_on_machine=True, run_tag='run_a').__enter__()\n"
        "while 'device_utilisation' not in watch.read().totals: time.sleep(0.01)\n"
        f"if {how == 'killed'}: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", run], cwd=RECORDED.parents[2], timeout=DEADLINE_S, check=False
    )
    assert ended.returncode == (-signal.SIGKILL if how == "killed" else 0)
    eventually(lambda: is_gone(child_of(tmp_path)))


# ---- NVML ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Three devices, in the order of NVML; their keys are what they answer."""
    # in CUDA's order
    monkeypatch.setattr(monitor, "cuda_uuids", lambda: ["GPU-ab02", "GPU-aa01", "GPU-cc03"])
    names = ("uuid", "gpu", "used", "ecc", "reasons")
    rows = (
        ("GPU-aa01", 80, 10_000, 7, 4),
        ("GPU-ab02", 40, 30_000, 0, 4),
        ("GPU-cc03", 0, 50_000, 0, 4),
    )
    devices = [dict(zip(names, row, strict=True)) for row in rows]

    def answers(name: str, key: str, *, in_a_struct: bool = False) -> None:
        def get(device: dict[str, Any], *_: int) -> Any:
            if key not in device:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return SimpleNamespace(**device) if in_a_struct else device[key]

        get.__name__ = name
        # AttributeError for a name that the binding does not have
        monkeypatch.setattr(pynvml, name, get)

    answers("nvmlDeviceGetUtilizationRates", "gpu", in_a_struct=True)
    answers("nvmlDeviceGetMemoryInfo", "used", in_a_struct=True)
    answers("nvmlDeviceGetTotalEccErrors", "ecc")
    answers("nvmlDeviceGetCurrentClocksThrottleReasons", "reasons")
    by_uuid = {device["uuid"]: device for device in devices}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", by_uuid.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", devices.clear)
    return devices


def test_nvml_gives_the_devices_of_the_run_and_its_errors_and_heat_are_alarms(gpus, log):
    with opened("nvidia", num_devices=2) as watch:
        fields = fields_with(watch, "device_utilisation")
        gpus[0].update(ecc=9, reasons=0x44)
        result = eventually(watch.alarms)
        gpus[0].update(reasons=0x4)
        fields_with(watch, "device_utilisation")
        gpus[0].update(reasons=0x20, ecc=10)
        again = eventually(watch.alarms)
    assert (
        fields["device_utilisation"] == pytest.approx(0.6)
        and fields["device_memory_bytes"] == 20_000
    )
    # errors of before the run are not the run's
    assert fields["device_errors"] == 0 and "hardware_mfu" not in fields
    host = platform.node()
    assert result == [
        f"{host}: GPU 1: uncorrected memory errors: 2",
        f"{host}: GPU 1: thermal throttling",
    ]
    assert again == [f"{host}: GPU 1: uncorrected memory errors: 1"]
    assert not gpus and not log.records  # it was shut down


def test_what_a_device_does_not_support_is_noted_once_and_left_out(gpus, log):
    for device in gpus:
        del device["ecc"]
    del gpus[0]["gpu"]
    with opened("nvidia", num_devices=2) as watch:
        fields = [fields_with(watch, "device_utilisation") for _ in range(3)][-1]
    assert fields["device_utilisation"] == pytest.approx(0.4) and "device_errors" not in fields
    notes = sorted(record.message.split(": ")[1] for record in log.records)
    assert notes == ["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetUtilizationRates"]
