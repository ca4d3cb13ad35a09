"""Which checks there are, in the order of the screen, and how a real machine is read for them."""

from __future__ import annotations

import functools
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable
from importlib import util
from pathlib import Path

import psutil

from train.doctor import checks_devices, checks_host, checks_versions
from train.doctor.finding import Finding, bad, ok, warn
from train.doctor.instance import EFA_INTERFACES, instance_names, read_instance
from train.doctor.probe import Probe, ask_tool
from train.machine import installed_versions

PRODUCT_NAME = Path("/sys/devices/virtual/dmi/id/product_name")  # on EC2's Nitro machines: the instance type
LIMITS = {"nofile": "RLIMIT_NOFILE", "memlock": "RLIMIT_MEMLOCK", "nproc": "RLIMIT_NPROC"}


def machine(probe: Probe) -> Finding:
    """What this machine is, and whether it is what the user takes it for."""
    told = (probe.text(str(PRODUCT_NAME)) or "").strip()
    text = f"{probe.system} {probe.kernel}, {probe.num_cpus} CPU cores"
    if probe.instance is None:
        return ok("machine", text)
    if told in {*instance_names(), *EFA_INTERFACES} and told != probe.instance.name:
        return warn("machine", f"--instance {probe.instance.name}, but this is a {told}", cure=f"--instance {told}")
    return ok("machine", f"{probe.instance.name}, {text}")


CHECKS: tuple[Callable[[Probe], Finding], ...] = (
    machine,
    checks_devices.devices,
    checks_devices.holders,
    checks_devices.ranks,
    checks_versions.python,
    checks_versions.packages,
    checks_versions.driver,
    checks_devices.efa,
    checks_host.fork_safety,
    checks_host.open_files,
    checks_host.locked_memory,
    checks_host.processes,
    checks_host.reserved_ports,
    checks_host.cache,
    checks_host.disk,
    checks_host.memory,
    checks_host.shared_memory,
    checks_host.malloc,
    checks_host.knobs,
    checks_host.hostname,
    checks_host.clock,
)


def examine(probe: Probe, *, bucket: str | None = None) -> list[Finding]:
    """Every finding, in the order of the screen."""
    findings = [check(probe) for check in CHECKS]
    return findings + (examine_bucket(bucket, now_s=probe.now_s) if bucket else [])


def examine_bucket(location: str, *, now_s: float) -> list[Finding]:
    if util.find_spec("boto3") is None:
        return [bad("S3", "boto3 is not installed", cure="pip install boto3")]
    from train.doctor import checks_s3

    return checks_s3.bucket(location, now_s=now_s)


def here(*, instance: str | None = None, num_ranks: int | None = None, num_machines: int = 1) -> Probe:
    """This machine. Without a name the instance type is what the firmware says, if it is one that is known."""
    told = PRODUCT_NAME.read_text().strip() if PRODUCT_NAME.is_file() else ""
    name = instance or (told if told in {*instance_names(), *EFA_INTERFACES} else None)
    available = psutil.virtual_memory()
    return Probe(
        ask=functools.cache(ask_tool),
        versions=installed_versions(*checks_versions.PACKAGES),
        environ=dict(os.environ),
        system=platform.system(),
        kernel=platform.release(),
        hostname=platform.node(),
        python=sys.version_info[:3],
        glibc=platform.libc_ver()[1] if platform.libc_ver()[0] == "glibc" else "",
        num_cpus=os.cpu_count() or 1,
        limits={name: read_limit(kind) for name, kind in LIMITS.items() if hasattr(resource, kind)},
        memory_bytes=(available.available, available.total),
        free_bytes=free_bytes,
        cwd=Path.cwd(),
        now_s=time.time(),
        instance=read_instance(name) if name else None,
        num_ranks=num_ranks,
        num_machines=num_machines,
    )


def read_limit(kind: str) -> tuple[float, float]:
    """Soft and hard limit; inf: none."""
    soft, hard = resource.getrlimit(getattr(resource, kind))
    unlimited = resource.RLIM_INFINITY
    return (float("inf") if soft == unlimited else soft), (float("inf") if hard == unlimited else hard)


def free_bytes(path: Path) -> int | None:
    """Free space of the disk that holds a path, for this user; None if there is no such path."""
    return shutil.disk_usage(path).free if os.access(path, os.F_OK) else None
