"""The doctor on machines made of recorded files and answers (tests/recorded), and once on this very machine."""

import dataclasses
import http.server
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path

import pytest
from running import ROOT

from train.doctor import __main__ as command
from train.doctor import checks, checks_devices, checks_host, checks_s3, checks_versions
from train.doctor.__main__ import CAUSES, explain
from train.doctor.finding import TEXT_COLUMN, Finding, ok, screen, warn
from train.doctor.probe import Probe, ToolOutput, ask_tool, read_instance
from train.host import machine

GIB = 2**30
RECORDED = ROOT / "tests" / "recorded" / "doctor"
DPKG = ("dpkg-query", "-W", "-f=${Package} ${Version}\\n", *checks_versions.SYSTEM_PACKAGES)
LS, FI_INFO, LDCONFIG = ("neuron-ls", "-j"), ("fi_info", "-p", "efa"), ("ldconfig", "-p")
PLUGIN = "\tlibnccl-net-ofi.so (libc6,x86-64) => /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so\n"
CHRONY, TIMEDATE = ("chronyc", "tracking"), ("timedatectl", "show", "-p", "NTPSynchronized")
UNLIMITED = dict.fromkeys(("nofile", "memlock", "nproc"), (math.inf, math.inf))
TRN1 = read_instance("trn1.32xlarge")


def recorded(name):
    return (RECORDED / name).read_text()


def said(name, code=0):
    """The answer of a tool that printed a recorded file."""
    return ToolOutput("tool", code, recorded(name))


def answering(answers):
    return lambda *question: answers.get(question, ToolOutput(question[0]))


def with_answers(probe, answers):
    """The same machine, on which some tools say something else (None: they are not installed)."""
    before = probe.ask
    return dataclasses.replace(probe, ask=lambda *q: (answers[q] or ToolOutput(q[0])) if q in answers else before(*q))


def change(probe, **changes):
    return dataclasses.replace(probe, **changes)


def environ(probe, **changes):
    merged = {**probe.environ, **changes}
    return change(probe, environ={name: value for name, value in merged.items() if value is not None})


def write(root, path, text=""):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def pci(root, number, vendor, device, kind):
    for name, value in (("vendor", vendor), ("device", device), ("class", kind)):
        write(root, f"/sys/bus/pci/devices/0000:00:{number:02x}.0/{name}", f"{value}\n")


@pytest.fixture
def laptop(tmp_path):
    return make_laptop(tmp_path / "laptop")


def make_laptop(root):
    """A healthy machine without accelerators, as Debian sets it up."""
    write(root, "/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 laptop\n")
    pci(root, 1, "0x8086", "0x1237", "0x030000")  # a display controller that is no NVIDIA GPU
    return Probe(
        ask=answering({TIMEDATE: ToolOutput("timedatectl", 0, "NTPSynchronized=yes\n")}),
        versions={"torch": "2.9.1", "transformers": "5.23.0"},
        root=root,
        kernel="6.8.0-1021-generic",
        hostname="laptop",
        python=(3, 12, 3),
        glibc="2.39",
        num_cpus=8,
        limits={"nofile": (1024, 1048576), "memlock": (8192 * 1024, 8192 * 1024), "nproc": (30000, 30000)},
        memory_bytes=(12 * GIB, 16 * GIB),
        free_bytes=lambda path: 100 * GIB,
        cwd=root,
        now_s=time.time(),
    )


@pytest.fixture
def trn1(tmp_path):
    """A healthy trn1.32xlarge with SDK 2.31.1."""
    root = tmp_path / "trn1"
    for number in range(16):
        write(root, f"/dev/neuron{number}")
        pci(root, number, "0x1d0f", "0x7164", "0x088000")
    for number in range(8):
        write(root, f"/sys/class/infiniband/rdmap{number}s27/device/vendor", "0x1d0f\n")
    write(root, "/sys/module/neuron/version", "2.29.0.0\n")
    write(root, "/sys/devices/virtual/dmi/id/product_name", "trn1.32xlarge\n")
    write(root, "/proc/sys/net/ipv4/ip_local_reserved_ports", "48620\n")
    write(root, "/proc/sys/net/ipv4/ip_local_port_range", "32768\t60999\n")
    write(root, "/proc/meminfo", "HugePages_Total:    5128\nHugePages_Free:     5128\n")
    write(root, "/etc/hosts", "127.0.0.1 localhost\n10.0.0.4 ip-10-0-0-4\n")
    answers = {
        LS: said("neuron_ls_trn1_32xlarge.json"),
        FI_INFO: said("fi_info_efa.txt"),
        CHRONY: said("chronyc_tracking.txt"),
        DPKG: said("dpkg_neuron.txt"),
    }
    versions = {"torch": "2.9.1", "torch-xla": "2.9.0", "torch-neuronx": "2.9.0.2.15.32035"}
    (tmp_path / "cache").mkdir()
    return Probe(
        ask=answering(answers),
        versions={**versions, "neuronx-cc": "2.26.6360.0+1a2b3c4d", "libneuronxla": "2.2.17544.0"},
        environ={
            "MALLOC_ARENA_MAX": "64",
            "FI_EFA_USE_HUGE_PAGE": "0",
            "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
        },
        root=root,
        kernel="6.8.0-1021-aws",
        hostname="ip-10-0-0-4",
        python=(3, 12, 3),
        glibc="2.39",
        num_cpus=128,
        limits=UNLIMITED,
        memory_bytes=(480 * GIB, 512 * GIB),
        free_bytes=lambda path: 400 * GIB,
        cwd=tmp_path,
        now_s=time.time(),
        instance=TRN1,
        num_ranks=32,
        num_machines=4,
    )


