"""The command that runs on an image while it is built: it checks and writes the installed versions."""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import train
from train.config import InputError
from train.machine.versions import Versions, read_versions
from train.run.command import DONE, Parser
from train.storage.folders import canonical_json, local_path

ENVIRONMENT = Path("/etc/baretrain/image.env")
SYSTEM = r"aws-neuronx|efa|libfabric|linux-image|linux-aws|mdadm|nvidia|libnccl-ofi|openmpi"  # package prefixes


def manifest_flags(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="file to write")


def write_manifest(options: argparse.Namespace) -> int:
    """Write the installed versions. Raises InputError if they differ from ami/versions.yaml."""
    manifest = installed()
    check_installed(manifest, read_versions())
    local_path(options.file).write_bytes(canonical_json(manifest))
    return DONE


# ---- versions --------------------------------------------------------------------------------------------------------


def installed() -> dict[str, Any]:
    """Return the versions on this machine, without times, so that equal machines have equal manifests."""
    values = dict(re.findall(r"^([A-Z_]+)='(.*)'$", ENVIRONMENT.read_text(), re.MULTILINE))
    return {
        "image": values.get("IMAGE", ""),
        "base_image": values.get("BASE_IMAGE", ""),
        "commit": values.get("COMMIT", ""),
        "baretrain": train.__version__,
        "system": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "python": platform.python_version(),
        "system_packages": system_packages(),
        "packages": {each.name.lower(): each.version for each in metadata.distributions()},
    }


def system_packages() -> dict[str, str]:
    query = ["dpkg-query", "-W", "-f=${Package} ${Version}\\n"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    packages = {}
    for line in listed.splitlines():
        name, _, version = line.partition(" ")
        if version and re.match(SYSTEM, name):
            packages[name] = version
    return packages


def check_installed(manifest: Mapping[str, Any], versions: Versions) -> None:
    """Raise InputError if a version differs from ami/versions.yaml."""
    wanted = {"torch": versions["torch"]}
    prefixes = dict[str, str]()
    if manifest["image"] == "neuron":
        wanted = versions.python_packages()
        prefixes = versions.system_packages()
    wrong = []
    for name, version in wanted.items():
        found = manifest["packages"].get(name, "is missing")
        if found.split("+")[0] != version:
            wrong.append(f"{name} {found}, not {version}")
    for name, version in prefixes.items():
        found = manifest["system_packages"].get(name, "is missing")
        if not f"{found}.".startswith(f"{version}."):
            wrong.append(f"{name} {found}, not {version}")
    if wrong:
        listed = "; ".join(wrong)
        raise InputError(f"this image differs from ami/versions.yaml: {listed}; build it again")
