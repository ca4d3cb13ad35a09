"""The facts about a machine that the doctor's checks read, and the finding that a check returns."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path

import yaml

from train.config import InstanceConfig
from train.machine.host import nvidia_gpus
from train.machine.rank_setup import AMAZON, efa_devices

TOOL_FOLDERS = "/opt/aws/neuron/bin:/opt/amazon/efa/bin:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin"
# a slow tool takes a few seconds, but one that queries a broken driver may never answer
TIMEOUT_S = 20.0
TRAINIUM_PCI = "0x7164"  # PCI id of trn1's chips, from the driver's neuron_device.h


@dataclass(frozen=True)
class Answer:
    """The output of a tool, and what went wrong; "" if nothing did."""

    out: str = ""
    fault: str = ""


def ask_tool(*command: str, timeout_s: float = TIMEOUT_S) -> Answer:
    """Run a tool from the PATH or from TOOL_FOLDERS and return its output. A tool that hangs is killed."""
    tool = command[0]
    path = shutil.which(tool, path=f"{os.environ.get('PATH', '')}:{TOOL_FOLDERS}")
    if path is None:
        return Answer(fault=f"{tool} is not installed")
    process = subprocess.Popen(
        [path, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        out, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # subprocess.run would wait after the kill, and a process that hangs in a driver may never end.
        process.kill()
        return Answer(fault=f"{tool} gave no answer in {timeout_s:g} s")
    if process.returncode:
        message = out.strip().partition("\n")[0]
        return Answer(out, fault=f"{tool} failed ({process.returncode}): {message[:160]}")
    return Answer(out)


@dataclass(frozen=True)
class Probe:
    """The facts about a machine."""

    ask: Callable[..., Answer] = ask_tool  # runs a tool, as in ask("neuron-ls", "-j")
    versions: Mapping[str, str] = field(default_factory=dict)  # version by installed package
    root: Path = Path("/")
    cpus: int = 1
    free_memory: int = 0  # bytes
    free_disk: Mapping[str, float] = field(default_factory=dict)  # bytes by folder
    instance: InstanceConfig = field(default_factory=InstanceConfig)

    @property
    def is_trainium(self) -> bool:
        """True if Neuron's driver has a device file, a Trainium chip is on the PCI bus, or the instance has one."""
        if self.instance.device == "neuron" or any(self.root.glob("dev/neuron[0-9]*")):
            return True
        for file in self.root.glob("sys/bus/pci/devices/*/device"):
            vendor = file.with_name("vendor").read_text().strip()
            if vendor == AMAZON and file.read_text().strip() == TRAINIUM_PCI:
                return True
        return False

    @property
    def has_gpu(self) -> bool:
        """True if an NVIDIA display or 3D controller is on the PCI bus, or its driver has a device file."""
        on_bus = nvidia_gpus(self.root / "sys/bus/pci/devices")
        return bool(on_bus) or any(self.root.glob("dev/nvidia[0-9]*"))

    @property
    def num_efa(self) -> int:
        return len(efa_devices(self.root / "sys"))


def read_instance(name: str) -> InstanceConfig:
    file = resources.files("conf") / "instance" / f"{name}.yaml"
    return InstanceConfig(**yaml.safe_load(file.read_text()))


@dataclass(frozen=True)
class Finding:
    """The result of a check. Its cure is a command or an action; "" if there is nothing to do."""

    state: str  # ok | warn | bad
    text: str
    cure: str = ""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def warn(text: str, *, cure: str) -> Finding:
    return Finding("warn", text, cure)


def bad(text: str, *, cure: str) -> Finding:
    return Finding("bad", text, cure)