@pytest.fixture
def gpus(tmp_path):
    """A healthy p4d.24xlarge."""
    laptop = make_laptop(tmp_path / "gpus")
    for number in range(8):
        pci(laptop.root, 16 + number, "0x10de", "0x20b0", "0x030200")
    for number in range(4):
        write(laptop.root, f"/sys/class/infiniband/rdmap{number}s27/device/vendor", "0x1d0f\n")
    write(laptop.root, "/etc/hosts", "127.0.0.1 localhost\n")
    four = "".join(recorded("fi_info_efa.txt").partition("rdmap48s27")[0])
    answers = {
        checks_devices.GPU_QUERY: said("nvidia_smi_gpus.txt"),
        checks_devices.HOLDER_QUERY: ToolOutput("smi", 0, ""),
    }
    answers |= {FI_INFO: ToolOutput("fi_info", 0, four), LDCONFIG: ToolOutput("ldconfig", 0, PLUGIN)}
    probe = with_answers(laptop, answers)
    return change(
        probe, instance=read_instance("p4d.24xlarge"), limits=UNLIMITED, memory_bytes=(1000 * GIB, 1152 * GIB)
    )


def states(findings):
    return {name: finding.state for name, finding in findings.items()}


# ---- healthy machines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trn1", "gpus", "laptop"])
def test_a_healthy_machine_is_green_on_one_screen(name, request):
    probe = environ(request.getfixturevalue(name), NEURON_COMPILE_CACHE_URL="s3://bucket/cache")
    findings = checks.examine(probe)
    assert set(states(findings).values()) <= {"ok", "skip"}, [f for f in findings.values() if f.cure]
    text = screen(findings, width=80, colour=False)
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80


def test_on_a_healthy_trn1_no_check_is_left_out(trn1):
    assert set(states(checks.examine(trn1)).values()) == {"ok"}


def test_a_machine_that_answers_nothing_is_no_traceback(tmp_path):
    """No /proc, no tools, no limits: unknown things are left out, not guessed."""
    probe = Probe(
        ask=answering({}), root=tmp_path, versions={"torch": "2.9.1"}, system="Darwin", memory_bytes=(GIB, GIB)
    )
    assert "bad" not in states(checks.examine(probe)).values()
    states(checks.examine(change(probe, instance=TRN1, num_machines=2, num_ranks=32)))


# ---- what each check says, and its cure ----------------------------------------------------------------------------


def find(check, probe, state, *words):
    """One check's finding; it has this state, and these words are in its text or cure."""
    finding = check(probe)
    assert finding.state == state, finding
    for word in words:
        assert word in f"{finding.text} -> {finding.cure}", finding
    return finding


def remove(probe, pattern):
    for file in probe.files(pattern):
        file.unlink()
    return probe


def test_devices_of_a_trn1(trn1):
    check = checks_devices.devices
    find(check, trn1, "ok", "32 NeuronCores on 16 chips")
    one_less = json.dumps(json.loads(recorded("neuron_ls_trn1_32xlarge.json"))[:-1])
    find(
        check,
        with_answers(trn1, {LS: ToolOutput("l", 0, one_less)}),
        "bad",
        "30 Neuron",
        "has 32",
        "modprobe -r neuron",
    )
    find(check, with_answers(trn1, {LS: None}), "warn", "16 Neuron chips", "neuron-ls is not", "aws-neuronx-tools")
    find(check, with_answers(trn1, {LS: ToolOutput("neuron-ls", 1, "", "no driver\n")}), "bad", "no driver", "modprobe")
    late = with_answers(trn1, {LS: ToolOutput("neuron-ls", waited_s=20.0)})
    find(check, late, "bad", "neuron-ls gave no answer in 20 s", "modprobe")
    for text in (
        "",
        "[",
        '{"a": 1}',
        '["chip"]',
        '[{"neuron_device": 0}]',
        '[{"nc_count": 2, "neuron_processes": [{}]}]',
    ):
        find(check, with_answers(trn1, {LS: ToolOutput("l", 0, text)}), "bad", "cannot be read", "--only-upgrade")
    find(check, remove(trn1, "/dev/neuron*"), "bad", "not loaded", "sudo modprobe neuron", "aws-neuronx-dkms")


