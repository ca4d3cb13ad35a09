"""Settings of machines on EC2."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from launch.config import ClusterConfig
from train.config import check, setting

PYTHON = (
    "/opt/baretrain/venv/bin/python"  # the interpreter of images, which has baretrain's packages
)
MARKETS = ("on-demand", "spot", "capacity-block")


@dataclass(kw_only=True)
class Ec2Config(ClusterConfig):
    """Machines on EC2. A YAML file in conf/cluster/ sets an account's values that differ from these defaults."""

    kind: ClassVar[str] = "ec2"
    shares_disks: ClassVar[bool] = False

    gate: bool = True
    # The regions to try, in order; [] uses s3.region, or else the profile's region.
    regions: list[str] = field(default_factory=list)
    # The subnets to try, in order; [] uses the default VPC's.
    subnets: list[str] = field(default_factory=list)
    # The image, ami-... or an SSM parameter with its id; None uses the promoted image.
    image: str | None = None
    # The way in which the machines are paid for.
    market: str = setting("on-demand", among=MARKETS)
    # The id of a reservation or a capacity block.
    capacity_reservation: str | None = None
    # The size of the root volume, in GiB.
    disk_gib: int = setting(200, above=0)
    # The time after which the run is asked to stop, in seconds. Each machine shuts down half an hour later.
    max_run_s: int = setting(86400, above=0)

    def interpreter(self) -> str:
        return PYTHON

    @property
    def ends_after_s(self) -> float | None:
        return self.max_run_s

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.market != "capacity-block" or self.capacity_reservation is not None,
            "cluster.market=capacity-block needs the block's id: cluster.capacity_reservation=cr-...",
        )
        check(
            self.market != "spot" or self.capacity_reservation is None,
            "cluster.market=spot cannot use a reservation: leave out cluster.capacity_reservation",
        )
