"""Settings of a launch: the kind and number of machines, and the scheduler that provides them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar

from train.config import InstanceConfig, Section, check, setting

# EC2 instance families that our images do not support
OLD_GPUS = {
    "p3": "V100s",
    "p2": "K80s",
    "g3": "M60s",
}
# the form of an EC2 instance type, such as trn1.32xlarge
INSTANCE_TYPE = r"[a-z][a-z0-9-]*\.[a-z0-9-]+"


@dataclass(kw_only=True)
class ClusterConfig(Section, prefix="cluster."):
    """Settings of the scheduler that provides the machines. Other code tests the class variables, never `kind`."""

    # whether the job runs on this machine
    is_here: ClassVar[bool] = False
    # whether a SIGTERM to ranks alone means that machines are taken away
    signals_ranks: ClassVar[bool] = False
    # whether the scheduler knows machine types that conf/instance does not list
    finds_types: ClassVar[bool] = False
    # whether check=true is supported
    has_check: ClassVar[bool] = False
    # whether the machines see the folders of this one
    shares_disks: ClassVar[bool] = True

    # The name of the scheduler in launch/schedulers.py; cluster=... sets it.
    kind: str = "local"
    # Before training, run baretrain doctor on every machine and test collectives over all machines.
    gate: bool = False
    # The number of failed attempts after which the job gives up.
    attempts: int = setting(20, above=0)

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
    # The number of extra machines that can replace those that fail the preflight.
    spares: int = setting(0, least=0)
    # The number of ranks per machine; None starts one per device.
    processes_per_node: int | None = setting(None, above=0, most=1024)
    # Start the job; false prints the plan and starts nothing.
    submit: bool = False
    # Ask EC2 whether it would start the machines in each subnet (DryRun), and start nothing.
    check: bool = False
    # The folder of a finished run, whose measured speed the estimate uses; None uses a published figure for the device.
    calibrate: str | None = None
    # Prepare a corpus instead of training. Settings of baretrain prepare then follow the --.
    prepare: bool = False
    # The number of parts into which prepare=true splits the corpus, each a task of a job array; None does not split it.
    parts: int | None = setting(None, above=0, most=100_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.prepare or self.parts is None, "parts needs prepare=true")
        is_local = self.cluster.is_here
        check(
            not is_local or (self.nodes == 1 and self.spares == 0),
            f"cluster=local uses only this machine, not {self.nodes + self.spares}; choose cluster=slurm or "
            "cluster=ec2",
        )
        gpus = OLD_GPUS.get(self.instance.name[:2])
        check(
            is_local or gpus is None,
            f"instance={self.instance.name} has {gpus}, which neither our image's open driver nor CUDA 13 (used by "
            "current PyTorch builds) supports; ParallelCluster has rejected p3 since 3.9. Use g6.12xlarge, "
            "g6e.12xlarge or p4d.24xlarge",
        )
        check(
            not self.check or self.cluster.has_check,
            "check=true is for cluster=ec2; plans for Slurm always ask it",
        )
        check(
            self.spares == 0 or self.cluster.gate,
            f"spares={self.spares} can only replace machines that fail the preflight: set cluster.gate=true",
        )

    @property
    def ranks_per_node(self) -> int:
        return self.processes_per_node or self.instance.devices or 1