def test_neuron_ls_of_other_versions_and_chips():
    (chip,) = machine.read_neuron_ls(recorded("neuron_ls_old.json"))
    assert (chip.num_cores, chip.holders) == (2, ())
    (chip,) = machine.read_neuron_ls(recorded("neuron_ls_trn2.json"))
    assert chip.num_cores == 4  # logical cores: 16 such chips take 64 ranks
    (chip,) = machine.read_neuron_ls('[{"neuroncore_ids": [6, 7]}]')
    assert (chip.number, chip.num_cores) == (0, 2)


def test_devices_of_a_gpu_machine(gpus):
    check, query = checks_devices.devices, checks_devices.GPU_QUERY
    find(check, gpus, "ok", "8 GPU (NVIDIA A100-SXM4-40GB, 40 GiB), driver 570.133.20")
    failed = with_answers(gpus, {query: said("nvidia_smi_failed.txt", code=9)})
    find(check, failed, "bad", "couldn't communicate with the NVIDIA driver", "modprobe nvidia")
    find(check, with_answers(gpus, {query: None}), "bad", "nvidia-smi is not installed", "install NVIDIA's driver")
    find(check, change(with_answers(gpus, {query: None}), root=gpus.root / "none"), "bad", "--instance")
    write(gpus.root, "/none/dev/nvidia0")  # a container that does not show the bus
    find(check, change(gpus, root=gpus.root / "none"), "ok", "8 GPU")
    find(check, with_answers(gpus, {query: ToolOutput("s", 0, "")}), "bad", "lists no GPU", "dmesg")
    two = "".join(recorded("nvidia_smi_gpus.txt").splitlines(keepends=True)[:2]).replace("40960", "[N/A]")
    find(check, with_answers(gpus, {query: ToolOutput("s", 0, two)}), "bad", "2 GPU", "has 8", "memory unknown", "xid")


def test_a_machine_without_the_devices_of_its_instance(laptop):
    find(checks_devices.devices, laptop, "ok", "no accelerator; 8 CPU cores")
    probe = change(laptop, instance=read_instance("p4d.24xlarge"))
    find(checks_devices.devices, probe, "bad", "has 8 devices, this machine shows none", "--instance")
    write(laptop.root, "/sys/devices/virtual/dmi/id/product_name", "trn1.2xlarge\n")
    find(checks.machine, probe, "warn", "this is a trn1.2xlarge", "--instance trn1.2xlarge")


def test_a_trainium_without_a_driver_is_known_by_its_chips(laptop):
    pci(laptop.root, 30, "0x1d0f", "0x7164", "0x088000")
    find(checks_devices.devices, laptop, "bad", "driver is not loaded", "sudo modprobe neuron")
    pci(laptop.root, 30, "0x1d0f", "0xec20", "0x020000")  # Amazon's network card
    find(checks_devices.devices, laptop, "ok")


def test_a_sound_chip_of_nvidia_is_no_gpu(laptop):
    pci(laptop.root, 30, "0x10de", "0x228b", "0x040300")
    find(checks_devices.devices, laptop, "ok", "no accelerator")


def test_who_holds_cores_and_what_to_kill(trn1, gpus, laptop):
    check = checks_devices.holders
    find(check, trn1, "ok", "no process")
    write(trn1.root, "/proc/113986/cmdline", "python\0-m\0train\0")
    held = with_answers(trn1, {LS: said("neuron_ls_held.json")})
    finding = find(
        check,
        held,
        "bad",
        "process 113985 (/opt/venv/bin/python -m train",
        "and 1 more on 2 of 16 chips",
        "kill 113985 113986",
    )
    assert "90001" not in finding.cure  # neuron-monitor watches, it holds nothing
    find(check, with_answers(trn1, {LS: None}), "skip")
    find(check, with_answers(trn1, {LS: ToolOutput("l", 0, "[{}]")}), "skip")
    busy = with_answers(gpus, {checks_devices.HOLDER_QUERY: said("nvidia_smi_apps.txt")})
    find(check, busy, "warn", "process 41234 (/opt/venv/bin/python, 37 GiB) and 1 more", "kill 41234 41235")
    find(check, with_answers(gpus, {checks_devices.HOLDER_QUERY: None}), "skip")
    find(check, laptop, "skip")


def test_an_unnamed_holder_is_named_by_proc(trn1):
    entry = [{"nc_count": 2, "neuron_processes": [{"pid": 7, "command": ""}]}]
    probe = with_answers(trn1, {LS: ToolOutput("l", 0, json.dumps(entry))})
    find(checks_devices.holders, probe, "bad", "7 (?)", "kill 7")
    write(trn1.root, "/proc/7/cmdline", "python\0-m\0train\0")
    find(checks_devices.holders, probe, "bad", "7 (python -m train)")


def test_rank_counts(trn1, gpus, laptop):
    check = checks_devices.ranks
    find(check, trn1, "ok", "32 a machine of 32 devices")
    find(check, change(trn1, num_ranks=16), "bad", "takes 1, 2, 8, 32", "--nproc-per-node=8")
    find(check, change(trn1, num_ranks=8), "bad", "need all 32 cores", "--nproc-per-node=32")
    find(check, change(trn1, num_ranks=8, num_machines=1), "ok")
    find(check, change(trn1, num_ranks=None), "skip", "here: 1, 2, 8, 32")
    find(check, change(trn1, num_ranks=64, instance=None), "bad", "64 ranks for 32 devices", "--nproc-per-node=32")
    find(check, change(gpus, num_ranks=9), "bad", "9 ranks for 8 devices", "--nproc-per-node=8")
    find(check, change(gpus, num_ranks=8, instance=None), "ok", "of 8 devices")
    find(check, change(laptop, num_ranks=4), "ok", "4 a machine")


