"""The probe, which has all the facts that checks read, and the finding that a check returns."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Literal

import yaml

from train.config import InstanceConfig
from train.machine.console import visible
from train.machine.host import nvidia_gpus
from train.machine.neuron import is_native
from train.machine.rank_setup import AMAZON, efa_devices

TOOL_FOLDERS = (
    "/opt/aws/neuron/bin",
    "/opt/amazon/efa/bin",
    "/usr/local/sbin",
    "/usr/sbin",
    "/sbin",
    "/usr/bin",
)
# A slow tool takes a few seconds, but one that queries a broken driver may never answer.
TIMEOUT_S = 20.0
PCI = "/sys/bus/pci/devices"
# PCI ids of trn2 and trn3, from the driver's neuron_device.h
NATIVE_PCI = (
    "0x7364",
    "0x7564",
    "0x7565",
)
TRAINIUM_PCI = ("0x7164", *NATIVE_PCI)


@dataclass(frozen=True)
class ToolOutput:
    """The output of a tool, and what went wrong, if anything."""

    out: str = ""
    fault: str | None = None  # None if the tool succeeded
    is_missing: bool = False


def ask_tool(*command: str, timeout_s: float = TIMEOUT_S) -> ToolOutput:
    """Run a tool from the PATH or from TOOL_FOLDERS and return its output. A tool that hangs is killed."""
    tool = command[0]
    path = shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", ""), *TOOL_FOLDERS]))
    if path is None:
        return ToolOutput(fault=f"{tool} is not installed", is_missing=True)
    try:
        process = subprocess.Popen(
            [path, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:  # The file exists but cannot be executed.
        return ToolOutput(fault=f"{tool} cannot be executed: {error.strerror}")
    try:
        out, error_text = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        # subprocess.run would wait after the kill, and a process that hangs in a driver may never end.
        process.kill()
        return ToolOutput(fault=f"{tool} gave no answer in {timeout_s:g} s")
    message = (error_text.strip() or out.strip() or "no message").splitlines()[0]
    return ToolOutput(
        out,
        f"{tool} failed ({process.returncode}): {message[:160]}" if process.returncode else None,
    )


@dataclass(frozen=True)
class Probe:
    """The facts about a machine, and about the run that the user plans on it."""

    ask: Callable[..., ToolOutput]  # runs a tool, as in ask("neuron-ls", "-j")
    versions: Mapping[str, str] = field(default_factory=dict)  # version by installed package
    environ: Mapping[str, str] = field(default_factory=dict)
    root: Path = Path("/")
    system: str = "Linux"
    kernel: str = ""  # such as "6.8.0-1021-aws"
    hostname: str = ""
    python: tuple[int, ...] = (3, 11, 0)
    glibc: str = ""  # such as "2.35"; "" if unknown
    num_cpus: int = 1
    # soft and hard limit; inf if unlimited
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    memory_bytes: tuple[int, int] = (0, 0)  # available and total
    free_bytes: Callable[[Path], float] = lambda path: 0  # free space on a path's disk
    cwd: Path = Path()
    now_s: float = 0.0
    instance: InstanceConfig | None = None
    num_ranks: int | None = None
    num_machines: int = 1

    def text(self, path: str) -> str | None:
        """Return the stripped content of the file at an absolute path; None if it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return None

    def files(self, pattern: str) -> list[Path]:
        return sorted(self.root.glob(pattern.lstrip("/")))

    @property
    def is_old_kernel(self) -> bool:
        """True if Linux is older than 5.15. On such a kernel, EFA must protect its memory when a process forks."""
        return self.system == "Linux" and () < numbers(self.kernel, 2) < (5, 15)

    @property
    def num_devices(self) -> int | None:
        """Number of the instance type's devices, each of which one rank uses; None if unknown."""
        return self.instance.devices if self.instance else None

    @property
    def neuron_devices(self) -> list[Path]:
        return self.files("/dev/neuron[0-9]*")

    @property
    def efa_devices(self) -> list[str]:
        return efa_devices(self.root / "sys")

    @property
    def is_trainium(self) -> bool:
        if (self.instance and self.instance.device == "neuron") or self.neuron_devices:
            return True
        return bool(self.chips())

    def chips(self) -> set[str]:
        """Return the PCI ids of the Neuron chips."""
        ids = [
            (file.read_text().strip(), file.with_name("vendor"))
            for file in self.files(f"{PCI}/*/device")
        ]
        return {
            number
            for number, vendor in ids
            if number in TRAINIUM_PCI and vendor.read_text().strip() == AMAZON
        }

    @property
    def is_native(self) -> bool:
        """True if PyTorch runs without XLA on this machine's accelerator."""
        by_name = self.instance is not None and is_native(self.instance.name)
        return by_name or bool(self.chips() & set(NATIVE_PCI))

    @property
    def has_gpu(self) -> bool:
        """True if an NVIDIA display or 3D controller is on the PCI bus, or its driver has a device file."""
        return bool(nvidia_gpus(self.root / PCI.lstrip("/")) or self.files("/dev/nvidia[0-9]*"))

    @property
    def is_accelerated(self) -> bool:
        return self.is_trainium or self.has_gpu


