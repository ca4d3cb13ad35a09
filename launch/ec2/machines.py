"""What a run has on EC2, by its tag: the only source that is true after whatever happened to whoever made it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launch.ec2.api import Api
from launch.ec2.request import RUN_TAG

ALIVE = ("pending", "running")


@dataclass(frozen=True)
class Machine:
    id: str
    region: str
    zone: str
    state: str  # pending, running, shutting-down, terminated, stopping, stopped
    host: str  # as the machine names itself
    reason: str  # why it ended, in EC2's words

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def look(api: Api, regions: Iterable[str], run_id: str) -> list[Machine]:
    """All machines of a run that EC2 still shows."""
    seen = []
    for region in regions:
        reservations = api.pages(region, "describe_instances", "Reservations", Filters=by_run(run_id))
        seen += [machine(region, each) for made in reservations for each in made["Instances"]]
    return seen


def by_run(run_id: str) -> list[dict[str, Any]]:
    return [{"Name": f"tag:{RUN_TAG}", "Values": [run_id]}]


def machine(region: str, seen: Mapping[str, Any]) -> Machine:
    return Machine(
        id=str(seen["InstanceId"]),
        region=region,
        zone=str(seen.get("Placement", {}).get("AvailabilityZone", "")),
        state=str(seen["State"]["Name"]),
        host=str(seen.get("PrivateDnsName", "")).split(".")[0],
        reason=str(seen.get("StateReason", {}).get("Message", "") or seen.get("StateTransitionReason", "")),
    )
