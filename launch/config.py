"""Settings of a launch: the kind and number of machines, and the scheduler that provides them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar

from train.config import InstanceConfig, Section, check, setting


@dataclass(kw_only=True)
class ClusterConfig(Section, prefix="cluster."):
    """Settings of the scheduler that provides the machines. Other code tests the class variables, never `kind`."""

    # the name in launch/schedulers.py
    kind: ClassVar[str] = "local"
    # whether the job runs on this machine; whether a SIGTERM to ranks alone means that machines are taken away.
    is_here: ClassVar[bool] = False
    signals_ranks: ClassVar[bool] = False
    # whether the machines see the folders of this one
    shares_disks: ClassVar[bool] = True

    # Before training, run baretrain doctor on every machine and test collectives over all machines.
    gate: bool = False

    def interpreter(self) -> str:
        """Return the path of Python on the nodes."""
        return sys.executable

    @property
    def ends_after_s(self) -> float | None:
        """The seconds after which the run is stopped for good; None without a limit."""
        return None


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    is_here: ClassVar[bool] = True


@dataclass(kw_only=True)
class LaunchConfig(Section):
    """The settings of one launch; `baretrain launch --cfg job` prints them."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    # The number of machines.
    nodes: int = setting(1, least=1, most=4096)
    # The number of ranks per machine; None starts one per device.
    processes_per_node: int | None = setting(None, above=0, most=1024)
    # Start the job; false prints the plan and starts nothing.
    submit: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.nodes == 1 or not self.cluster.is_here,
            f"cluster=local uses only this machine, not {self.nodes}; choose cluster=slurm or cluster=ec2",
        )

    @property
    def ranks_per_node(self) -> int:
        return self.processes_per_node or self.instance.devices or 1
