"""Versions of packages that work together, from ami/versions.yaml. Images, constraints, doctor and launch use them."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources

import yaml

INDEX = "https://pip.repos.neuron.amazonaws.com"  # Neuron's index; the public index has only stubs of these packages
TORCH = "2.9.0"  # the torch release with which torch-neuronx's version begins


def from_index(packages: str) -> str:
    """Return the commands that install packages from Neuron's index, then their dependencies from the public index.

    If one command searched both indexes, anybody could register one of the names on the public index and inject code.
    """
    return f"pip install --no-deps --index-url {INDEX} {packages} && pip install {packages}"


@dataclass(frozen=True)
class Sdk:
    """Versions of the packages in one release of the Neuron SDK."""

    name: str
    torch_neuronx: str  # without the torch release at the beginning
    neuronx_cc: str
    libneuronxla: str
    runtime: str
    dkms: str
    collectives: str = ""  # empty if not known
    tools: str = ""

    @property
    def install(self) -> str:
        """The command that installs the SDK's Python packages."""
        return from_index(
            f"neuronx-cc=={self.neuronx_cc} torch-neuronx=={TORCH}.{self.torch_neuronx}"
        )


def release(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version: (2, 9) for "2.9.0.2.15.32035"; (0, 0) for ""."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match:
        return (int(match[1]), int(match[2]))
    return (0, 0)


@dataclass(frozen=True)
class Pin:
    version: str
    source: str
    date: str  # date of the source, or day on which the source was read


@dataclass(frozen=True)
class Versions:
    pins: dict[str, Pin]
    sdks: tuple[Sdk, ...]  # oldest first
    keys: dict[str, Pin]  # fingerprints of keys that sign downloads
    bases: dict[str, Pin]  # SSM parameters that name the images from which our images are built

    def __getitem__(self, name: str) -> str:
        return self.pins[name].version

    @property
    def sdk(self) -> Sdk:
        """The SDK of our images. The pin neuron-sdk names it."""
        return next(sdk for sdk in self.sdks if sdk.name == self["neuron-sdk"])

    def python_packages(self) -> dict[str, str]:
        """Return the exact versions of Neuron's packages for Trainium 1, and of the torch and torch-xla they need."""
        return {
            "libneuronxla": self.sdk.libneuronxla,
            "neuronx-cc": self.sdk.neuronx_cc,
            "torch": self["torch"],
            "torch-neuronx": f"{TORCH}.{self.sdk.torch_neuronx}",
            "torch-xla": self["torch-xla"],
        }

    def system_packages(self) -> dict[str, str]:
        """Return Neuron's Debian packages, each with a prefix of its version."""
        return {
            "aws-neuronx-collectives": self.sdk.collectives,
            "aws-neuronx-dkms": self.sdk.dkms,
            "aws-neuronx-runtime-lib": self.sdk.runtime,
            "aws-neuronx-tools": self.sdk.tools,
        }


@functools.cache
def read_versions() -> Versions:
    table = yaml.safe_load((resources.files("ami") / "versions.yaml").read_text())
    pins, keys, bases = (
        {name: Pin(**pin) for name, pin in table[part].items()}
        for part in ("pins", "keys", "bases")
    )
    sdks = tuple(Sdk(**sdk) for sdk in table["neuron_sdks"])
    return Versions(pins, sdks, keys, bases)
