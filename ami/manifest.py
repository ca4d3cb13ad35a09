"""The versions installed on an image, for /etc/baretrain/manifest.json. This module runs on the image."""

from __future__ import annotations

import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import train
from train.config import InputError
from train.machine.versions import Versions

ENVIRONMENT = Path("/etc/baretrain/image.env")
SYSTEM = r"aws-neuronx|efa|libfabric|linux-image|linux-aws|mdadm|nvidia|libnccl-ofi|openmpi"  # package prefixes
EFA = Path("/opt/amazon/efa_installed_packages")


def installed(environment: Path = ENVIRONMENT, efa: Path = EFA) -> dict[str, Any]:
    """Return the versions on this machine, without times, so that equal machines have equal manifests."""
    values = dict(re.findall(r"^([A-Z_]+)='(.*)'$", environment.read_text(), re.MULTILINE))
    query = ["dpkg-query", "-W", "-f=${db:Status-Abbrev} ${Package} ${Version}\\n"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    rows = [row.split() for row in listed.splitlines()]
    version = re.search(r"EFA installer version: (\S+)", efa.read_text() if efa.is_file() else "")
    return {
        "schema": 1,
        "image": values.get("IMAGE", ""),
        "base_image": values.get("BASE_IMAGE", ""),
        "commit": values.get("COMMIT", ""),
        "baretrain": train.__version__,
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "python": platform.python_version(),
        "efa_installer": version[1] if version else None,
        "system_packages": {
            row[1]: row[2] for row in rows if len(row) == 3 and re.match(SYSTEM, row[1])
        },
        "packages": {
            each.name.lower(): each.version for each in metadata.distributions() if each.name
        },
    }


def check_installed(manifest: Mapping[str, Any], versions: Versions) -> None:
    """Raise InputError if a version differs from ami/versions.yaml."""
    is_neuron, has, system = (
        manifest["image"] == "neuron",
        manifest["packages"],
        manifest["system_packages"],
    )
    wanted = versions.python_packages() if is_neuron else {"torch": versions["torch"]}
    begins = versions.system_packages() if is_neuron else {}
    wrong = [
        f"{name} {has.get(name, 'is missing')}, not {version}"
        for name, version in wanted.items()
        if has.get(name, "").split("+")[0] != version
    ]
    wrong += [
        f"{name} {system.get(name, 'is missing')}, not {version}"
        for name, version in begins.items()
        if not f"{system.get(name, '')}.".startswith(f"{version}.")
    ]
    if wrong:
        raise InputError(
            f"this image differs from ami/versions.yaml: {'; '.join(wrong)}; build it again"
        )
