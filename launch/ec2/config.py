"""Settings of machines on EC2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from launch.config import ClusterConfig
from train.config import check, setting

MARKETS = ("on-demand", "spot", "capacity-block")


@dataclass(kw_only=True)
class Ec2Config(ClusterConfig):
    """Machines of EC2. One YAML an account in conf/cluster/ holds what differs from this."""

    finds_types: ClassVar[bool] = True
    has_check: ClassVar[bool] = True

    kind: str = "ec2"
    gate: bool = True
    regions: list[str] = field(default_factory=list)  # tried in this order; []: s3.region, or the profile's
    subnets: list[str] = field(default_factory=list)  # ids, tried in this order; []: those of the default VPC
    security_group: str | None = None  # id; None: one is made for the run, and removed after it
    instance_profile: str | None = None  # name of the machines' role; `python -m launch iam` prints what it needs
    image: str | None = None  # ami-..., or the name of an SSM parameter that holds one; None: baretrain's own image
    python: str = "/opt/baretrain/venv/bin/python"  # interpreter of the image, with baretrain's packages
    market: str = setting("on-demand", among=MARKETS)  # how the machines are bought
    capacity_reservation: str | None = None  # id of a reservation or a capacity block
    placement_group: str = "true"  # true: one is made, machines close to one another; false; or the name of one
    public_address: bool = False  # only for machines with one network card
    disk_gib: int = setting(200, above=0)  # root volume
    max_wait_s: int = setting(3600, above=0)  # for capacity, and for an AWS that does not answer
    max_run_s: int = setting(86400, above=0)  # after which the run is asked to stop; every machine ends itself half an
    # hour later
    again: bool = False  # after an interruption ask for all machines again, until max_run_s is over

    def interpreter(self) -> str:
        return self.python

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.placement_group in ("True", "False"):  # Hydra reads true and false in this form
            self.placement_group = self.placement_group.lower()
        check(
            self.market != "capacity-block" or self.capacity_reservation is not None,
            "cluster.market=capacity-block needs the block's id: cluster.capacity_reservation=cr-...",
        )
        check(
            self.market != "spot" or self.capacity_reservation is None,
            "cluster.market=spot takes no reservation: leave out cluster.capacity_reservation",
        )
