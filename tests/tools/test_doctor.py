"""The doctor on machines made of recorded files and answers (tests/recorded), and once on this very machine."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time

import pytest
from running import ROOT

from train.machine import neuron
from train.tools.doctor import checks, command
from train.tools.doctor.checks_devices import CHIP_QUERY, GPU_QUERY, HOLDER_QUERY
from train.tools.doctor.checks_versions import SYSTEM_PACKAGES
from train.tools.doctor.probe import (
    TEXT_COLUMN,
    Probe,
    ToolOutput,
    ask_tool,
    bad,
    is_red,
    ok,
    read_instance,
    screen,
    warn,
)

GIB = 2**30
RECORDED = ROOT / "tests" / "recorded" / "doctor"
DPKG = ("dpkg-query", "-W", "-f=${Package} ${Version}\\n", *SYSTEM_PACKAGES)
FI_INFO, LDCONFIG, MODINFO = (
    ("fi_info", "-p", "efa"),
    ("ldconfig", "-p"),
    ("modinfo", "-F", "version", "neuron"),
)
CHRONY, TIMEDATE = ("chronyc", "tracking"), ("timedatectl", "show", "-p", "NTPSynchronized")
FOUR = "".join(
    f"    domain: rdmap{number}s27-{kind}\n" for number in range(4) for kind in ("rdm", "dgrm")
)
UNLIMITED = dict.fromkeys(("nofile", "memlock"), (math.inf, math.inf))


# ---- machines ------------------------------------------------------------------------------------------------------


def recorded(name):
    return (RECORDED / name).read_text()


def write(root, path, text=""):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def pci(number, vendor, device, kind):
    parts = {"vendor": vendor, "device": device, "class": kind}
    return {
        f"/sys/bus/pci/devices/0000:00:{number:02x}.0/{name}": f"{value}\n"
        for name, value in parts.items()
    }


def efa(count):
    return {
        f"/sys/class/infiniband/rdmap{number}s27/device/vendor": "0x1d0f\n"
        for number in range(count)
    }


def altered(
    probe,
    *,
    says=None,
    files=None,
    gone=(),
    env=None,
    versions=None,
    limits=None,
    free=None,
    **fields,
):
    """The same machine, on which some things are otherwise.

    `says` are answers of tools: a text, a ToolOutput, or None for a tool that is not installed; `free` is the space of
    folders by a part of their names. ROOT in a variable is the machine's own folder.
    """
    for path, text in (files or {}).items():
        write(probe.root, path, text)
    for pattern in gone:
        for file in probe.files(pattern):
            file.unlink()
    answers = {
        query: ToolOutput(answer) if isinstance(answer, str) else answer or missing(*query)
        for query, answer in (says or {}).items()
    }
    environ = {name: value.replace("ROOT", str(probe.root)) for name, value in (env or {}).items()}
    named = {name.replace("_", "-"): version for name, version in (versions or {}).items()}
    return dataclasses.replace(
        probe,
        ask=lambda *query: answers.get(query) or probe.ask(*query),
        environ={name: value for name, value in {**probe.environ, **environ}.items() if value},
        versions={
            name: version for name, version in {**probe.versions, **named}.items() if version
        },
        limits={**probe.limits, **(limits or {})},
        free_bytes=lambda path: next(
            (v for k, v in (free or {}).items() if k in str(path)), probe.free_bytes(path)
        ),
        **fields,
    )


def missing(tool, *_):
    return ToolOutput(fault=f"{tool} is not installed", is_missing=True)


def laptop(root):
    """A healthy machine without accelerators, as Debian sets it up."""
    probe = Probe(
        ask=missing,
        versions={"torch": "2.9.1", "transformers": "5.23.0"},
        root=root,
        kernel="6.8.0-1021-generic",
        hostname="laptop",
        python=(3, 12, 3),
        glibc="2.39",
        num_cpus=8,
        limits={"nofile": (1024, 1048576), "memlock": (8192 * 1024, 8192 * 1024)},
        memory_bytes=(12 * GIB, 16 * GIB),
        free_bytes=lambda path: 100 * GIB,
        cwd=root,
        now_s=time.time(),
    )
    display = pci(1, "0x8086", "0x1237", "0x030000")  # a display controller that is no NVIDIA GPU
    files = {"/etc/hosts": "127.0.0.1 localhost\n127.0.1.1 laptop\n", **display}
    return altered(probe, files=files, says={TIMEDATE: "NTPSynchronized=yes\n"})


def trn1(root):
    """A healthy trn1.32xlarge with SDK 2.31.1."""
    chips = [
        {f"/dev/neuron{number}": "", **pci(number, "0x1d0f", "0x7164", "0x088000")}
        for number in range(16)
    ]
    files = {
        "/sys/module/neuron/version": "2.29.0.0\n",
        "/sys/devices/virtual/dmi/id/product_name": "trn1.32xlarge\n",
        "/etc/hosts": "127.0.0.1 localhost\n10.0.0.4 ip-10-0-0-4\n",
        "/cache/.keep": "",
    }
    answers = {
        CHIP_QUERY: recorded("neuron_ls_trn1_32xlarge.json"),
        FI_INFO: recorded("fi_info_efa.txt"),
        CHRONY: recorded("chronyc_tracking.txt"),
        DPKG: recorded("dpkg_neuron.txt"),
    }
    return altered(
        laptop(root),
        files=dict(part for one in (files, efa(8), *chips) for part in one.items()),
        says=answers,
        versions={
            "torch_xla": "2.9.0",
            "torch_neuronx": "2.9.0.2.15.32035",
            "neuronx_cc": "2.26.6360.0+1a2b3c4d",
            "libneuronxla": "2.2.17544.0",
        },
        env={"MALLOC_ARENA_MAX": "64", "NEURON_COMPILE_CACHE_URL": "ROOT/cache"},
        kernel="6.8.0-1021-aws",
        hostname="ip-10-0-0-4",
        num_cpus=128,
        limits=UNLIMITED,
        memory_bytes=(480 * GIB, 512 * GIB),
        instance=read_instance("trn1.32xlarge"),
        num_ranks=32,
        num_machines=4,
    )


def gpus(root):
    """A healthy p4d.24xlarge."""
    cards = [pci(16 + number, "0x10de", "0x20b0", "0x030200") for number in range(8)]
    answers = {
        GPU_QUERY: recorded("nvidia_smi_gpus.txt"),
        HOLDER_QUERY: "",
        FI_INFO: FOUR,
        LDCONFIG: "\tlibnccl-net-ofi.so (libc6,x86-64) => /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so\n",
    }
    return altered(
        laptop(root),
        files=dict(part for one in (efa(4), *cards) for part in one.items())
        | {"/etc/hosts": "127.0.0.1 localhost\n"},
        says=answers,
        limits=UNLIMITED,
        memory_bytes=(1000 * GIB, 1152 * GIB),
        instance=read_instance("p4d.24xlarge"),
    )


ONLY_TRAINIUM = {"Neuron driver", "compile cache", "malloc arenas"}
SKIPPED = {
    trn1: set(),
    gpus: {*ONLY_TRAINIUM, "ranks"},
    laptop: {*ONLY_TRAINIUM, "ranks", "held by", "EFA", "fork safety", "locked memory"},
}


@pytest.mark.parametrize("make", SKIPPED)
def test_a_healthy_machine_is_green_on_one_screen(tmp_path, make):
    findings = checks.examine(
        altered(make(tmp_path), env={"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache"})
    )
    assert {name for name, finding in findings.items() if finding.state == "skip"} == SKIPPED[make]
    assert not [finding for finding in findings.values() if finding.cure]
    text = "\n".join(screen(findings, width=80, colour=False))
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 80


def test_a_machine_that_answers_nothing_is_no_traceback(tmp_path):
    """No /proc, no tools: unknown things are left out, not guessed."""
    bare = laptop(tmp_path / "laptop")
    nothing = {"root": tmp_path, "glibc": "", "kernel": ""}
    probe = dataclasses.replace(bare, ask=missing, system="Darwin", **nothing)
    assert not is_red(checks.examine(probe))
    trainium = altered(
        probe, instance=read_instance("trn1.32xlarge"), num_machines=2, num_ranks=32
    )
    assert checks.examine(trainium)["devices"].state == "bad"


# ---- what each check says, and its cure ----------------------------------------------------------------------------


def case(make, state, *words, **changes):
    """One machine, changed as `altered` does; the finding has this state, and these words in its text or cure."""
    return make, state, words, changes


def chips(answer):
    return {"says": {CHIP_QUERY: answer}}


def dpkg(answer):
    return {"says": {DPKG: answer}}


def ubuntu(version):
    return {"/etc/os-release": f'NAME="Ubuntu"\nVERSION_ID="{version}"\n'}


ONE_LESS = json.dumps(json.loads(recorded("neuron_ls_trn1_32xlarge.json"))[:-1])
BROKEN = ("[", '["chip"]', '[{"neuron_device": 0}]', '[{"nc_count": 2, "neuron_processes": [{}]}]')
HANGS = ToolOutput(fault="neuron-ls gave no answer in 20 s")
SMI_FAILED = ToolOutput(fault=recorded("nvidia_smi_failed.txt").splitlines()[0])
TWO_GPUS = "".join(recorded("nvidia_smi_gpus.txt").splitlines(keepends=True)[:2]).replace(
    "40960", "[N/A]"
)
HELD, APPS = recorded("neuron_ls_held.json"), {HOLDER_QUERY: recorded("nvidia_smi_apps.txt")}
UNNAMED = '[{"nc_count": 2, "neuron_processes": [{"pid": 7, "command": ""}]}]'
NO_EFA = {FI_INFO: ToolOutput(fault=recorded("fi_info_none.txt"))}
HALF_OF_EFA = {"gone": ["/sys/class/infiniband/rdmap[0-3]*/*/*"]}
NO_PLUGIN, PLUGIN = (
    {"says": {LDCONFIG: "\tlibnccl.so (libc6,x86-64)\n"}},
    {"/opt/mine/libnccl-net.so": ""},
)
TRN2, P4D = read_instance("trn2.48xlarge"), read_instance("p4d.24xlarge")
STUBS, NONE = {"torch_neuronx": "1.0", "neuronx_cc": "1.0"}, {"torch_neuronx": ""}
NATIVE = {
    "torch_neuronx": "2.13.3.0.1",
    "torch": "2.13.0",
    "torch_xla": "",
    "neuronx_cc": "2.28.7631.0",
}
INDEX, TORCH_NEURONX = "https://pip.repos.neuron.amazonaws.com", "torch-neuronx==2.9.0.2.15.32035"
NATIVE_CACHE = neuron.NATIVE_CACHE
NEFFS = {"files": {"neffs/.keep": ""}, "env": {NATIVE_CACHE: "ROOT/neffs"}}
DRIVERS = recorded("dpkg_neuron.txt")
OLD_RUNTIME, ODD_RUNTIME = (
    DRIVERS.replace("lib 2.33.10.0", f"lib {version}") for version in ("2.32.31.0", "2.40.1.0")
)
ONLY_TOOLS = ToolOutput("aws-neuronx-tools 2.31.15.0\naws-neuronx-dkms \n", "none found")
NO_DKMS = ToolOutput(DRIVERS.replace("aws-neuronx-dkms 2.29.0.0\n", ""), "none found")
LOADED = "/sys/module/neuron/version"
LOCK, CACHE = {"cache/MODULE_1/model.hlo.pb.lock": ""}, "NEURON_COMPILE_CACHE_URL"
DARWIN = {"system": "Darwin"}
FAR_OFF, NEAR = (
    recorded("chronyc_far_off.txt"),
    recorded("chronyc_far_off.txt").replace("1557.763061523", "2.5"),
)
NO_SYSTEMD = ToolOutput(fault=recorded("timedatectl_no_systemd.txt"))
FIRMWARE = {"/sys/devices/virtual/dmi/id/product_name": "trn1.2xlarge\n"}
LOOP = {"/etc/hosts": "127.0.0.1 localhost\n127.0.1.1 ip-10-0-0-4.ec2 ip-10-0-0-4 # cloud-init\n"}
NO_LOOP = {"/etc/hosts": "#127.0.1.1 ip-10-0-0-4\n127.0.0.1 localhost # ip-10-0-0-4\n"}

CASES = {
    "machine": [
        case(
            laptop,
            "warn",
            "p4d.24xlarge, but this",
            "--instance trn1.2xlarge",
            instance=P4D,
            files=FIRMWARE,
        )
    ],
    "devices": [
        case(trn1, "bad", "30 Neuron", "has 32", "modprobe -r neuron", **chips(ONE_LESS)),
        case(
            trn1, "warn", "16 Neuron chips", "neuron-ls is not", "aws-neuronx-tools", **chips(None)
        ),
        case(trn1, "bad", "neuron-ls gave no answer in 20 s", "modprobe", **chips(HANGS)),
        *(case(trn1, "bad", "cannot be read", "--only-upgrade", **chips(text)) for text in BROKEN),
        case(
            trn1,
            "bad",
            "not loaded",
            "sudo modprobe neuron",
            "aws-neuronx-dkms",
            gone=["/dev/neuron*"],
        ),
        case(gpus, "ok", "8 GPU (NVIDIA A100-SXM4-40GB, 40 GiB), driver 570.133.20"),
        case(
            gpus,
            "bad",
            "communicate with the NVIDIA driver",
            "modprobe nvidia",
            says={GPU_QUERY: SMI_FAILED},
        ),
        case(
            gpus,
            "bad",
            "nvidia-smi is not installed",
            "install NVIDIA's driver",
            says={GPU_QUERY: None},
        ),
        case(
            gpus, "ok", "8 GPU", files={"/dev/nvidia0": ""}, gone=["/sys/bus/pci/devices/*/*"]
        ),  # in a container
        case(gpus, "bad", "lists no GPU", "dmesg", says={GPU_QUERY: ""}),
        case(gpus, "bad", "2 GPU", "has 8", "memory unknown", "xid", says={GPU_QUERY: TWO_GPUS}),
        case(
            laptop, "bad", "has 8 devices, but this machine has none", "--instance", instance=P4D
        ),
        case(
            laptop,
            "bad",
            "not loaded",
            "modprobe neuron",
            files=pci(30, "0x1d0f", "0x7164", "0x088000"),
        ),
        case(laptop, "bad", "not loaded", files=pci(30, "0x1d0f", "0x7564", "0x088000")),  # trn3
        case(laptop, "ok", files=pci(30, "0x1d0f", "0xec20", "0x020000")),  # Amazon's network card
        case(
            laptop, "ok", "no accelerator", files=pci(30, "0x10de", "0x228b", "0x040300")
        ),  # NVIDIA's chip for sound
    ],
    "held by": [
        # Not 90001, neuron-monitor, which holds nothing.
        case(
            trn1,
            "bad",
            "113985 (/opt/venv/bin/python -m",
            "1 more on 2 of 16",
            "kill 113985 113986",
            **chips(HELD),
        ),
        case(
            trn1,
            "bad",
            "7 (python -m x)",
            **chips(UNNAMED),
            files={"/proc/7/cmdline": "python\0-m\0x\0"},
        ),
        case(trn1, "skip", **chips(None)),
        case(
            gpus,
            "warn",
            "process 41234 (/opt/venv/bin/python, 37 GiB) and 1 more",
            "kill 41234 41235",
            says=APPS,
        ),
        case(gpus, "skip", says={HOLDER_QUERY: None}),
    ],
    "ranks": [
        case(
            trn1,
            "bad",
            "trn1.32xlarge runs 1 or 2 or 8 or 32",
            "--nproc-per-node=32",
            num_ranks=16,
        ),
        case(trn1, "bad", "only with 32 ranks each", "--nproc-per-node=32", num_ranks=8),
        case(
            trn1,
            "bad",
            "64 ranks for 32 devices",
            "--nproc-per-node=32",
            num_ranks=64,
            instance=None,
        ),
        case(gpus, "bad", "9 ranks for 8 devices", "--nproc-per-node=8", num_ranks=9),
        case(laptop, "ok", "4 per machine", num_ranks=4),
    ],
    "EFA": [
        case(trn1, "bad", "sees 0", "No data available", "efa_installer.sh", says=NO_EFA),
        case(trn1, "bad", "8 interfaces, of which libfabric sees 4", says={FI_INFO: FOUR}),
        case(trn1, "bad", "fi_info is not installed", "/opt/amazon/efa/bin", says={FI_INFO: None}),
        case(
            trn1, "warn", "a single machine trains without", says={FI_INFO: None}, num_machines=1
        ),
        case(trn1, "bad", "4 of trn1.32xlarge's 8", "InterfaceType=efa", **HALF_OF_EFA),
        case(
            laptop,
            "warn",
            "0 of g6.12xlarge's 1",
            instance=read_instance("g6.12xlarge"),
            num_machines=2,
        ),  # TCP
        case(
            laptop, "skip", files={"/sys/class/infiniband/mlx5_0/device/vendor": "0x15b3\n"}
        ),  # another maker's
        case(
            gpus,
            "warn",
            "no libnccl-net*.so and would use TCP",
            "a single machine trains without",
            **NO_PLUGIN,
        ),
        case(
            gpus,
            "bad",
            "aws-ofi-nccl",
            "LD_LIBRARY_PATH=/opt/amazon/ofi-nccl",
            num_machines=2,
            **NO_PLUGIN,
        ),
        case(
            gpus, "ok", files=PLUGIN, env={"LD_LIBRARY_PATH": "/opt/cuda::/opt/mine"}, **NO_PLUGIN
        ),
    ],
    "Python": [
        case(trn1, "bad", "Amazon Linux 2023", "Ubuntu 24.04", glibc="2.34"),
        case(trn1, "bad", "3.11 to 3.13", "python3.13 -m venv", python=(3, 14, 0)),
        case(trn1, "bad", "3.12 to 3.14", "python3.14", instance=TRN2, python=(3, 11, 7)),
        case(laptop, "bad", "too old", "3.11 or newer", python=(3, 10, 4)),
        case(trn1, "ok", instance=TRN2, files=ubuntu("26.04"), versions=NONE),
        case(
            trn1, "ok", instance=TRN2, files=ubuntu("24.04"), versions=NATIVE
        ),  # installed all the same
        case(
            trn1,
            "warn",
            "for Ubuntu 26.04 only",
            "DLAMI",
            instance=TRN2,
            files=ubuntu("24.04"),
            versions=NONE,
        ),
    ],
    "packages": [
        case(trn1, "ok", "SDK 2.31.1"),
        case(trn1, "bad", "torch-neuronx missing", TORCH_NEURONX, INDEX, versions=NONE),
        case(
            trn1,
            "bad",
            "neuronx-cc, torch-xla missing",
            "pip",
            versions={"neuronx_cc": "", "torch_xla": ""},
        ),
        case(
            trn1,
            "warn",
            "no known SDK ships",
            "neuronx-cc==2.26.63",
            versions={"neuronx_cc": "2.21.33363.0"},
        ),
        case(
            trn1,
            "warn",
            "libneuronxla 2.2.1.0",
            "no known SDK ships",
            versions={"libneuronxla": "2.2.1.0"},
        ),
        case(
            trn1, "bad", "pip uninstall torch-neuronx", "pip uninstall neuronx-cc", versions=STUBS
        ),
        case(trn1, "ok", "native PyTorch of SDK 2.33.0", instance=TRN2, versions=NATIVE),
        case(
            trn1,
            "warn",
            "ships neuronx-cc 2.28",
            instance=TRN2,
            versions={**NATIVE, "neuronx_cc": "2.26.6360.0"},
        ),
        case(
            trn1,
            "bad",
            "same release",
            "=2.14.*",
            instance=TRN2,
            versions={**NATIVE, "torch": "2.14.0"},
        ),
        case(
            laptop, "bad", "has none", "==2.14.*", files=pci(30, "0x1d0f", "0x7565", "0x088000")
        ),  # trn3
        case(laptop, "bad", "torch is not installed", "pip install .", versions={"torch": ""}),
        case(gpus, "bad", "without CUDA", "--force-reinstall", versions={"torch": "2.9.1+cpu"}),
    ],
    "Neuron driver": [
        case(trn1, "ok", "driver 2.29.0.0, runtime 2.33.10.0-e2ac4bb8c: SDK 2.31.1"),
        case(
            trn1,
            "bad",
            "newer need runtime 2.33",
            "aws-neuronx-runtime-lib=2.33.10",
            **dpkg(OLD_RUNTIME),
        ),
        case(trn1, "warn", "no known SDK ships", "aws-neuronx-dkms=2.29.0", **dpkg(ODD_RUNTIME)),
        case(
            trn1,
            "bad",
            "aws-neuronx-runtime-lib, aws-neuronx-coll",
            "apt-get install",
            **dpkg(ONLY_TOOLS),
        ),
        case(trn1, "skip", "versions unknown", **dpkg(None)),
        case(
            trn1, "warn", "no known SDK", "aws-neuronx-dkms=2.31.7", instance=TRN2
        ),  # it is that of trn1
        # What is loaded counts, not what is installed.
        case(trn1, "warn", "driver 2.28.0.0", "no known SDK ships", files={LOADED: "2.28.0.0\n"}),
        case(trn1, "ok", "SDK 2.31.1", gone=[LOADED], says={MODINFO: "2.29.0.0\n"}),
        case(
            trn1,
            "bad",
            "no driver is installed",
            "aws-neuronx-dkms=2.29",
            gone=[LOADED],
            **dpkg(NO_DKMS),
        ),
    ],
    "fork safety": [
        case(trn1, "bad", "5.10.230", "export FI_EFA_FORK_SAFE=1", kernel="5.10.230-amzn2"),
        case(
            trn1,
            "ok",
            "FI_EFA_FORK_SAFE=1",
            kernel="5.10.230-amzn2",
            env={"FI_EFA_FORK_SAFE": "1"},
        ),
    ],
    "open files": [
        case(trn1, "ok", "65,535", "raises", limits={"nofile": (1024, math.inf)}),
        # Where it is not Linux, a run raises nothing.
        case(
            trn1,
            "warn",
            "a run needs 65,535",
            "ulimit -n 65535",
            limits={"nofile": (20000, math.inf)},
            **DARWIN,
        ),
        case(
            trn1, "bad", "1,024", "ulimit -n 65535", limits={"nofile": (1024, math.inf)}, **DARWIN
        ),
        case(trn1, "bad", "limits.conf", "log in again", limits={"nofile": (1024, 4096)}),
        case(laptop, "warn", "a run needs 1,024", "nofile 1024", limits={"nofile": (512, 512)}),
    ],
    "locked memory": [
        case(trn1, "bad", "64 KiB", "memlock unlimited", limits={"memlock": (65536, 65536)})
    ],
    "compile cache": [
        case(
            trn1,
            "bad",
            "gs://bucket/cache",
            "folder or s3://",
            f"unset {CACHE}",
            env={CACHE: "gs://bucket/cache"},
        ),
        case(
            trn1,
            "ok",
            "/neffs (",
            instance=TRN2,
            env={NATIVE_CACHE: "ROOT/neffs", CACHE: "gs://not/read"},
        ),
        case(
            trn1, "bad", "is not a folder", instance=TRN2, env={NATIVE_CACHE: "s3://bucket/neffs"}
        ),
        case(trn1, "ok", files=LOCK),  # a young lock is somebody's
        case(
            trn1, "warn", "1 locks", "--command clear-locks", files=LOCK, now_s=time.time() + 1e6
        ),
    ],
    "disk": [
        case(
            trn1,
            "warn",
            "10 GiB free in the compile cache",
            "CACHE_URL",
            free={"/cache": 10 * GIB},
        ),
        case(
            trn1,
            "warn",
            "10 GiB free",
            f"export {NATIVE_CACHE}=",
            instance=TRN2,
            free={"neffs": 10 * GIB},
            **NEFFS,
        ),
        case(
            laptop,
            "bad",
            "export TMPDIR=",
            "/var/tmp",
            env={"TMPDIR": "/var/tmp"},
            free={"/var/tmp": GIB},
        ),
        case(laptop, "bad", "run_dir=", free={"": 3 * GIB}),
    ],
    "memory": [
        case(trn1, "warn", "32 ranks and the compiler", "ps", memory_bytes=(36 * GIB, 512 * GIB)),
        case(laptop, "bad", "for 1 rank -> end other programs", memory_bytes=(GIB // 2, 16 * GIB)),
    ],
    "malloc arenas": [
        case(trn1, "warn", "export MALLOC_ARENA_MAX=64", env={"MALLOC_ARENA_MAX": ""})
    ],
    "variables": [
        case(trn1, "bad", "rounds", "unset XLA_USE_BF16", env={"XLA_USE_BF16": "1"}),
        case(
            trn1,
            "warn",
            "unset XRT_WORKERS BUCKET_CAP_MB",
            env={"BUCKET_CAP_MB": "512", "XRT_WORKERS": "a"},
        ),
        case(trn1, "warn", "before 5.15", "unset FI_EFA_FORK_SAFE", env={"FI_EFA_FORK_SAFE": "1"}),
        case(trn1, "ok", env={"FI_EFA_FORK_SAFE": "1"}, kernel="5.10.0"),
    ],
    "host name": [
        case(trn1, "bad", "64 characters", "hostnamectl", hostname="x" * 64),
        case(
            trn1, "bad", "maps ip-10-0-0-4 to 127.0.1.1", "/etc/hosts", "hostname -I", files=LOOP
        ),
        case(trn1, "warn", "maps ip-10-0-0-4", files=LOOP, num_machines=1),
        case(trn1, "ok", files=NO_LOOP),
    ],
    "clock": [
        case(trn1, "bad", "1557.763", "chronyc makestep", says={CHRONY: FAR_OFF}),
        case(trn1, "warn", "2.5", "chronyc makestep", says={CHRONY: NEAR}),
        case(
            trn1,
            "warn",
            "Not synchronised",
            "systemctl enable",
            says={CHRONY: recorded("chronyc_alone.txt")},
        ),
        case(laptop, "warn", "timedatectl set-ntp true", says={TIMEDATE: "NTPSynchronized=no\n"}),
        case(laptop, "skip", "neither chronyc", says={TIMEDATE: NO_SYSTEMD}),
    ],
}


@pytest.mark.parametrize("check", checks.CHECKS)
def test_what_a_check_says(tmp_path, check):
    for number, (make, state, words, changes) in enumerate(CASES[check]):
        finding = checks.CHECKS[check](altered(make(tmp_path / str(number)), **changes))
        said = f"{finding.text} -> {finding.cure}"
        assert finding.state == state and all(word in said for word in words), finding


def test_neuron_ls_of_other_versions_and_chips():
    texts = (
        recorded("neuron_ls_old.json"),
        recorded("neuron_ls_trn2.json"),
        '[{"neuroncore_ids": [6, 7]}]',
    )
    old, trn2, bare = (neuron.read_neuron_ls(text)[0] for text in texts)
    assert (old.num_cores, old.holders, bare.number, bare.num_cores) == (2, (), 0, 2)
    assert trn2.num_cores == 4  # logical cores: 16 such chips take 64 ranks


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
    assert ask_tool("noexec").fault.startswith("noexec cannot be executed: ")
    assert ask_tool("hangs", timeout_s=0.2).fault == "hangs gave no answer in 0.2 s"


# ---- the command ---------------------------------------------------------------------------------------------------


def test_the_command_runs_here_without_torch():
    """In a process of its own, from which torch and all device libraries are out of reach."""
    blocked = ("torch", "torch_xla", "torch_neuronx", "transformers", "libneuronxla")
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); "
    code += "from train.tools.doctor.command import main; sys.exit(main())"
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in {knob.name for knob in neuron.KNOBS}
    }
    line = [sys.executable, "-c", code, "--json", "--ranks-per-machine", "1"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, env=clean)
    assert done.stderr == ""
    result = json.loads(done.stdout)
    reds = [finding for finding in result["findings"] if finding["state"] == "bad"]
    assert done.returncode == (1 if reds else 0), done.stdout
    assert result["ok"] == (not reds)
    assert [finding["name"] for finding in result["findings"]] == list(checks.CHECKS)


def test_the_screen_keeps_its_columns_and_is_coloured_on_terminals_that_want_it(
    monkeypatch, capsys
):
    findings = {
        "a": ok("well"),
        "b": warn("long " * 40, cure="pip " * 40),
        "c": bad("wrong", cure="pip"),
    }
    monkeypatch.setattr(checks, "examine", lambda probe: findings)
    monkeypatch.setenv("COLUMNS", "80")
    assert command.main([]) == 1
    text = capsys.readouterr().out.splitlines()
    assert text[0].index("well") == TEXT_COLUMN and max(map(len, text)) <= 80
    assert any(line.strip().startswith("-> pip") for line in text)
    assert text[-1] == "1 ok, 1 to look at, 1 to fix"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for unwanted in ("", "1"):
        monkeypatch.setenv("NO_COLOR", unwanted)
        command.main([])
        assert ("\033[31mBAD" in capsys.readouterr().out) == (not unwanted)
