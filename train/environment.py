"""What a process runs on and with: versions, commit, machine. For environment.json; no torch here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import conf
import train

PACKAGES: tuple[str, ...] = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "transformers")
PACKAGES += ("tokenizers", "datasets", "numpy", "safetensors", "hydra-core")


def environment() -> dict[str, Any]:
    """Where this process runs: versions, commit, the folders the code came from. No environment variables: secrets."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "baretrain": train.__version__,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit(),
        "code": [str(Path(train.__file__).parent), str(Path(conf.__file__ or "").parent)],
        "neuron_cc_flags": os.environ.get("NEURON_CC_FLAGS"),
        "host": platform.node(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit() -> str | None:
    """The git commit of the code, with a plus sign if it was changed; None outside a checkout."""
    if shutil.which("git") is None:
        return None
    folder = Path(train.__file__).parent
    found = subprocess.run(
        ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None
