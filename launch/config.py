"""Settings of a launch: the machines, their number, and how a site's scheduler provides them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar

from train.config import InstanceConfig, Section, check, setting

OLD_GPUS = {"p3": "V100s", "p2": "K80s", "g3": "M60s"}  # families of EC2's types
INSTANCE_TYPE = r"[a-z][a-z0-9-]*\.[a-z0-9-]+"  # a name of EC2's, as trn1.32xlarge
MOST_NODES, MOST_RANKS, MOST_PARTS = 4096, 1024, 100_000  # ranks: per machine


@dataclass(kw_only=True)
class ClusterConfig(Section, prefix="cluster."):
    """The source of machines. Differences between schedulers are declared here: no other code asks for their names."""

    is_here: ClassVar[bool] = False  # the job runs on this machine
    signals_ranks: ClassVar[bool] = False  # SIGTERM to the ranks alone means that the scheduler takes the machines
    finds_types: ClassVar[bool] = False  # machines may be of types that conf/instance does not have
    has_check: ClassVar[bool] = False  # check=true asks it for more

    kind: str = "local"  # The name of the scheduler in launch/schedulers.py; cluster=... sets it.
    gate: bool = False  # Run train.doctor on every machine, and its collectives over all, before the trainer starts.
    attempts: int = setting(20, above=0)  # The number of failed starts of the trainer after which the job gives up.

    def interpreter(self) -> str:
        """Return the Python on the nodes."""
        return sys.executable


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    is_here: ClassVar[bool] = True


@dataclass(kw_only=True)
class LaunchConfig(Section):
    """One launch: `python -m launch --cfg job` prints it."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    nodes: int = setting(1, least=1, most=MOST_NODES)  # The number of machines.
    spares: int = setting(0, least=0)  # The further machines in the allocation, for those that fail the preflight.
    processes_per_node: int | None = setting(None, above=0, most=MOST_RANKS)  # The ranks of a machine; None is one a
    # device.
    submit: bool = False  # Start the job; false prints the plan and starts nothing.
    check: bool = False  # Ask EC2 in each subnet whether it would start (DryRun), and start nothing.
    calibrate: str | None = None  # The folder of a finished run whose speed the estimate takes; None takes a published
    # figure of the device.
    prepare: bool = False  # Prepare a corpus instead of training, with the settings of train.prepare after --.
    parts: int | None = setting(None, above=0, most=MOST_PARTS)  # The number of parts of the corpus that prepare=true
    # prepares apart, each as a task of a job array.

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.prepare or self.parts is None, "parts is for prepare=true")
        is_local = self.cluster.is_here
        check(
            not is_local or (self.nodes == 1 and self.spares == 0),
            f"cluster=local has one machine, this one, not {self.nodes + self.spares}; choose cluster=slurm or "
            "cluster=ec2",
        )
        gpus = OLD_GPUS.get(self.instance.name[:2])
        check(
            is_local or gpus is None,
            f"instance={self.instance.name} has {gpus}: neither the open driver of our image nor CUDA 13, with which "
            "PyTorch is built today, drives them, and ParallelCluster rejects p3 since 3.9. Take g6.12xlarge, "
            "g6e.12xlarge or p4d.24xlarge",
        )
        check(not self.check or self.cluster.has_check, "check=true is for cluster=ec2; every plan asks Slurm")
        check(
            self.spares == 0 or self.cluster.gate,
            f"spares={self.spares} replace machines that fail the preflight: set cluster.gate=true",
        )

    @property
    def ranks_per_node(self) -> int:
        return self.processes_per_node or self.instance.devices or 1