def test_efa(trn1, laptop):
    check = checks_devices.efa
    find(check, trn1, "ok", "8 interfaces of 8, libfabric sees all")
    none = with_answers(trn1, {FI_INFO: ToolOutput("fi_info", 61, "", recorded("fi_info_none.txt"))})
    find(check, none, "bad", "sees 0", "No data available", "efa_installer.sh")
    find(check, with_answers(trn1, {FI_INFO: None}), "bad", "fi_info is not installed", "/opt/amazon/efa/bin")
    find(check, change(with_answers(trn1, {FI_INFO: None}), num_machines=1), "warn", "a single machine trains without")
    remove(trn1, "/sys/class/infiniband/rdmap[0-3]*/device/vendor")
    find(check, trn1, "bad", "4 of trn1.32xlarge's 8", "InterfaceType=efa")
    find(check, change(trn1, num_machines=1), "warn", "4 of trn1.32xlarge's 8")
    find(check, laptop, "skip")
    find(check, change(laptop, instance=read_instance("trn1.2xlarge")), "skip", "has none")
    one_card = change(laptop, instance=read_instance("g6.12xlarge"), num_machines=2)
    find(check, one_card, "warn", "0 of g6.12xlarge's 1")  # TCP goes over the same card
    write(laptop.root, "/sys/class/infiniband/mlx5_0/device/vendor", "0x15b3\n")
    find(check, laptop, "skip")  # InfiniBand of another maker is no EFA


def test_nccl_without_its_plugin_for_efa(gpus):
    check = checks_devices.efa
    find(check, gpus, "ok", "libfabric sees all")
    without = with_answers(gpus, {LDCONFIG: ToolOutput("ldconfig", 0, PLUGIN.replace("libnccl-net-ofi", "libnccl"))})
    find(check, without, "warn", "no libnccl-net*.so and would use TCP", "a single machine trains without")
    find(check, change(without, num_machines=2), "bad", "aws-ofi-nccl", "LD_LIBRARY_PATH=/opt/amazon/ofi-nccl")
    write(gpus.root, "/opt/mine/libnccl-net.so")
    find(check, environ(without, LD_LIBRARY_PATH="/opt/cuda::/opt/mine"), "ok")


def test_python_and_glibc(trn1, laptop):
    check = checks_versions.python
    find(check, trn1, "ok", "3.12.3, glibc 2.39")
    find(check, change(trn1, glibc="2.34"), "bad", "Amazon Linux 2023", "Ubuntu 24.04")
    find(check, change(laptop, glibc="2.34"), "ok")
    find(check, change(trn1, python=(3, 10, 4)), "bad", "3.11 to 3.13", "python3.12 -m venv")
    find(check, change(trn1, python=(3, 14, 0)), "bad", "3.11 to 3.13", "python3.12 -m venv")
    find(check, change(laptop, python=(3, 9, 1)), "bad", "too old", "3.10 or newer")


def packages(probe, state, *words, **changes):
    versions = {**probe.versions, **{name.replace("_", "-"): value for name, value in changes.items()}}
    versions = {name: value for name, value in versions.items() if value}
    return find(checks_versions.packages, change(probe, versions=versions), state, *words)


def test_packages_against_the_known_good_table(trn1, laptop, gpus):
    index = "https://pip.repos.neuron.amazonaws.com"
    packages(trn1, "ok", "SDK 2.31.1")
    packages(trn1, "ok", "SDK 2.32.0", neuronx_cc="2.27.5334.0", libneuronxla="")
    packages(trn1, "bad", "empty stub", "pip uninstall torch-neuronx", index, torch_neuronx="1.0")
    packages(trn1, "bad", "empty stub", "pip uninstall neuronx-cc", index, neuronx_cc="1.0.0")
    packages(trn1, "bad", "native build", "torch-neuronx==2.9.0.2.15.32035", index, torch_neuronx="2.13.3.0.1")
    packages(trn1, "bad", "same release", "pip install 'torch==2.9.*'", torch="2.8.0")
    packages(trn1, "bad", "torch-neuronx missing", "torch-neuronx==2.9.0.2.15.32035 --extra", index, torch_neuronx="")
    packages(trn1, "bad", "neuronx-cc, torch-xla missing", "pip install", neuronx_cc="", torch_xla="")
    packages(trn1, "warn", "in no SDK", "neuronx-cc==2.26.6360.0", torch_neuronx="2.9.0.2.99.1")
    packages(trn1, "warn", "no SDK ships them together", "neuronx-cc==2.26.6360.0", neuronx_cc="2.21.33363.0")
    packages(trn1, "warn", "libneuronxla 2.2.1.0", "libneuronxla==2.2.17544.0", libneuronxla="2.2.1.0")
    both = packages(trn1, "bad", torch_neuronx="1.0", neuronx_cc="1.0")
    assert both.cure.count("pip uninstall") == 2
    packages(laptop, "bad", "torch is not installed", "pip install .", torch="")
    packages(laptop, "bad", "stub", torch_neuronx="1.0")
    packages(laptop, "ok", torch="2.9.1+cpu")
    packages(gpus, "bad", "without CUDA", "--force-reinstall", torch="2.9.1+cpu")


