"""All checks, in the order in which they are printed, and the probe of this machine from which they read facts."""

from __future__ import annotations

import functools
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from train.machine.host import installed_versions, instance_names, instance_type
from train.machine.memory import usable_cpus
from train.storage.atomic_io import free_bytes
from train.tools.doctor import checks_devices, checks_host, checks_versions
from train.tools.doctor.probe import Finding, Probe, ask_tool, ok, read_instance, warn

PRODUCT_NAME = "/sys/devices/virtual/dmi/id/product_name"  # a file that names the instance type on EC2's Nitro machines
LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK}


def machine(probe: Probe) -> Finding:
    """Return the machine's name and size, or a warning if --instance names a different instance type."""
    firmware = probe.text(PRODUCT_NAME) or ""
    text = f"{probe.system} {probe.kernel}, {probe.num_cpus} CPU cores"
    if probe.instance is None:
        return ok(text)
    if firmware in instance_names() and firmware != probe.instance.name:
        text = f"--instance {probe.instance.name}, but this is a {firmware}"
        return warn(text, cure=f"--instance {firmware}")
    return ok(f"{probe.instance.name}, {text}")


CHECKS: dict[str, Callable[[Probe], Finding]] = {  # by the name that is printed
    "machine": machine,
    "devices": checks_devices.devices,
    "held by": checks_devices.holders,
    "ranks": checks_devices.ranks,
    "Python": checks_versions.python,
    "packages": checks_versions.packages,
    "Neuron driver": checks_versions.driver,
    "EFA": checks_devices.efa,
    "fork safety": checks_host.fork_safety,
    "open files": checks_host.open_files,
    "locked memory": checks_host.locked_memory,
    "compile cache": checks_host.cache,
    "disk": checks_host.disk,
    "memory": checks_host.memory,
    "malloc arenas": checks_host.malloc,
    "variables": checks_host.knobs,
    "host name": checks_host.hostname,
    "clock": checks_host.clock,
}


def examine(probe: Probe) -> dict[str, Finding]:
    return {name: check(probe) for name, check in CHECKS.items()}


def here(
    *, instance: str | None = None, num_ranks: int | None = None, num_machines: int = 1
) -> Probe:
    """Probe this machine. If `instance` is None, use the type that the firmware names, if conf/instance has it."""
    name = instance or (instance_type() if instance_type() in instance_names() else None)
    memory = psutil.virtual_memory()
    return Probe(
        ask=functools.cache(ask_tool),
        versions=installed_versions(*checks_versions.PACKAGES),
        environ=dict(os.environ),
        system=platform.system(),
        kernel=platform.release(),
        hostname=platform.node(),
        python=sys.version_info[:3],
        glibc=platform.libc_ver()[1] if platform.libc_ver()[0] == "glibc" else "",
        num_cpus=usable_cpus(),
        limits={name: read_limit(kind) for name, kind in LIMITS.items()},
        memory_bytes=(memory.available, memory.total),
        free_bytes=free_bytes,
        cwd=Path.cwd(),
        now_s=time.time(),
        instance=read_instance(name) if name else None,
        num_ranks=num_ranks,
        num_machines=num_machines,
    )


def read_limit(kind: int) -> tuple[float, float]:
    """Return the soft and the hard limit; infinity means no limit."""
    soft, hard = (
        math.inf if value == resource.RLIM_INFINITY else value
        for value in resource.getrlimit(kind)
    )
    return soft, hard
