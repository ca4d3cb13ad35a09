"""Known instance types: what `conf/instance/<name>.yaml` says, and the number of EFA interfaces."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import yaml

# MaximumEfaInterfaces of EC2's DescribeInstanceTypes, as of 2026-11.
EFA_INTERFACES = {
    "trn1.2xlarge": 0,
    "trn1.32xlarge": 8,
    "trn1n.32xlarge": 16,
    "trn2.3xlarge": 1,
    "trn2.48xlarge": 16,
    "p3.16xlarge": 0,
    "p4d.24xlarge": 4,
    "p4de.24xlarge": 4,
    "p5.48xlarge": 32,
    "p5e.48xlarge": 32,
    "p5en.48xlarge": 16,
    "p6-b200.48xlarge": 8,
}


@dataclass(frozen=True)
class Instance:
    name: str
    devices: int | None = None  # number of ranks that fill the machine
    rank_counts: tuple[int, ...] = ()  # numbers of ranks that it can run; (): unknown

    @property
    def num_efa(self) -> int | None:
        return EFA_INTERFACES.get(self.name)

    @property
    def is_trainium(self) -> bool:
        return self.name.startswith("trn")

    @property
    def is_native(self) -> bool:
        """Whether PyTorch uses it without XLA (trn2, trn3)."""
        return self.name.startswith(("trn2", "trn3"))


def instance_names() -> list[str]:
    folder = resources.files("conf") / "instance"
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


def read_instance(name: str) -> Instance:
    """Read an instance type; one without a YAML file has only its name."""
    if name not in instance_names():
        return Instance(name)
    known = yaml.safe_load((resources.files("conf") / "instance" / f"{name}.yaml").read_text())
    return Instance(name, known.get("devices"), tuple(known.get("rank_counts") or ()))