def test_native_packages_of_a_trn2(trn1):
    trn2 = change(trn1, instance=read_instance("trn2.48xlarge"))
    packages(trn2, "warn", "no table", torch_neuronx="2.13.3.0.1", torch="2.13.0", torch_xla="")
    packages(trn2, "bad", "missing", "torch-neuronx>2.9", torch_neuronx="", torch="2.13.0", torch_xla="")


def test_driver_and_runtime(trn1, laptop):
    check, text = checks_versions.driver, recorded("dpkg_neuron.txt")
    find(check, trn1, "ok", "driver 2.29.0.0, runtime 2.33.10.0-e2ac4bb8c: SDK 2.31.1")
    old = with_answers(trn1, {DPKG: ToolOutput("d", 0, text.replace("lib 2.33.10.0", "lib 2.32.31.0"))})
    find(check, old, "bad", "driver 2.29 needs runtime 2.33", "aws-neuronx-runtime-lib=2.33.10")
    odd = with_answers(trn1, {DPKG: ToolOutput("d", 0, text.replace("lib 2.33.10.0", "lib 2.40.1.0"))})
    find(check, odd, "warn", "no SDK of the table", "aws-neuronx-dkms=2.29.0")
    none = ToolOutput("dpkg-query", 1, "aws-neuronx-tools 2.31.15.0\naws-neuronx-dkms \n", "no packages found matching")
    find(check, with_answers(trn1, {DPKG: none}), "bad", "aws-neuronx-runtime-lib, aws-neuronx-coll", "apt-get install")
    find(check, with_answers(trn1, {DPKG: None}), "skip", "versions unknown")
    write(trn1.root, "/sys/module/neuron/version", "2.28.0.0\n")  # what is loaded counts, not what is installed
    find(check, trn1, "warn", "driver 2.28.0.0", "no SDK of the table")
    remove(trn1, "/sys/module/neuron/version")
    modinfo = ("modinfo", "-F", "version", "neuron")
    find(check, with_answers(trn1, {modinfo: ToolOutput("modinfo", 0, "2.29.0.0\n")}), "ok", "SDK 2.31.1")
    no_driver = ToolOutput("d", 1, text.replace("aws-neuronx-dkms 2.29.0.0\n", ""))
    find(check, with_answers(trn1, {DPKG: no_driver}), "bad", "no driver is installed", "aws-neuronx-dkms=2.29")
    find(check, laptop, "skip")


def test_fork_safety(trn1, laptop):
    check = checks_host.fork_safety
    find(check, trn1, "ok", "6.8.0")
    old = change(trn1, kernel="5.10.230-amzn2")
    find(check, old, "bad", "5.10.230", "export FI_EFA_FORK_SAFE=1")
    find(check, environ(old, FI_EFA_FORK_SAFE="1"), "ok", "FI_EFA_FORK_SAFE=1")
    find(check, change(trn1, kernel="5.15.0"), "ok")
    find(check, environ(trn1, FI_EFA_USE_HUGE_PAGE=None), "ok")  # a run sets it
    find(check, environ(trn1, FI_EFA_USE_HUGE_PAGE="1"), "warn", "5,128 huge pages", "unset FI_EFA_USE_HUGE_PAGE")
    write(trn1.root, "/proc/meminfo", "HugePages_Total:       0\n")
    find(check, environ(trn1, FI_EFA_USE_HUGE_PAGE="1"), "ok")
    find(check, laptop, "skip")


def limits(probe, name, soft, hard=math.inf):
    return change(probe, limits={**probe.limits, name: (soft, hard)})


def test_limits(trn1, laptop):
    find(checks_host.open_files, limits(trn1, "nofile", 65535), "ok")
    find(checks_host.open_files, limits(trn1, "nofile", 1024), "ok", "65,535", "raises")
    off_linux = change(trn1, system="Darwin")  # where a run raises nothing
    find(checks_host.open_files, limits(off_linux, "nofile", 20000), "warn", "65,535 wanted", "ulimit -n 65535")
    find(checks_host.open_files, limits(off_linux, "nofile", 1024), "bad", "1,024", "ulimit -n 65535")
    find(checks_host.open_files, limits(trn1, "nofile", 20000, 20000), "warn", "65,535 wanted", "limits.conf")
    find(checks_host.open_files, limits(trn1, "nofile", 1024, 4096), "bad", "limits.conf", "log in again")
    find(checks_host.open_files, limits(laptop, "nofile", 512, 512), "warn", "1,024 wanted", "nofile 1024")
    find(checks_host.open_files, limits(laptop, "nofile", 128, 512), "bad", "1,024 wanted")
    find(checks_host.locked_memory, limits(trn1, "memlock", 65536, 65536), "bad", "64 KiB", "memlock unlimited")
    find(checks_host.locked_memory, limits(laptop, "memlock", 65536, 65536), "skip")
    find(checks_host.processes, limits(trn1, "nproc", 1024), "warn", "ulimit -u 4096")
    find(checks_host.processes, limits(trn1, "nproc", 1024, 1024), "warn", "nproc 4096", "limits.conf")


