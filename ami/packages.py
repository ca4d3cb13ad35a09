"""The Python packages of an image, whose versions and sha256 are resolved on the computer that starts the build.

The build installs only these packages, Neuron's only from Neuron's index and all others only from PyPI. If pip asked
both for a package that only one of them has, anybody could register its name with the other, and so put code into the
image. Not tested with Neuron's index.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.config import Failure, InputError, check
from train.machine.versions import INDEX, Versions
from train.storage.folders import sha256_file

NEURON = ("libneuronxla", "neuronx-cc", "torch-neuronx")  # installed only from Neuron's index
BUILDER = "setuptools"  # builds packages that have no wheel, so it needs a hash, too
EXTRAS = {"neuron": "report,trn1", "cuda": "report"}
PUBLIC, OF_NEURON = "requirements.txt", "neuron.txt"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str
    url: str

    @property
    def line(self) -> str:
        """A line of a requirements file."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}\n"


def write_packages(
    folder: Path, image: str, wheel: Path, constraints: Path, versions: Versions
) -> None:
    """Write two requirements files to `folder`: the packages from PyPI, with `wheel`, and those from Neuron's index.

    Raises Failure if a package cannot be resolved, InputError if this machine cannot resolve packages for the image.
    """
    python = find_python(versions["python"])
    of_neuron = list[Package]()
    if image == "neuron":
        pinned = versions.python_packages()
        wanted = [f"{name}=={pinned[name]}" for name in NEURON]
        of_neuron = resolve(python, "--no-deps", "--index-url", INDEX, *wanted)
    given = [f"{each.name} @ {each.url}#sha256={each.sha256}" for each in of_neuron]
    own = f"{wheel}[{EXTRAS[image]}]"
    found = resolve(python, "--constraint", str(constraints), BUILDER, own, *given)
    known = {"baretrain", *(each.name for each in of_neuron)}
    public = [each for each in found if each.name not in known]
    for each in public:
        is_neurons = "neuron" in each.name or each.name == "nki"
        check(
            not is_neurons,
            f"{each.name} is Neuron's, but pip found it on PyPI: add it to NEURON in ami/packages.py",
        )
    lines = [f"./{wheel.name} --hash=sha256:{sha256_file(wheel)}\n"]
    lines += [each.line for each in public]
    (folder / PUBLIC).write_text("".join(lines))
    (folder / OF_NEURON).write_text("".join(each.line for each in of_neuron))


def this_python() -> str:
    """Return the version of the running Python, such as 3.12."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def find_python(version: str) -> str:
    """Return the path of Python in the image's version. Raises InputError if it is missing, or on another platform."""
    here = f"{sys.platform} {platform.machine()}"
    check(
        here == "linux x86_64",
        f"images are for linux x86_64, not {here}: start the build on such a machine",
    )
    if this_python() == version:
        return sys.executable
    path = shutil.which(f"python{version}")
    if path is None:
        needed = f"the image has Python {version}, for which its packages are resolved"
        raise InputError(f"{needed}: install python{version} here")
    return path


def resolve(python: str, *arguments: str) -> list[Package]:
    """Return the packages that pip would install. It reads no configuration file, which could name another index."""
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--dry-run"]
    command += ["--ignore-installed", "--quiet", "--report", "-", *arguments]
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull}
    environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    environment.pop("PIP_EXTRA_INDEX_URL", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        said = "".join(errors[-1:]).removeprefix("ERROR: ") or done.stderr.strip()
        raise Failure(
            f"the packages of the image cannot be resolved ({said}); nothing was started"
        )
    return [package_of(each) for each in json.loads(done.stdout)["install"]]


def package_of(entry: dict[str, Any]) -> Package:
    """Return a package of pip's report. Raises Failure if it has no sha256, or characters that mean more to pip."""
    about = entry["metadata"]
    source = entry["download_info"]
    digest = source.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    name = re.sub(r"[-_.]+", "-", about["name"]).lower()
    shown = f"{name} {about['version']} {digest}"
    is_plain = re.fullmatch(r"[a-z0-9-]+ [\w.!+-]+ [0-9a-f]{64}", shown, re.ASCII)
    if is_plain is None and name != "baretrain":
        raise Failure(f"{shown!r} has an unusual version or no sha256: nothing was started")
    return Package(name, about["version"], digest, source["url"])
