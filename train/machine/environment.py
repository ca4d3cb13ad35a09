"""The versions, commit and machine of a process, for environment.json. Does not import torch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import conf
import train
from train.machine.host import installed_versions
from train.machine.memory import usable_cpus

PACKAGES: tuple[str, ...] = (
    "torch",
    "torch-xla",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
    "transformers",
)
PACKAGES += ("tokenizers", "datasets", "numpy", "safetensors", "hydra-core")


def environment() -> dict[str, Any]:
    """Return versions, commit, code folders, machine, and NEURON_CC_FLAGS; other variables may be secret."""
    return {
        "baretrain": train.__version__,
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "code": [str(Path(train.__file__).parent), str(Path(conf.__file__ or "").parent)],
        "neuron_cc_flags": os.environ.get("NEURON_CC_FLAGS"),
        "host": platform.node(),
        "machine": platform.machine(),
        "processor": processor(),
        "cpus": usable_cpus(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of PACKAGES; None for packages that are not installed."""
    installed = installed_versions(*PACKAGES)
    return {package: installed.get(package) for package in PACKAGES}


def processor() -> str | None:
    """Return the model name of this machine's processors; None if Linux does not report it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None
    )


def commit() -> str | None:
    """Return the git commit of the code, followed by "+" if it has uncommitted changes; None outside a checkout."""
    if shutil.which("git") is None:
        return None
    # A repository around an installed copy of the code does not have its files.
    is_ours = git("ls-files", "--error-unmatch", Path(train.__file__).name) is not None
    if is_ours:
        return git("describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*")
    return None


def git(*words: str) -> str | None:
    """Return what git prints in the folder of the code; None if it fails. GIT_DIR and the like name other folders."""
    command = ["git", "-C", str(Path(train.__file__).parent), *words]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode == 0:
        return done.stdout.strip()
    return None