def test_reserved_ports(trn1, laptop):
    check, file = checks_host.reserved_ports, "/proc/sys/net/ipv4/ip_local_reserved_ports"
    find(check, trn1, "ok")
    write(trn1.root, file, "8080,48600-48700\n")
    find(check, trn1, "ok")
    write(trn1.root, file, "8080\n")
    find(check, trn1, "warn", f"sysctl -w net.ipv4.ip_local_reserved_ports=8080,{machine.ROOT_COMM_PORT}")
    write(trn1.root, file, "\n")
    find(check, trn1, "warn", f"sudo sysctl -w net.ipv4.ip_local_reserved_ports={machine.ROOT_COMM_PORT}")
    write(trn1.root, "/proc/sys/net/ipv4/ip_local_port_range", "50000\t60999\n")
    find(check, trn1, "ok", "outside")
    find(check, laptop, "skip")


def test_compile_cache(trn1, laptop, tmp_path, monkeypatch):
    check, folder = checks_host.cache, trn1.environ["NEURON_COMPILE_CACHE_URL"]
    find(check, trn1, "ok", folder)
    find(check, environ(trn1, NEURON_COMPILE_CACHE_URL=f"{folder}/not/yet/there"), "ok")
    find(check, environ(trn1, NEURON_COMPILE_CACHE_URL="s3://bucket/cache"), "ok", "s3://bucket/cache")
    fault = environ(trn1, NEURON_COMPILE_CACHE_URL="gs://bucket/cache")
    find(check, fault, "bad", "gs://bucket/cache", "folder or s3://", "export NEURON_COMPILE_CACHE_URL=")
    lock = write(Path(folder), "MODULE_1/model.hlo.pb.lock")
    find(check, trn1, "ok")  # a young lock is somebody's
    os.utime(lock, (trn1.now_s - 4000, trn1.now_s - 4000))
    find(check, trn1, "warn", "1 locks", "neuron_parallel_compile --command clear-locks")
    file = write(tmp_path, "file")
    closed = environ(trn1, NEURON_COMPILE_CACHE_URL=f"{file}/cache")
    find(check, closed, "bad", "cannot be written to", f"sudo chown $USER {file}/cache,")
    monkeypatch.setattr(machine, "filesystem", lambda path: "nfs4")
    find(check, trn1, "bad", "is on nfs4", "set NEURON_COMPILE_CACHE_URL")
    find(check, laptop, "skip")