def read_instance(name: str) -> InstanceConfig:
    return InstanceConfig(
        **yaml.safe_load((resources.files("conf") / "instance" / f"{name}.yaml").read_text())
    )


def numbers(version: str, count: int = 3) -> tuple[int, ...]:
    """Return the first `count` numbers in a version, such as (2, 33, 10) for "2.33.10.0-e2ac4bb8c"."""
    return tuple(map(int, re.findall(r"\d+", version)[:count]))


def nearest(path: Path) -> Path:
    """Return the path if it exists, otherwise the closest folder above it that does."""
    # Path.exists raises if a folder is not readable.
    while not os.access(path, os.F_OK) and path != path.parent:
        path = path.parent
    return path


# ---- findings ------------------------------------------------------------------------------------------------------

State = Literal["ok", "warn", "bad", "skip"]
# ANSI: green, yellow, red, faint
COLOURS: dict[State, int] = {
    "ok": 32,
    "warn": 33,
    "bad": 31,
    "skip": 2,
}
MARKS: dict[State, str] = {"ok": "ok", "warn": "warn", "bad": "BAD", "skip": "-"}
NAME_COLUMN, TEXT_COLUMN = 6, 22


@dataclass(frozen=True)
class Finding:
    state: State
    text: str
    cure: str = ""  # command or action; set if and only if the state is warn or bad

    def __post_init__(self) -> None:
        assert bool(self.cure) == (self.state in ("warn", "bad")), self


ok, skip = partial(Finding, "ok"), partial(Finding, "skip")
warn, bad = partial(Finding, "warn"), partial(Finding, "bad")


def is_red(findings: Mapping[str, Finding]) -> bool:
    return any(finding.state == "bad" for finding in findings.values())


def screen(findings: Mapping[str, Finding], *, width: int, colour: bool) -> list[str]:
    """Return all findings as lines of `width` columns. Lines break only at spaces, so that commands can be copied."""
    lines, count = [], dict.fromkeys(COLOURS, 0)
    for name, finding in findings.items():
        count[finding.state] += 1
        mark = f"{MARKS[finding.state]:{NAME_COLUMN}}"
        mark = f"\033[{COLOURS[finding.state]}m{mark}\033[0m" if colour else mark
        text, *more = wrap(finding.text, width=width - TEXT_COLUMN)
        more += wrap(f"-> {finding.cure}", width=width - TEXT_COLUMN) if finding.cure else []
        lines.append(f"{mark}{name:{TEXT_COLUMN - NAME_COLUMN}}{text}")
        lines += [" " * TEXT_COLUMN + line for line in more]
    summary = f"{count['ok']} ok, {count['warn']} to look at, {count['bad']} to fix"
    return [*lines, summary + (f", {count['skip']} not applicable" if count["skip"] else "")]


def wrap(text: str, *, width: int) -> list[str]:
    return textwrap.wrap(
        visible(text, keep="\n\t"), max(width, 20), break_long_words=False, break_on_hyphens=False
    ) or [""]
