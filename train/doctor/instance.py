"""Known instance types: what `conf/instance/<name>.yaml` says."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import yaml


@dataclass(frozen=True)
class Instance:
    name: str
    devices: int | None = None  # number of ranks that fill the machine
    rank_counts: tuple[int, ...] = ()  # numbers of ranks that it can run; (): unknown
    num_efa: int | None = None  # the most EFA interfaces that it can have; None: unknown

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
    return Instance(name, known.get("devices"), tuple(known.get("rank_counts") or ()), known.get("efa_interfaces"))
