"""Settings of a launch: which machines, how many, and how a site's scheduler is asked for them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import ClassVar

from train.config import InstanceConfig, check, check_choice
from train.config.checks import check_at_least, check_positive

MOST_NODES, MOST_RANKS, MOST_PARTS = 4096, 1024, 100_000  # ranks: of one machine


@dataclass(kw_only=True)
class ClusterConfig:
    """Where the machines come from. What differs between schedulers stands here: nothing else asks for their names."""

    is_here: ClassVar[bool] = False  # the job runs on this machine
    signals_ranks: ClassVar[bool] = False  # SIGTERM to the ranks alone means that the scheduler takes the machines
    finds_types: ClassVar[bool] = False  # machines may be of types that conf/instance does not have
    has_check: ClassVar[bool] = False  # check=true asks it more

    kind: str = "local"  # a name of the tables in launch/schedulers.py
    gate: bool = False  # train.doctor on every machine, and its collectives over all, before the trainer starts
    attempts: int = 20  # starts of the trainer that failed before the job gives up
    idle_attempts: int = 2  # starts in a row without a new checkpoint before the job gives up
    rendezvous: str = "static"  # how several machines join: static (rank 0 is on the first) | c10d

    def __post_init__(self) -> None:
        check_choice("cluster.rendezvous", self.rendezvous, ("static", "c10d"))
        check_positive("cluster.", self, "attempts", "idle_attempts")

    def interpreter(self) -> str:
        """The Python on the nodes."""
        return sys.executable


@dataclass(kw_only=True)
class LocalConfig(ClusterConfig):
    """This machine."""

    is_here: ClassVar[bool] = True


@dataclass(kw_only=True)
class LaunchConfig:
    """One launch: `python -m launch --cfg job` prints it."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    instance: InstanceConfig = field(default_factory=InstanceConfig)
    nodes: int = 1  # machines
    spares: int = 0  # more machines in the same allocation, for those that fail the preflight
    processes_per_node: int | None = None  # ranks a machine; None: all its devices
    submit: bool = False  # do it; without this the plan is printed and nothing starts
    check: bool = False  # cluster=ec2: ask EC2 whether it would do it, in each subnet (DryRun); nothing starts
    detach: bool = False  # cluster=local: return at once; the run continues in the background
    mfu: float | None = None  # share of the peak that the estimate assumes; None: a published figure of the device
    calibrate: str | None = None  # folder of a finished run whose speed the estimate takes instead
    prepare: bool = False  # prepare a corpus instead of training: the settings after -- are train.prepare's
    parts: int | None = None  # prepare=true: parts of the corpus that are prepared apart, each a task of a job array
    parts_at_once: int | None = None  # prepare=true: parts that run at the same time; None: all that fit

    def __post_init__(self) -> None:
        check(1 <= self.nodes <= MOST_NODES, f"nodes={self.nodes} must be from 1 to {MOST_NODES:,}")
        check_at_least("", self, spares=0)
        check_positive("", self, "processes_per_node", "mfu", "parts", "parts_at_once")
        ranks = self.processes_per_node or 1
        check(ranks <= MOST_RANKS, f"processes_per_node={ranks} must be at most {MOST_RANKS:,}")
        check((self.parts or 1) <= MOST_PARTS, f"parts={self.parts} must be at most {MOST_PARTS:,}")
        check(self.prepare or self.parts is self.parts_at_once is None, "parts and parts_at_once are for prepare=true")
        check((self.mfu or 0) < 1, f"mfu={self.mfu} is a share of the peak: below 1, as 0.3")
        check(self.mfu is None or self.calibrate is None, "give mfu or calibrate, not both")
        is_local = self.cluster.is_here
        check(
            not is_local or (self.nodes == 1 and self.spares == 0),
            f"cluster=local has one machine, this one, not {self.nodes + self.spares}; choose cluster=slurm or "
            "cluster=ec2",
        )
        check(not self.check or self.cluster.has_check, "check=true is for cluster=ec2; every plan asks Slurm")
        check(is_local or not self.detach, "detach is for cluster=local: jobs of a scheduler always are")
        check(
            self.spares == 0 or self.cluster.gate,
            f"spares={self.spares} replace machines that fail the preflight: set cluster.gate=true",
        )

    @property
    def ranks_per_node(self) -> int:
        return self.processes_per_node or self.instance.devices or 1
