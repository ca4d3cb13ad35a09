"""The files that a build uploads besides its scripts: versions, packages with hashes, and baretrain's wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ami
from ami.config import AmiConfig
from ami.packages import write_packages
from train.config import Failure, check
from train.machine.versions import INDEX, Versions

HERE = Path(ami.__file__).parent
ROOT = HERE.parent
FOLDER = "baretrain"  # the folder that Packer uploads to /tmp


def write_files(
    folder: Path, cfg: AmiConfig, base_id: str, versions: Versions, commit: str
) -> Path:
    """Write all files into `folder`; return the folder that Packer uploads."""
    check(
        (ROOT / "constraints.txt").is_file(),
        f"images are built from a checkout, which has constraints.txt; {ROOT} is an installed package",
    )
    target = folder / FOLDER
    target.mkdir()
    shutil.copy(HERE / "provision/functions.sh", target)
    values = image_values(cfg, base_id, versions, commit)
    (target / "image.env").write_text(shell_values(values))
    wheel = write_wheel(target)
    constraints = folder / "constraints.txt"
    constraints.write_text(image_constraints(cfg.image, versions))
    write_packages(target, cfg.image, wheel, constraints, versions)
    return target


def write_wheel(folder: Path) -> Path:
    """Build baretrain's wheel from this checkout."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"the wheel cannot be built (pip install hatchling): {done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def image_constraints(image: str, versions: Versions) -> str:
    """Return the constraints: each package's tested version or, for Trainium's packages, that of Neuron's SDK."""
    tested = (ROOT / "constraints.txt").read_text()
    if image == "cuda":
        return tested
    # numpy is not pinned for Trainium, since it is not known which version neuronx-cc requires.
    own = {*versions.python_packages(), "numpy"}
    lines = [line for line in tested.splitlines() if not line.startswith("#")]
    rest = [line for line in lines if line.partition("==")[0] not in own]
    return neuron_constraints(versions) + "\n".join([*rest, ""])


def neuron_constraints(versions: Versions) -> str:
    """Return the content of constraints-trn1.txt."""
    head = f"# Neuron SDK {versions.sdk.name}, which ami/versions.yaml chooses (neuron-sdk); from Neuron's index. "
    lines = [f"{head}Not run on hardware."]
    for name, version in sorted(versions.python_packages().items()):
        lines.append(f"{name}=={version}")
    return "\n".join([*lines, ""])


def image_values(cfg: AmiConfig, base_id: str, versions: Versions, commit: str) -> dict[str, str]:
    """Return the values that the scripts of ami/provision read from /etc/baretrain/image.env."""
    return {
        "IMAGE": cfg.image,
        "BASE_IMAGE": base_id,
        "COMMIT": commit,
        "NEURON_SDK": versions.sdk.name,
        "NEURON_DKMS": versions.sdk.dkms,
        "NEURON_RUNTIME": versions.sdk.runtime,
        "NEURON_COLLECTIVES": versions.sdk.collectives,
        "NEURON_TOOLS": versions.sdk.tools,
        "NEURON_KEY": versions.keys["neuron"].version,
        "NEURON_INDEX": INDEX,
        "PYTHON": versions["python"],
        "EFA_INSTALLER": versions["efa-installer"],
        "EFA_KEY": versions.keys["efa"].version,
        "NVIDIA_DRIVER": versions["nvidia-driver"],
        "NVIDIA_DRIVER_LEAST": versions["nvidia-driver-least"],
    }


def shell_values(values: Mapping[str, str]) -> str:
    """Return lines of NAME='value' for a shell. Raises InputError if a value has special characters."""
    for name, value in values.items():
        check(
            re.fullmatch(r"[\w.:/+-]*", value, re.ASCII) is not None,
            f"{name}={value!r} has characters not allowed in image.env: use letters, digits, _.:/+-",
        )
    return "".join(f"{name}='{value}'\n" for name, value in values.items())