def test_disk_memory_and_shared_memory(trn1, laptop):
    def free(probe, **folders):
        return change(probe, free_bytes=lambda path: next((v for k, v in folders.items() if k in str(path)), 100 * GIB))

    find(checks_host.disk, trn1, "ok", "in this folder", "in /tmp", "in the compile cache")
    find(checks_host.disk, free(trn1, cache=10 * GIB), "warn", "10 GiB free in the compile cache", "CACHE_URL")
    find(checks_host.disk, free(environ(laptop, TMPDIR="/var/tmp"), var=GIB), "bad", "export TMPDIR=", "/var/tmp")
    find(checks_host.disk, change(laptop, free_bytes=lambda path: 3 * GIB), "bad", "run_dir=")
    find(checks_host.disk, change(laptop, free_bytes=lambda path: None), "skip")
    find(
        checks_host.memory, change(trn1, memory_bytes=(36 * GIB, 512 * GIB)), "warn", "32 ranks and the compiler", "ps"
    )
    find(checks_host.memory, change(laptop, memory_bytes=(GIB // 2, 16 * GIB)), "bad", "end other programs")
    find(checks_host.shared_memory, free(laptop, shm=64 * 2**20), "warn", "64 MiB", "--shm-size=8g")
    find(checks_host.shared_memory, change(laptop, system="Darwin"), "skip")


def test_clock(trn1, laptop):
    check = checks_host.clock
    find(check, trn1, "ok", "kept by chrony")
    find(check, with_answers(trn1, {CHRONY: said("chronyc_far_off.txt")}), "bad", "1557.763", "chronyc makestep")
    near = recorded("chronyc_far_off.txt").replace("1557.763061523", "2.5")
    find(check, with_answers(trn1, {CHRONY: ToolOutput("c", 0, near)}), "warn", "2.5", "chronyc makestep")
    find(check, with_answers(trn1, {CHRONY: said("chronyc_alone.txt")}), "warn", "Not synchronised", "systemctl enable")
    find(check, laptop, "ok", "follows a time server")
    no = ToolOutput("timedatectl", 0, "NTPSynchronized=no\n")
    find(check, with_answers(laptop, {TIMEDATE: no}), "warn", "timedatectl set-ntp true")
    find(check, with_answers(laptop, {TIMEDATE: said("timedatectl_no_systemd.txt", code=1)}), "skip", "--bucket")


def test_variables_and_malloc(trn1, laptop):
    check = checks_host.knobs
    find(check, trn1, "ok")
    find(check, environ(trn1, XLA_USE_BF16="1"), "bad", "rounds", "unset XLA_USE_BF16")
    find(check, environ(trn1, BUCKET_CAP_MB="512", XRT_WORKERS="a"), "warn", "unset XRT_WORKERS BUCKET_CAP_MB")
    find(check, environ(trn1, FI_EFA_FORK_SAFE="1"), "warn", "before 5.15", "unset FI_EFA_FORK_SAFE")
    find(check, environ(change(trn1, kernel="5.10.0"), FI_EFA_FORK_SAFE="1"), "ok")
    find(checks_host.malloc, environ(trn1, MALLOC_ARENA_MAX=None), "warn", "export MALLOC_ARENA_MAX=64")
    find(checks_host.malloc, laptop, "skip")


def test_host_name(trn1, laptop):
    check = checks_host.hostname
    find(check, change(trn1, hostname="x" * 64), "bad", "64 characters", "hostnamectl")
    write(trn1.root, "/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 ip-10-0-0-4.ec2 ip-10-0-0-4 # cloud-init\n")
    find(check, trn1, "bad", "maps ip-10-0-0-4 to 127.0.1.1", "/etc/hosts", "hostname -I")
    find(check, change(trn1, num_machines=1), "warn", "maps ip-10-0-0-4")
    find(check, change(laptop, num_machines=2), "bad", "127.0.1.1")
    find(check, laptop, "ok")
    write(trn1.root, "/etc/hosts", "#127.0.1.1 ip-10-0-0-4\n127.0.0.1 localhost # ip-10-0-0-4\n")
    find(check, trn1, "ok")


# ---- tools ---------------------------------------------------------------------------------------------------------


def test_tools_that_fail_are_missing_or_hang_are_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    scripts = {
        "fine": "#!/bin/sh\necho $1 $LC_ALL",
        "wrong": "#!/bin/sh\necho no chip >&2; exit 3",
        "hangs": "#!/bin/sh\nsleep 60 & wait",  # a child keeps the pipe open after the kill
        "noexec": "\0\0",
    }
    for name, text in scripts.items():
        write(tmp_path, name, text).chmod(0o755)
    assert ask_tool("fine", "a").out == "a C\n"
    assert ask_tool("wrong").fault == "wrong failed (3): no chip"
    assert ask_tool("no-such-tool").fault == "no-such-tool is not installed"
    assert ask_tool("noexec").code in (126, 127)
    assert ask_tool("hangs", timeout_s=0.2).fault == "hangs gave no answer in 0.2 s"


# ---- S3 ------------------------------------------------------------------------------------------------------------


class OneAnswer(http.server.BaseHTTPRequestHandler):
    """Answers every HEAD request alike, as S3 does: a status and headers, no body."""

    status, headers_given = 200, {}

    def do_HEAD(self):
        self.send_response_only(self.status)
        for name, value in self.headers_given.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def s3(monkeypatch):
    """Asks a local server that gives the answer it is set to."""
    answer = type("Answer", (OneAnswer,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_REGION", "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_BUCKET", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)

    def ask(status, *, region="us-east-1", off_s=0.0):
        answer.status = status
        answer.headers_given = {"Date": formatdate(time.time() - off_s, usegmt=True)}
        answer.headers_given |= {"x-amz-bucket-region": region} if region else {}
        return checks_s3.bucket("s3://corpus/wiki", now_s=time.time())

    yield ask
    server.shutdown()
    server.server_close()


def check_s3(findings, state, *words):
    find(lambda _: findings["S3"], None, state, "corpus", *words)


def test_a_bucket_near_far_and_refused(s3, monkeypatch):
    check_s3(s3(200), "ok", "in us-east-1 like this session")
    check_s3(s3(200, region=""), "ok", "does not name its region")
    far = s3(200, region="eu-west-1")
    check_s3(far, "warn", "is in eu-west-1, this session in us-east-1", "AWS_DEFAULT_REGION=eu-west-1")
    check_s3(s3(403), "bad", "403", "no permission", "s3:ListBucket")
    check_s3(s3(404), "bad", "no such bucket", "aws s3 ls")
    check_s3(s3(400), "bad", "400", "credentials have expired", "renew")
    check_s3(s3(503), "bad", "503", "try again")
    check_s3(s3(301, region="eu-west-1"), "bad", "another region (eu-west-1", "AWS_DEFAULT_REGION=eu-west-1")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    check_s3(s3(200), "warn", "this session has no region", "AWS_DEFAULT_REGION=us-east-1")


def test_no_credentials_and_no_route(s3, monkeypatch):
    with monkeypatch.context() as bare:
        bare.delenv("AWS_ACCESS_KEY_ID")
        bare.delenv("AWS_SECRET_ACCESS_KEY")
        check_s3(s3(200), "bad", "no AWS credentials", "attach a role")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    check_s3(s3(200), "bad", "Could not connect", "gateway endpoint")
    find(lambda _: checks_s3.bucket("s3://a b", now_s=0.0)["S3"], None, "bad", "check the name")  # no bucket's name


def test_the_clock_is_compared_with_that_of_s3(s3):
    assert states(s3(200)) == {"S3": "ok", "clock and S3": "ok"}
    find(lambda _: s3(200, off_s=60)["clock and S3"], None, "warn", " s ahead", "chronyc makestep")
    find(lambda _: s3(403, off_s=-1000)["clock and S3"], None, "bad", "behind", "rejects", "chronyc makestep")


# ---- explain -------------------------------------------------------------------------------------------------------

TEXTS = json.loads(recorded("error_texts.json"))


def test_every_row_has_a_recorded_text():
    assert list(TEXTS) == [cause["name"] for cause in CAUSES]
    assert all(cause["cause"] and cause["cure"] for cause in CAUSES)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_explained_by_its_row(name):
    for text in TEXTS[name]:
        assert explain(text)[0]["name"] == name
        assert explain(f"Traceback ...\n  File a.py\n{text.upper()}\nmore\n")[0]["name"] == name


def test_a_whole_log_gives_every_cause_the_most_specific_first():
    log = "\n".join(texts[0] for texts in reversed(TEXTS.values()))
    assert [cause["name"] for cause in explain(log)] == list(TEXTS)
    wrapped = "subprocess.CalledProcessError: neuronx-cc ... died with SIGKILL"
    assert [cause["name"] for cause in explain(wrapped)] == ["the compiler was killed", "the system killed a rank"]


def test_healthy_text_is_not_explained():
    assert not explain("step 10: loss 5.42, 16 ranks, world_size=16, learning rate 0.001, no information")
    assert not explain("")


# ---- the command ---------------------------------------------------------------------------------------------------


def doctor(*arguments, code="from train.doctor.__main__ import main; sys.exit(main())", stdin=None):
    """The command in a process of its own, from which torch and all device libraries are out of reach."""
    blocker = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torch_xla", "torch_neuronx", "transformers", "libneuronxla"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)
sys.meta_path.insert(0, Blocker())
"""
    line = [sys.executable, "-c", blocker + code, *arguments]
    clean = {name: value for name, value in os.environ.items() if name not in {knob.name for knob in machine.KNOBS}}
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, input=stdin, env=clean)


def test_the_command_runs_here_without_torch():
    done = doctor("--json", "--ranks-per-machine", "1")
    assert done.stderr == ""
    result = json.loads(done.stdout)
    reds = [finding for finding in result["findings"] if finding["state"] == "bad"]
    assert done.returncode == (1 if reds else 0), done.stdout
    assert result["ok"] == (not reds)
    assert len(result["findings"]) == len(checks.CHECKS)
    assert {finding["name"] for finding in result["findings"]} >= {"devices", "packages", "disk", "ranks"}


def test_python_dash_m_shows_a_screen_and_a_red_line_is_exit_code_1():
    line = [sys.executable, "-m", "train.doctor", "--instance", "trn1.32xlarge", "--ranks-per-machine", "16"]
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=ROOT, check=False, env={**os.environ, "COLUMNS": "80"}
    )
    assert done.returncode == 1, done.stderr
    assert "BAD   devices" in done.stdout
    assert "--nproc-per-node=8" in done.stdout
    assert "\033[" not in done.stdout  # no colours in a pipe


def test_explain_by_command(capsys):
    assert command.main(["explain", "NeuronCore(s) not available - Requested:1 Available:0"]) == 0
    assert "kill PID" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--help"])
    example = re.search(r'train.doctor explain "(.*)"', capsys.readouterr().out)[1]
    assert command.main(["explain", example]) == 0
    assert "ran out of memory" in " ".join(capsys.readouterr().out.split())
    assert command.main(["explain", "the moon is full"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    done = doctor("explain", "-", stdin="...\nOSError: [Errno 28] No space left on device\n")
    assert done.returncode == 0
    assert "the disk is full" in done.stdout


def test_colours_are_for_terminals_that_want_them(monkeypatch, capsys):
    monkeypatch.setattr(checks, "examine", lambda probe, bucket: {"devices": ok("fine")})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert command.main([]) == 0
    assert "\033[32mok" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    command.main([])
    assert "\033[" not in capsys.readouterr().out


def test_the_screen_keeps_its_columns():
    text = screen({"a": ok("well"), "b": warn("long " * 40, cure="pip " * 40)}, width=80, colour=False).splitlines()
    assert text[0].index("well") == TEXT_COLUMN
    assert max(map(len, text)) <= 80
    assert any(line.strip().startswith("-> pip") for line in text)
    assert text[-1] == "1 ok, 1 to look at, 0 to fix"


def test_a_red_line_without_a_cure_cannot_be_made():
    with pytest.raises(AssertionError):
        Finding("bad", "text")
